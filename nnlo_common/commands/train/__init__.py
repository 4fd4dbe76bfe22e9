"""The `nnlo train` command: a model, lists of files and options in, a folder with the trained model out.

    _settings        every option, once, as a typed field, or from its declaration; conflicts between options
    _option          one option: kind, range, help, and the reading of its value, also from TOML and YAML
    _command_line    flags from options             _stopping       what ends a training early
    _model_file      recognises and loads a model   _python_file    runs a Python file with a model
    _run_plan        the plan of a training, and the samples of one fold
    _trainer         base of both trainers          _run_folder     the folder of a run
    _job             the ranks and their agreement
    _train_command   the command, step by step

Nothing here knows a framework: `plug_in` finds `nnlo_keras._train` and `nnlo_torch._train` by name.
"""
