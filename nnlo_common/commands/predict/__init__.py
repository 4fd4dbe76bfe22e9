"""The `nnlo predict` and `nnlo tile` commands: models and files in, a file with what the models say out.

_predict_command  the options, the models of runs and files, and both commands
"""
