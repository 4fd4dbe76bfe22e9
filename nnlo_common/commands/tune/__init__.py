"""The `nnlo tune` command: repeated `nnlo train` over blocks of ranks, with other options each time.

    _request         the options of a search        _search_space   the parameters that are searched
    _space_reader    parses the search space        _default_trial  the first trial
    _block_layout    the ranks                      _search_folder  the search's folder
    _figure_of_merit the value of a trial
    _tune_command    the command, step by step      _optuna_study   the search itself
    _trial_training  one trial: `nnlo train` in a block
    _trial_watch     reports running trials         _trial_table    their lines on the terminal
    _search_facts    a search and its trials as plain values
    _search_result   the files and lines at the end
    _report_page     the page that shows it         _report_figures its figures

`train` defines a training and its options; `search` decides which block trains which trial.
"""
