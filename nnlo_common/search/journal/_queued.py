"""Queued trials: those that a script adds to its study at each start, and those that a journal knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search._compat import FIXED, number_in, storage_of
from nnlo_common.search.coordinator._endings import end_in

__all__ = ["Queued"]


class Queued:
    """The trials that wait in a study, each of which one trial of a journal may be.

    Args:
        study: the study, to which the trials of the journal come.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._waiting = study, list(study.get_trials(deepcopy=False))

    def check(self, journal: str) -> None:
        """Refuse a study with trials that have begun.

        Args:
            journal: what else holds trials.
        """
        if found := sum(trial.state is not TrialState.WAITING for trial in self._waiting):
            raise ConfigurationError(
                f"{journal} holds trials, and so does the study ({found}); give optimize a new study (in "
                "memory), which gets its trials from the journal"
            )

    def end(self, trial: FrozenTrial) -> int:
        """Give the study a trial that has ended, and return its number there."""
        # One that was begun more than once was queued again with what had been chosen the first time.
        queued = _fixed(trial) if FIXED in trial.system_attrs else None
        known = (one for one in self._waiting if queued is not None and {**queued, **_fixed(one)} == queued)
        waiting = next(known, None)
        if waiting is None:
            self._study.add_trial(trial)
            return self._last
        self._waiting.remove(waiting)
        end_in(storage_of(self._study), number_in(waiting), trial)
        return waiting.number

    def queue_again(self, chosen: Mapping[str, Any], user: Mapping[str, Any]) -> int:
        """Queue a trial that had begun, with the parameters chosen so far; return its number."""
        waiting = next((one for one in self._waiting if _may_have(_fixed(one), chosen)), None)
        if waiting is None:
            self._study.enqueue_trial(dict(chosen), user_attrs=dict(user))
            return self._last
        self._waiting.remove(waiting)
        storage, number = storage_of(self._study), number_in(waiting)
        storage.set_trial_system_attr(number, FIXED, {**_fixed(waiting), **chosen})
        for key, value in user.items():
            storage.set_trial_user_attr(number, key, value)
        return waiting.number

    @property
    def _last(self) -> int:
        return len(self._study.get_trials(deepcopy=False)) - 1


def _fixed(trial: FrozenTrial) -> dict[str, Any]:
    return dict(trial.system_attrs.get(FIXED, {}))


def _may_have(fixed: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    """Whether a trial that was queued with some parameters may have begun with these."""
    common = fixed.keys() & chosen.keys()
    return bool(common) and all(fixed[name] == chosen[name] for name in common)
