"""Results of ended trials: tell the study, and decide whether to try again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import optuna
from optuna.study import StudyDirection
from optuna.trial import Trial, TrialState

from nnlo_common.search._compat import number_in, storage_of
from nnlo_common.search._messages import Done
from nnlo_common.search.coordinator._endings import ERROR, FAILURE, SECONDS, Failures, keep_folds, tell
from nnlo_common.search.coordinator._running_trial import UnderWay
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.journal._record import Record

__all__ = ["RETRY_OF", "Results"]

_LOG = optuna.logging.get_logger("optuna.study")
#: The user attribute that names the failed trial that a trial repeats.
RETRY_OF = "nnlo:retry of"
_TRIES = "nnlo:tries"


class Results:
    """The ends of the trials of a study.

    Args:
        study: the study.
        folds: in how many folds each trial is trained.
        retries: how often a failed trial is tried again.
        target: the value at which the search ends.
        failures: what a failed trial tells the sampler.
        time_left: what learns how long trials take.
        record: where to write down what happens.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        folds: int,
        retries: int,
        target: float | None,
        failures: Failures,
        time_left: TimeLeft,
        record: Record,
    ) -> None:
        self._study, self._folds, self._retries, self._target = study, folds, retries, target
        self._failures, self._time, self._record = failures, time_left, record

    def take_in(self, under: UnderWay, *, interrupted: bool, stopped: bool) -> bool:
        """Take in the end of a trial; say whether it waits to be tried again.

        Args:
            under: the trial.
            interrupted: whether what is running is broken off to be trained again by the same command.
            stopped: whether what is running is broken off.
        """
        trial, ending = under.trial, under.result
        if self._folds > 1:
            keep_folds(trial, under.outcomes)
        trial.set_user_attr(SECONDS, round(under.seconds, 3))
        if ending.state in ("complete", "pruned"):
            self._time.took(under.seconds)
            tell(self._study, trial, ending.state, ending.values, self._failures)
            self._write_down(trial)
            return False
        trial.set_user_attr(ERROR, ending.error)
        again = False
        if ending.state == "failed":
            trial.set_user_attr(FAILURE, ending.failure or "error")
            _LOG.warning("trial %d failed:\n%s", trial.number, ending.error)
            again = (interrupted or not stopped) and self._queued_again(trial)
        # What is tried again has not failed for good, so it tells the sampler nothing yet.
        tell(self._study, trial, "halted" if again else ending.state, None, self._failures)
        if ending.state == "failed" or not interrupted:
            self._write_down(trial)
        return again

    def reached(self, ending: Done) -> bool:
        """Say whether the target is reached."""
        if self._target is None or ending.state != "complete":
            return False
        if self._study.direction is StudyDirection.MAXIMIZE:
            return ending.values[0] >= self._target
        return ending.values[0] <= self._target

    def withdrawn(self, trials: Iterable[Trial], reason: str) -> None:
        """Let trials that no block has begun stand open no more, nor those that wait to be tried again."""
        waiting = self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])
        again = [number_in(trial) for trial in waiting if RETRY_OF in trial.user_attrs]
        storage = storage_of(self._study)
        for number in [*map(number_in, trials), *again]:
            storage.set_trial_user_attr(number, ERROR, f"not begun: {reason}")
            storage.set_trial_state_values(number, TrialState.FAIL)

    def _queued_again(self, trial: Trial) -> bool:
        attributes: dict[str, Any] = trial.user_attrs
        tries = attributes.get(_TRIES, 0)
        if tries >= self._retries:
            return False
        first = attributes.get(RETRY_OF, trial.number)
        self._study.enqueue_trial(trial.params, user_attrs={RETRY_OF: first, _TRIES: tries + 1})
        trials = self._study.get_trials(deepcopy=False)
        self._record.queued(trials[-1], trials[trial.number])
        return True

    def _write_down(self, trial: Trial) -> None:
        self._record.finished(self._study.get_trials(deepcopy=False)[trial.number])
