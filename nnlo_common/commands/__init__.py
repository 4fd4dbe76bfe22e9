"""The `nnlo` command: train, tune, doctor, bench. Nothing else depends on it.

Holds: parsing, the folders of runs, the order of each command, reports for people.
May import: every room.
Must not know: frameworks, but through the half of the driver that `nnlo_keras` and `nnlo_torch` bring.
"""
