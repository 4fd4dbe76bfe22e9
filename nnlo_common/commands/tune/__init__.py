"""The `nnlo tune` command: repeated `nnlo train` over blocks of ranks, with other options each time.

    _request         the options of a search        _search_space   the parameters that are searched
    _search_folder   the search's folder            _search_facts   a search and its trials as plain values
    _tune_command    the command, step by step, and the first trial
    _trial_training  the search itself, and one trial of it: `nnlo train` in a block, watched
    _search_result   the files and lines at the end  _figure_of_merit  the value of a trial
    _report_page     the page that shows it, with its figures

`train` defines a training and its options; `search` decides which block trains which trial.
"""
