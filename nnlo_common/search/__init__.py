"""Hyper-parameter search over blocks of ranks, one trial per block; needs Optuna.

Holds: `coordinator/` (a state machine that hands out trials), `block/` (the ranks that train them),
messages between the two, `samplers/`, the journal (results on disk).
May import: all rooms but `commands`.
Must not know: frameworks.
"""

from __future__ import annotations

from nnlo_common.search._optimize import optimize

__all__ = ["optimize"]
