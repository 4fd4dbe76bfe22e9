"""The `nnlo train` command: a model, lists of files and options in, a folder with the trained model out.

    _settings        every option, once, as a typed field; which of them do not go together
    _option          what is made of such a field: kind, range and help, and how a value is read
    _command_line    flags from options             _option_files   options from TOML and YAML, and back
    _algorithm_options   the options of the algorithms, from the fields of their dataclasses
    _model_file      recognises and loads a model   _python_file    what a Python file with a model says
    _run_plan        what is to be trained          _fold_samples   the samples of one fold
    _trainer         what is trained with           _devices        cores and GPUs of a rank
    _job             the ranks, who agree           _run_folder     what is written down
    _train_command   the order of it all

Nothing here knows a framework: `nnlo_keras._train` and `nnlo_torch._train` say what only they can say, and
are found by name.
"""
