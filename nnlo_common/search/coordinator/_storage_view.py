"""View of the study as it was when a trial began, for as long as the trial lasts.

In a lock-step search a trial sees no later events. Samplers and pruners see the trials finished before it,
the trials running then with the parameters chosen at their start, and the trial's own progress.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, cast

import optuna
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.search._compat import has_no_name, loop_begins, storage_of, study_number
from nnlo_common.search.samplers._seeding import Seeded

__all__ = ["StorageView", "ask_at_this_moment"]


def ask_at_this_moment(study: optuna.Study, seed: int, under_way: Mapping[int, FrozenTrial]) -> Trial:
    """Begin the next trial and choose its joint parameters; it sees the study as it is now.

    Args:
        study: the study.
        seed: seeds its random numbers.
        under_way: unfinished trials, as other trials see them.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    number = waiting[0].number if waiting else len(study.get_trials(deepcopy=False))
    then = dict(under_way)

    def as_it_was(trials: list[FrozenTrial]) -> list[FrozenTrial]:
        return [then.get(trial.number, trial) for trial in trials[: number + 1]]

    moment = optuna.Study(
        study.study_name,
        cast(BaseStorage, StorageView(study, as_it_was)),
        Seeded(study.sampler, seed),
        # Copy it: some pruners learn from the first trials they judge, and timing decides which these are.
        copy.deepcopy(study.pruner),
    )
    if has_no_name(study):  # Hyperband seeds its brackets with the name
        moment.study_name = ""
    loop_begins(moment)
    trial = moment.ask()
    _ = trial.relative_params  # else Optuna chooses only at the first suggest_... call
    return trial


class StorageView:
    """A storage that shows only some trials, or earlier states of them.

    Args:
        study: the study to read from and write to.
        picked: selects the trials to show.
    """

    def __init__(
        self, study: optuna.Study, picked: Callable[[list[FrozenTrial]], Iterable[FrozenTrial]]
    ) -> None:
        self._storage, self._study_id, self._picked = storage_of(study), study_number(study), picked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_study_id_from_name(self, name: str) -> int:  # noqa: ARG002
        """Return this study's number; Hyperband's brackets ask under other names."""
        return self._study_id

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the visible trials."""
        trials = self._picked(self._storage.get_all_trials(study_id, deepcopy=False))
        found = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the best of the visible trials."""
        trials = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not trials:
            raise ValueError("No trials are completed yet.")
        best = max if self._storage.get_study_directions(study_id)[0] is StudyDirection.MAXIMIZE else min
        return best(trials, key=lambda trial: trial.value or 0.0)
