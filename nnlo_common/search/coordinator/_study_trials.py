"""Trials of an Optuna study: chosen by a chooser, reported to the study, retried, written to the journal."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import optuna
from optuna.distributions import json_to_distribution
from optuna.pruners import WilcoxonPruner
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, Trial, TrialState

from nnlo_common.base._errors import ProtocolError
from nnlo_common.search._channels import Death, TeamMessage
from nnlo_common.search._compat import (
    has_no_name,
    loop_begins,
    loop_ends,
    number_in,
    storage_of,
    suggested,
    was_stopped,
)
from nnlo_common.search._journal import SearchRecord, make_plain, packed
from nnlo_common.search._search_messages import (
    Done,
    Note,
    ParameterRequest,
    PruneRequest,
    RequestAnswer,
    SearchMessage,
    Start,
    TrialReport,
)
from nnlo_common.search.coordinator._parameter_choice import (
    LocalChooser,
    LockstepChooser,
    RemoteChooser,
    RunningTrial,
    TrialSource,
)
from nnlo_common.search.coordinator._trial_results import (
    COORDINATOR,
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
from nnlo_common.search.samplers._seeding import seed_of

__all__ = ["RETRY_OF", "StudyCallback", "StudyTrials", "known_to_all"]

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
        self._by_fold = folds > 1 and isinstance(study.pruner, WilcoxonPruner)
        self._known = known_to_all(study) if known is None else known
        # For copies: the trials that have changed since the last, and the states of unfinished ones then.
        self._touched: set[int] = set()
        self._copied, self._states = 0, dict[int, TrialState]()
        trials = study.get_trials(deepcopy=False)
        earlier = (one for one in trials[self._known :] if one.state is TrialState.COMPLETE)
        if any(self._reached(one.values) for one in earlier if FAILURE not in one.user_attrs):
            n_trials = 0  # an earlier start of this search has reached the target
        self._names = {trial.user_attrs.get(NAME) for trial in trials}
        loop_begins(study)
        self.chooser: LocalChooser
        if lockstep:
            self.chooser = LockstepChooser(study, blocks, n_trials, seed)
        elif searchers:
            self.chooser = RemoteChooser(study, blocks, n_trials, searchers)
        else:
            self.chooser = LocalChooser(study, blocks, n_trials)

    # -- beginning ------------------------------------------------------------------------------------

    def take(self, block: int, *, first: bool, living: int) -> Trial | None:  # noqa: ARG002
        """Return the next trial for a block, with a name; None if none is chosen yet."""
        trial = self.chooser.take(block, first=first)
        if trial is None:
            return None
        if NAME not in trial.user_attrs:  # a resumed trial has one
            names = (f"{trial.number:04}" + (f"-{turn}" if turn > 1 else "") for turn in itertools.count(1))
            trial.set_user_attr(NAME, next(name for name in names if name not in self._names))
        self._names.add(trial.user_attrs[NAME])
        self._touched.add(trial.number)
        self._record.begun(self._study.get_trials(deepcopy=False)[trial.number])
        return trial

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
        """Handle a message from a team's leader about its trial; return the replies.

        Raises:
            ProtocolError: the message is not about a trial.
        """
        self._touched.add(running.trial.number)
        if isinstance(message, ParameterRequest):
            return [TeamMessage(team, self._suggest(running.trial, message), leader_only=True)]
        if isinstance(message, PruneRequest):
            running.asking.add(team)
            return self.judged(running)
        if isinstance(message, TrialReport):
            if not self._by_fold:
                running.report(running.running[team], message.step, message.value)
                self._tell_means(running)
        elif isinstance(message, Note):
            _note(running.trial, message)
        else:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the coordinator")
        return []

    def judged(self, running: RunningTrial) -> list[TeamMessage]:
        """Send a trial's teams the pruner's verdict once all have asked, so that all get the same one."""
        if running.halted or not running.all_ask:
            return []
        # Some pruners return NumPy's bool.
        prune = not self._by_fold and running.judged and bool(running.trial.should_prune())
        asking, running.asking = sorted(running.asking), set()
        answers = [(team, running.runs[team]) for team in asking]
        return [TeamMessage(team, RequestAnswer(run, prune), leader_only=True) for team, run in answers]

    def fold_done(self, running: RunningTrial, fold: int, message: Done) -> None:
        """Report the end of a fold to the pruner."""
        self._touched.add(running.trial.number)
        if self._folds == 1 or running.ending is not None:
            return
        if not self._by_fold:
            self._tell_means(running)
        elif len(self._study.directions) == 1:
            running.trial.report(message.values[0], fold)
            if not running.over and running.trial.should_prune():
                running.ending = Done(message.run, "pruned")

    def add_helpers(self, running: RunningTrial, blocks: Iterable[int], now_s: float) -> None:
        self._touched.add(running.trial.number)
        helpers = running.trial.user_attrs.get(HELPERS, [])
        fresh = sorted({*blocks} - {running.block, *(block for block, _ in helpers)})
        if fresh:
            running.trial.set_user_attr(HELPERS, [*helpers, *([block, now_s] for block in fresh)])
        for block in fresh:
            _LOG.info("block %d helps to train trial %d", block, running.trial.number)

    def _suggest(self, trial: Trial, message: ParameterRequest) -> RequestAnswer:
        distribution = json_to_distribution(message.distribution)
        try:
            value = suggested(trial, message.name, distribution)
        except ValueError as error:
            if message.name not in trial.distributions:
                raise
            return RequestAnswer(message.run, 0.0, f"suggest {message.name!r} differs between folds: {error}")
        internal = float(distribution.to_internal_repr(value))
        self._record.suggested(trial.number, message.name, internal, message.distribution)
        return RequestAnswer(message.run, internal)

    def _tell_means(self, running: RunningTrial) -> None:
        for step, value in running.means():
            running.trial.report(value, step)

    # -- ending ---------------------------------------------------------------------------------------

    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:
        """Report a trial's result to the study; queue it again for a retry."""
        trial, ending = running.trial, running.result
        self._touched.add(trial.number)
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
        self.chooser.to_begin += again and not interrupted
        if ending.state == "complete" and self._reached(ending.values):
            self.stop_reason = f"trial {trial.number} has reached {ending.values[0]}"
        if self.stop_reason or was_stopped(self._study):  # e.g. a grid has no combinations left
            self.chooser.to_begin = 0
        self.chooser.told(trial.number)

    def _call_back(self, trial: Trial) -> None:
        """Call the user's callbacks; if one stops the study, begin no trial that was chosen ahead."""
        # A sampler that has nothing left stops the study, too, but wants its last choices trained.
        spent = was_stopped(self._study)
        for callback in self._callbacks:
            callback(self._study, copy.deepcopy(self._study.get_trials(deepcopy=False)[trial.number]))
            make_plain(self._study)
        if was_stopped(self._study) and not spent:
            self._called_off = True
            self.withdraw("a callback stopped the study")

    def _reached(self, values: Sequence[float]) -> bool:
        if self._target is None:
            return False
        if self._study.direction is StudyDirection.MAXIMIZE:
            return values[0] >= self._target
        return values[0] <= self._target

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
        for number in [*(number_in(trial) for trial in self.chooser.withdraw()), *again]:
            storage.set_trial_user_attr(number, ERROR, f"not begun: {reason}")
            storage.set_trial_state_values(number, TrialState.FAIL)

    # -- copies for spares ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "to_begin": self.chooser.to_begin,
            "ahead": [trial.number for trial in self.chooser.ahead],
            "stop_reason": self.stop_reason,
            "called_off": self._called_off,
            "stopped": was_stopped(self._study),
            "name": self._study.study_name,
            "user": self._study.user_attrs,
        }

    def changes(self) -> tuple[dict[str, Any], list[str]]:
        trials = self._study.get_trials(deepcopy=False)
        changed = {number for number, state in self._states.items() if trials[number].state is not state}
        changed |= self._touched | set(range(self._copied, len(trials)))
        changed |= {trial.number for trial in self.chooser.ahead}
        self._states = {
            number: trials[number].state
            for number in self._states.keys() | changed
            if not trials[number].state.is_finished()
        }
        self._touched.clear()
        self._copied = len(trials)
        return {str(number): packed(trials[number]) for number in sorted(changed)}, self._record.fresh_lines()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.chooser.restore(state["to_begin"], [self.trial(number) for number in state["ahead"]])
        self.stop_reason, self._called_off = state["stop_reason"], state["called_off"]
        if has_no_name(self._study):  # pruners draw from it
            self._study.study_name = state["name"]
        for key, value in state["user"].items():
            if key != COORDINATOR:  # one before this rank
                self._study.set_user_attr(key, value)
        if state["stopped"]:
            self._study.stop()

    def trial(self, number: int) -> Trial:
        return Trial(self._study, number_in(self._study.get_trials(deepcopy=False)[number]))

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


def _note(trial: Trial, message: Note) -> None:
    if message.constraint:
        trial.set_constraint(message.key, message.value)
    else:
        trial.set_user_attr(message.key, message.value)
