"""The `nnlo tune` command: `nnlo train` over blocks of ranks, again and again, with other options each time.

    _request         the options of a search        _search_space   what is searched
    _space_reader    how that is written down       _default_trial  the first trial
    _block_layout    the ranks                      _search_folder  the search's folder
    _figure_of_merit what makes one trial better than another
    _tune_command    the order of it all            _optuna_study   the search itself
    _trial_training  one trial: `nnlo train` in a block
    _trial_watch     looks after running trials     _trial_table    what is told of them
    _search_facts    a search and its trials as plain values
    _search_result   what is written down at the end
    _report_page     the page that shows it         _charts, _svg   its drawings

What a training is, and all its options, is the business of `train`; who trains when is that of `search`.
"""
