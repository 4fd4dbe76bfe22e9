"""Queued trials: matches those that a script queues at each start with those in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search._compat import FIXED, number_in, storage_of
from nnlo_common.search.journal._packed_trial import end_in

__all__ = ["QueuedTrials"]


class QueuedTrials:
    """The waiting trials of a study, which trials of a journal may match.

    Args:
        study: the study that receives the journal's trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._waiting = study, list(study.get_trials(deepcopy=False))

    def check(self, journal: str) -> None:
        """Refuse a study whose trials have begun.

        Args:
            journal: names the journal, for the message.
        """
        if found := sum(trial.state is not TrialState.WAITING for trial in self._waiting):
            raise ConfigurationError(
                f"{journal} holds trials, and so does the study ({found}); give optimize a new in-memory "
                "study, which gets its trials from the journal"
            )

    def end(self, trial: FrozenTrial) -> int:
        """Add a finished trial to the study; return its number there."""
        # A trial begun more than once was queued again with the parameters of its first start.
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
        """Queue a trial that began, with the parameters chosen so far; return its number."""
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
    """Whether a trial queued with `fixed` may be one that began with `chosen`."""
    common = fixed.keys() & chosen.keys()
    return bool(common) and all(fixed[name] == chosen[name] for name in common)
