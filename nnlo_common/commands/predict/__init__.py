"""The `nnlo predict` and `nnlo tile` commands: models and files in, a file with what the models say out.

_use_options       the options of both commands
_used_models       models of runs and files, loaded
_predict_command   `nnlo predict`
_tile_command      `nnlo tile`
"""
