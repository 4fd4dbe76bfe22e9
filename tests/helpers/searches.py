"""Coordinators of a study's search, without ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import optuna

from nnlo_common.search.coordinator._coordinator import Coordinator
from nnlo_common.search.coordinator._study_trials import StudyTrials
from nnlo_common.search.coordinator._time_left import TimeLeft


def study_coordinator(
    study: optuna.Study,
    *,
    blocks: int,
    n_trials: int,
    teams: int = 1,
    search_ranks: int = 0,
    folds: int = 1,
    lockstep: bool = False,
    elastic: bool = False,
    time_left: TimeLeft | None = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> Coordinator:
    """Make a coordinator from its own arguments and those of `StudyTrials`."""
    searchers = range(blocks * teams, blocks * teams + search_ranks)
    both: dict[str, Any] = {"folds": folds, "lockstep": lockstep, "searchers": searchers}
    source = StudyTrials(study, blocks, n_trials, **both, **options)
    timing: dict[str, Any] = {"time_left": time_left, "clock": clock}
    return Coordinator(source, blocks=blocks, teams=teams, elastic=elastic, **both, **timing)
