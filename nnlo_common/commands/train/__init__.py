"""The `nnlo train` command: a model, lists of files and options in, a folder with the trained model out.

    _settings   every option, once; what it may be, and which do not go together
    _modes      the options of the algorithms, which are those of their dataclasses
    _options    what an option is, and how its value is read, from whatever it was given by
    _parser     the command line          _config   TOML and YAML
    _model      what a model file is      _module   what a Python file with a model says
    _job        the ranks, who agree      _folder   what is written down
    _run        the order of it all       _conduct  how any command begins and ends

Nothing here knows a framework: `nnlo_keras._train` and `nnlo_torch._train` say what only they can say, and
are found by name.
"""
