"""The `nnlo tune` command: `nnlo train` over blocks of ranks, again and again, with other options each time.

    _request    what the command line asks for     _parser   its flags     _wording  flags for arguments
    _space      what is searched                   _reading  how that is written down
    _layout     the ranks                          _folder   the search's folder
    _figure     what makes one trial better than another
    _run        the order of it all                _trainings  one trial: `nnlo train` in a block
    _table      what is told meanwhile             _watch    who looks after the trials meanwhile
    _outcome    what is written down at the end    _page, _pictures, _drawing   the page that shows it

What a training is, and all its options, is the business of `_train`; who trains when is that of `tune`.
"""
