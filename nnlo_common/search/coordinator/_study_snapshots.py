"""The study as a trial has found it when it began, for as long as the trial lasts.

To the trials of a lock-step search nothing happens while they run: what samplers and pruners look at are the
trials told before, and those under way with what was chosen for them when they began. A trial's own progress
is in it.
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

__all__ = ["Seen", "ask_at_this_moment"]


def ask_at_this_moment(study: optuna.Study, seed: int, under_way: Mapping[int, FrozenTrial]) -> Trial:
    """Begin the next trial, and choose what is chosen together; it never sees later than now.

    Args:
        study: the study.
        seed: of its random numbers.
        under_way: the trials that have begun and are not told, as others are to see them.
    """
    waiting = study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
    number = waiting[0].number if waiting else len(study.get_trials(deepcopy=False))
    then = dict(under_way)

    def as_it_was(trials: list[FrozenTrial]) -> list[FrozenTrial]:
        return [then.get(trial.number, trial) for trial in trials[: number + 1]]

    moment = optuna.Study(
        study.study_name,
        cast(BaseStorage, Seen(study, as_it_was)),
        Seeded(study.sampler, seed),
        # Some learn from the first trials that they are asked about, and which these are is a matter of time.
        copy.deepcopy(study.pruner),
    )
    if has_no_name(study):  # Hyperband draws from it
        moment.study_name = ""
    loop_begins(moment)
    trial = moment.ask()
    _ = trial.relative_params  # or Optuna would choose them when the first is asked for
    return trial


class Seen:
    """A storage of which only some trials are seen, or as they were.

    Args:
        study: where all goes that is written, and the trials come from.
        picked: what is to be seen of all trials.
    """

    def __init__(
        self, study: optuna.Study, picked: Callable[[list[FrozenTrial]], Iterable[FrozenTrial]]
    ) -> None:
        self._storage, self._study_id, self._picked = storage_of(study), study_number(study), picked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def get_study_id_from_name(self, name: str) -> int:  # noqa: ARG002
        """Return the number of the only study that is asked for, whatever its bracket is called."""
        return self._study_id

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """Return the trials that are seen."""
        trials = self._picked(self._storage.get_all_trials(study_id, deepcopy=False))
        found = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(found) if deepcopy else found

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """Return the best of the trials that are seen."""
        trials = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.COMPLETE,))
        if not trials:
            raise ValueError("No trials are completed yet.")
        best = max if self._storage.get_study_directions(study_id)[0] is StudyDirection.MAXIMIZE else min
        return best(trials, key=lambda trial: trial.value or 0.0)
