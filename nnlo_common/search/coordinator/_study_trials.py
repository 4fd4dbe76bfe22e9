"""Trials of an Optuna study: chosen by a chooser, reported to the study, retried, written to the journal."""

from __future__ import annotations

import copy
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import optuna
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.search._compat import loop_begins, loop_ends, number_in, storage_of, was_stopped
from nnlo_common.search.coordinator._coordinator import Coordinator
from nnlo_common.search.coordinator._parameter_choice import LocalChooser, LockstepChooser
from nnlo_common.search.coordinator._remote_choice import RemoteChooser
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.coordinator._trial_requests import TrialRequests
from nnlo_common.search.coordinator._trial_results import (
    ERROR,
    FAILURE,
    HELPERS,
    NAME,
    SECONDS,
    FailurePolicy,
    keep_folds,
    log_best,
    tell,
)
from nnlo_common.search.coordinator._trial_source import TrialSource
from nnlo_common.search.journal._journal import SearchRecord
from nnlo_common.search.journal._packed_trial import packed
from nnlo_common.search.messages._search_messages import Chosen, Done, SearchMessage, Start
from nnlo_common.search.messages._team_events import Death, TeamMessage
from nnlo_common.search.samplers._seeding import seed_of

__all__ = ["RETRY_OF", "StudyCallback", "StudyTrials", "known_to_all", "study_coordinator"]

#: A function called after each trial, as those of `Study.optimize`.
StudyCallback: TypeAlias = Callable[[optuna.Study, FrozenTrial], object]

_LOG = optuna.logging.get_logger("optuna.study")
#: The user attribute that names the failed trial that a trial repeats.
RETRY_OF = "nnlo:retry of"
_TRIES = "nnlo:tries"


def known_to_all(study: optuna.Study) -> int:
    """Count the finished trials at the head of a study; the script has given these to all ranks."""
    trials = study.get_trials(deepcopy=False)
    waiting = (number for number, trial in enumerate(trials) if not trial.state.is_finished())
    return next(waiting, len(trials))


def study_coordinator(
    study: optuna.Study,
    *,
    blocks: int,
    n_trials: int,
    teams: int = 1,
    folds: int = 1,
    time_left: TimeLeft | None = None,
    clock: Callable[[], float] = time.time,
    search_ranks: int = 0,
    lockstep: bool = False,
    elastic: bool = False,
    **options: Any,
) -> Coordinator:
    """Make the coordinator of a study's search, from its own arguments and those of `StudyTrials`."""
    searchers = range(blocks * teams, blocks * teams + search_ranks)
    source = StudyTrials(
        study, blocks, n_trials, folds=folds, searchers=searchers, lockstep=lockstep, **options
    )
    return Coordinator(
        source,
        blocks=blocks,
        teams=teams,
        folds=folds,
        time_left=time_left,
        clock=clock,
        search_ranks=search_ranks,
        lockstep=lockstep,
        elastic=elastic,
    )


class StudyTrials(TrialSource):
    """The trials of a study, which lives on this rank only, with all random numbers and records.

    Args:
        study: the study.
        blocks: the number of blocks.
        n_trials: how many trials to finish; a trial and its retries count once.
        folds: folds per trial.
        searchers: the teams of the search ranks.
        lockstep: whether to choose each trial with the same results known, at any pace of the blocks.
        seed: the study's seed.
        retries: how often to retry a failed trial.
        target: the value at which the search ends.
        failures: what the sampler learns of a failed trial; None: nothing.
        record: records what happens, for a resume.
        known: how many trials of the study all ranks already have; None: `known_to_all(study)`.
        callbacks: called after each trial that ended for good.
    """

    def __init__(
        self,
        study: optuna.Study,
        blocks: int,
        n_trials: int,
        *,
        folds: int = 1,
        searchers: Sequence[int] = (),
        lockstep: bool = False,
        seed: int = 0,
        retries: int = 0,
        target: float | None = None,
        failures: FailurePolicy | None = None,
        record: SearchRecord | None = None,
        known: int | None = None,
        callbacks: Sequence[StudyCallback] = (),
    ) -> None:
        self._callbacks, self._called_off = tuple(callbacks), False  # called off: by one of them
        self._study, self._folds, self._seed = study, folds, seed
        self._retries, self._target = retries, target
        self._failures, self._record = failures or FailurePolicy(study), record or SearchRecord()
        self._requests = TrialRequests(study, folds, self._record)
        self._known = known_to_all(study) if known is None else known
        self._names = {trial.user_attrs.get(NAME) for trial in study.get_trials(deepcopy=False)}
        loop_begins(study)
        self._chooser: LocalChooser
        if lockstep:
            self._chooser = LockstepChooser(study, blocks, n_trials, seed)
        elif searchers:
            self._chooser = RemoteChooser(study, blocks, n_trials, searchers)
        else:
            self._chooser = LocalChooser(study, blocks, n_trials)

    # -- beginning ------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        return self._chooser.open > 0

    @property
    def pending(self) -> bool:
        return self._chooser.pending

    def left(self) -> int:
        return self._chooser.open

    def take(self, block: int, *, first: bool, living: int) -> Trial | None:  # noqa: ARG002
        """Return the next trial for a block, with a name; None if none is chosen yet."""
        trial = self._chooser.take(block, first=first)
        if trial is None:
            return None
        if NAME not in trial.user_attrs:  # a resumed trial has one
            names = (f"{trial.number:04}" + (f"-{turn}" if turn > 1 else "") for turn in itertools.count(1))
            trial.set_user_attr(NAME, next(name for name in names if name not in self._names))
        self._names.add(trial.user_attrs[NAME])
        self._record.begun(self._study.get_trials(deepcopy=False)[trial.number])
        return trial

    def think(self, living: int) -> bool:
        return self._chooser.think(living)

    def orders(self, idle: int, living: int) -> list[TeamMessage]:
        return self._chooser.orders(idle, living)

    def chosen(self, team: int, message: Chosen) -> None:
        self._chooser.chosen(team, message)

    def lose_search_rank(self, team: int) -> int:
        return self._chooser.lost(team)

    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        trial: Trial = running.trial
        return Start(
            run,
            seed_of(self._seed, trial.number * self._folds + fold),
            len(self._study.directions),
            json.loads(json.dumps(trial.user_attrs)),
            trial.number,
            fold,
            self._folds,
            self._seed,
        )

    # -- training -------------------------------------------------------------------------------------

    def handle(self, team: int, running: RunningTrial, message: SearchMessage) -> list[TeamMessage]:
        return self._requests.handle(team, running, message)

    def judged(self, running: RunningTrial) -> list[TeamMessage]:
        return self._requests.judged(running)

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:
        self._requests.fold_done(running, fold, message)

    def add_helpers(self, running: RunningTrial, blocks: Iterable[int], now_s: float) -> None:
        helpers = running.trial.user_attrs.get(HELPERS, [])
        fresh = sorted({*blocks} - {running.block, *(block for block, _ in helpers)})
        if fresh:
            running.trial.set_user_attr(HELPERS, [*helpers, *([block, now_s] for block in fresh)])
        for block in fresh:
            _LOG.info("block %d helps to train trial %d", block, running.trial.number)

    # -- ending ---------------------------------------------------------------------------------------

    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:
        """Report a trial's result to the study; queue it again for a retry."""
        trial, ending = running.trial, running.result
        if self._folds > 1:
            keep_folds(trial, running.outcomes)
        trial.set_user_attr(SECONDS, round(running.seconds, 3))
        again = False
        if ending.state not in ("complete", "pruned"):
            trial.set_user_attr(ERROR, ending.error)
            if ending.state == "failed":
                trial.set_user_attr(FAILURE, ending.failure or "error")
                _LOG.warning("trial %d failed:\n%s", trial.number, ending.error)
                open_to_retry = interrupted or not (stopped or self._called_off)
                again = open_to_retry and self._queue_retry(trial)
        # A trial to retry has not failed for good: the sampler learns nothing of it yet.
        tell(self._study, trial, "halted" if again else ending.state, ending.values, self._failures)
        if ending.state != "halted" or not interrupted:
            self._record.finished(self._study.get_trials(deepcopy=False)[trial.number])
        if ending.state != "halted" and not again:
            self._call_back(trial)
        self._chooser.left += again and not interrupted
        if self._reached(ending):
            self.stop_reason = f"trial {trial.number} has reached {ending.values[0]}"
        if self.stop_reason or was_stopped(self._study):  # e.g. a grid has no combinations left
            self._chooser.left = 0
        self._chooser.told(trial.number)

    def _call_back(self, trial: Trial) -> None:
        """Call the user's callbacks; if one stops the study, begin no trial that was chosen ahead."""
        # A sampler that has nothing left stops the study, too, but wants its last choices trained.
        spent = was_stopped(self._study)
        for callback in self._callbacks:
            callback(self._study, copy.deepcopy(self._study.get_trials(deepcopy=False)[trial.number]))
        if was_stopped(self._study) and not spent:
            self._called_off = True
            self.withdraw("a callback stopped the study")

    def _reached(self, ending: Done) -> bool:
        if self._target is None or ending.state != "complete":
            return False
        if self._study.direction is StudyDirection.MAXIMIZE:
            return ending.values[0] >= self._target
        return ending.values[0] <= self._target

    def _queue_retry(self, trial: Trial) -> bool:
        attributes: dict[str, Any] = trial.user_attrs
        tries = attributes.get(_TRIES, 0)
        if tries >= self._retries:
            return False
        first = attributes.get(RETRY_OF, trial.number)
        self._study.enqueue_trial(trial.params, user_attrs={RETRY_OF: first, _TRIES: tries + 1})
        trials = self._study.get_trials(deepcopy=False)
        self._record.queued(trials[-1], trials[trial.number])
        return True

    def withdraw(self, reason: str) -> None:
        """Fail the trials that this search began or queued but did not train; keep the user's own queue."""
        waiting = self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])
        again = [number_in(trial) for trial in waiting if RETRY_OF in trial.user_attrs]
        storage = storage_of(self._study)
        for number in [*(number_in(trial) for trial in self._chooser.withdraw()), *again]:
            storage.set_trial_user_attr(number, ERROR, f"not begun: {reason}")
            storage.set_trial_state_values(number, TrialState.FAIL)

    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:
        """End the search; return the finished trials that other ranks lack."""
        log_best(self._study)
        if lost:
            _LOG.warning("the search ended without %s, which died", "; ".join(map(str, lost)))
        loop_ends(self._study)
        trials = self._study.get_trials(deepcopy=False)[self._known :]
        return tuple(packed(trial) for trial in trials if trial.state.is_finished())

    def warn(self, text: str) -> None:
        _LOG.warning("%s", text)
