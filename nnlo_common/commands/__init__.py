"""The `nnlo` command: demo, train, tune, report, top, doctor, bench. Nothing else depends on it.

Holds: parsing, the folders of runs, the steps of each command, reports for people.
May import: every room.
Must not know: frameworks, except through the `_train` modules of `nnlo_keras` and `nnlo_torch`.
"""
