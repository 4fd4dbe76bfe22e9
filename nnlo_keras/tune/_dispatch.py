"""Trials of an oracle on blocks of ranks, as a state machine: messages in, messages out; no MPI.

    team: Note (its result), Done ─► Start to that team, or to others     the next fold, the next trial
                                  └► Halt to the trial's other teams      one of its folds has failed
    nothing left, nobody trains ──► End to all, with the state of the oracle

A team is what trains together: a block, or its part for one fold. The oracle lives here only, and hears of a
trial what it hears of one in a search without blocks. In lock-step it hears of trials in the order in which
it has chosen them, and chooses the next when it has heard of the oldest, so that the pace of blocks does not
matter.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras_tuner
from keras_tuner.engine.hyperparameters import HyperParameters
from keras_tuner.src.engine.tuner_utils import average_metrics_dicts

from nnlo_common import PeerLostError, ProtocolError
from nnlo_common.plugin import (
    SIGNAL,
    Death,
    Done,
    End,
    Halt,
    Note,
    SearchMessage,
    Start,
    TeamMessage,
    TimeLeft,
    warn,
)

__all__ = ["FATAL", "NOT_AGAIN", "RESULT", "Dispatch", "averaged"]

#: The attribute of a run that holds what it has found.
RESULT = "nnlo:result"
#: What the traceback of an error holds that ends the search, or that ends its trial for good.
FATAL = "(keras-tuner ends a search at an error like this)"
NOT_AGAIN = "(keras-tuner does not try a trial again after an error like this)"

# How often an oracle may answer that it waits though no trial runs: it may compute, but not for ever.
_PATIENCE = 1000


@dataclass
class _Trial:
    """A trial on its block.

    Attributes:
        trial: the oracle's.
        name: of who trains it, as the oracle knows them.
        waiting: the folds that have not begun.
        began_s: when it has.
        running: the number of the run on each team, with its fold.
        results: of the folds that have ended well.
        problem: why it is not to go on.
        halted: whether it was broken off by others.
        ended: whether nothing of it runs any more.
    """

    trial: Any
    name: str
    waiting: deque[int]
    began_s: float
    running: dict[int, tuple[int, int]] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)
    problem: str = ""
    halted: bool = False
    ended: bool = False


class Dispatch:
    """Hands out the trials of an oracle and takes in what becomes of them.

    Args:
        tuner: whose oracle it is, and whose `on_trial_...` methods are called.
        blocks: how many blocks there are.
        teams: how many teams each block has.
        folds: how many folds each trial has.
        lockstep: whether the oracle is to hear of trials in the order in which it has chosen them.
        time_left: how long there is; None: as long as it takes.
        clock: the time, in the seconds that `time_left` goes by.

    Attributes:
        over: whether all has been said.
        idle: whether nobody trains, because the oracle wants to be asked again.
        failure: what has ended the search before its time.
        interrupted: why trials were broken off that the same command trains again; empty where none was.
    """

    def __init__(
        self,
        tuner: Any,
        *,
        blocks: int,
        teams: int = 1,
        folds: int = 1,
        lockstep: bool = False,
        time_left: TimeLeft | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tuner, self._blocks, self._teams, self._folds = tuner, blocks, teams, folds
        self._lockstep, self._time_left, self._clock = lockstep, time_left or TimeLeft(), clock
        self._late = False  # whether there is no time for another trial
        self._trials: dict[int, _Trial] = {}  # of each block
        self._untold: list[_Trial] = []  # of which the oracle does not know what has become, as they began
        self._runs = self._idle_asks = 0
        self._lost: list[Death] = []
        self.over = self.idle = False
        self.failure: Exception | None = None
        self.interrupted = ""

    def look(self) -> list[TeamMessage]:
        """Break off what is running when the time is up."""
        return self.interrupt("the time is up") if self._time_left.over(self._clock()) else []

    def interrupt(self, reason: str) -> list[TeamMessage]:
        """Break off what is running, and begin nothing any more, so that the same command goes on."""
        if self.over or self.interrupted:
            return []
        self.interrupted = reason
        return self.ask()

    def lost(self, death: Death) -> list[TeamMessage]:
        """Go on without a block of which a rank has died; its trial fails, or is tried again by another.

        Raises:
            PeerLostError: that was the last block, and there is something left to train.
        """
        self._lost.append(death)
        warn(death.of_block(len(self._living)))
        block = death.team // self._teams
        of_block = self._trials.get(block)
        if of_block is None or death.team not in of_block.running:
            return self.ask()
        run, _ = of_block.running[death.team]
        state = "halted" if of_block.halted else "failed"
        return self._done(block, of_block, death.team, Done(run, state, error=death.error))

    def ask(self) -> list[TeamMessage]:
        """Give a trial to every idle block for which there is one.

        Raises:
            PeerLostError: there is one, but no block is left.
        """
        posts: list[TeamMessage] = []
        self.idle = False
        living = self._living
        for block in living:
            room = block not in self._trials and len(self._untold) < len(living)
            if room and self._may_begin():
                posts += self._guarded(self._begin, block)
        if self._stopped:
            posts += self._broken_off()
        self._idle_asks = self._idle_asks + 1 if self.idle else 0
        if self._idle_asks > _PATIENCE and not self._stopped:
            self.idle = False
            self.failure = RuntimeError("the oracle waits for a trial, but none is running; it cannot go on")
        if self._untold or self.idle:
            return posts
        if not living and self._may_begin() and self._next()[0].status != "STOPPED":
            raise PeerLostError(self._lost[-1].rank, "has died, and with it the last block")
        self.over = True
        end = End(-1, (self._summary(),), self.interrupted)
        return [*posts, *(TeamMessage(team, end) for team in range(self._blocks * self._teams))]

    def handle(self, team: int, message: SearchMessage) -> list[TeamMessage]:
        """Take in what the first rank of a team says, and return what to answer.

        Raises:
            ProtocolError: the team does not train that.
        """
        if any(team == death.team for death in self._lost):  # written before its ranks knew of the death
            return []
        block = team // self._teams
        of_block = self._trials.get(block)
        run, fold = (-1, 0) if of_block is None else of_block.running.get(team, (-1, 0))
        if of_block is None or run != message.run:
            raise ProtocolError(f"team {team} speaks of run {message.run}, which it does not train")
        if isinstance(message, Note) and message.key == RESULT:
            of_block.results[fold] = message.value
            return []
        if isinstance(message, Done):
            return self._done(block, of_block, team, message)
        raise ProtocolError(f"team {team} sent {message!r}, which is not for the oracle")

    # -- inside ---------------------------------------------------------------------------------------

    @property
    def _stopped(self) -> bool:
        return self.failure is not None or bool(self.interrupted)

    def _may_begin(self) -> bool:
        """Say whether another trial is to be begun, if there is one; once it is too late, none is."""
        if self._stopped or self._late:
            return False
        began_s = [one.began_s for one in self._trials.values()]
        self._late = not self._time_left.suffices(self._clock(), began_s)
        if self._late:
            warn(f"no more trials are begun: {self._time_left.told}")
        return not self._late

    @property
    def _living(self) -> list[int]:
        """The blocks that have all of their ranks."""
        short = {death.team // self._teams for death in self._lost}
        return [block for block in range(self._blocks) if block not in short]

    def _guarded(self, call: Callable[..., list[TeamMessage]], *args: Any) -> list[TeamMessage]:
        """Let an error of the oracle, or of the disk, end the search on all ranks."""
        try:
            return call(*args)
        except Exception as error:  # raised again, on all ranks, when nobody trains any more
            self.failure = error
            return []

    def _begin(self, block: int) -> list[TeamMessage]:
        trial, name = self._next()
        self.idle |= trial.status == "IDLE" and not self._untold
        if trial.status != "RUNNING":
            return []
        self.idle = False
        trial.metrics = type(trial.metrics)()  # of an earlier try
        begun = _Trial(trial, name, deque(range(self._folds)), self._clock())
        self._trials[block] = begun
        self._untold.append(begun)
        self._tuner.on_trial_begin(trial)
        teams = range(block * self._teams, (block + 1) * self._teams)
        return [self._started(begun, team) for team in teams]

    def _next(self) -> tuple[Any, str]:
        """Ask the oracle for a trial; return it with the name of who asked."""
        self._tuner.pre_create_trial()
        oracle = self._tuner.oracle
        for trial in oracle.trials.values():
            if trial.status in {"FAILED", "INVALID"}:
                # Perhaps before it had all parameters, which a grid wants.
                known, space = trial.hyperparameters, oracle.get_space().space
                known.merge([hp for hp in space if not known._exists(hp.name, hp.conditions)])
                known.ensure_active_values()
        # The oracle would give a name's trial again until it has heard what became of it.
        taken = {one.name for one in self._untold}
        name = next(name for index in range(self._blocks) if (name := f"block{index}") not in taken)
        return oracle.create_trial(name), name

    def _started(self, of_block: _Trial, team: int) -> TeamMessage:
        fold, trial = of_block.waiting.popleft(), of_block.trial
        of_block.running[team] = (self._runs, fold)
        attributes = {
            "id": trial.trial_id,
            "hyperparameters": json.loads(json.dumps(trial.hyperparameters.get_config())),
            "fold": fold,
        }
        start = Start(self._runs, self._tuner.oracle.seed, 1, attributes, self._runs)
        self._runs += 1
        return TeamMessage(team, start)

    def _done(self, block: int, of_block: _Trial, team: int, message: Done) -> list[TeamMessage]:
        run, fold = of_block.running.pop(team)
        posts: list[TeamMessage] = []
        if message.state == "halted" and not of_block.halted and not of_block.problem:
            posts = self.interrupt(SIGNAL)  # a training in it has saved and left
            of_block.halted = True
        if message.state != "complete":
            of_block.results.pop(fold, None)
            of_block.waiting.clear()
            if not of_block.problem and not of_block.halted:
                of_block.problem = message.error or message.state
                reason = f"run {run}, another fold of the trial, has failed"
                posts += [
                    TeamMessage(one, Halt(number, reason)) for one, (number, _) in of_block.running.items()
                ]
        elif of_block.waiting:
            return [self._started(of_block, team)]
        if of_block.running:
            return posts
        del self._trials[block]
        of_block.ended = True
        if not (of_block.problem or of_block.halted):
            self._time_left.took(self._clock() - of_block.began_s)
        for one in self._due(of_block):
            posts += self._guarded(self._tell, one) + self.ask()
        return posts

    def _due(self, ended: _Trial) -> Iterator[_Trial]:
        """Give those of which the oracle is to hear now that one has ended, one after another."""
        if not self._lockstep:
            self._untold.remove(ended)
            yield ended
            return
        while self._untold and self._untold[0].ended:
            yield self._untold.pop(0)

    def _tell(self, of_block: _Trial) -> list[TeamMessage]:
        if of_block.halted or self.failure is not None:
            return []  # with the next start it is trained again
        trial = of_block.trial
        if of_block.problem:
            trial.status = "FAILED" if NOT_AGAIN in of_block.problem else "INVALID"
            trial.message = of_block.problem
        else:
            self._completed(trial, [of_block.results[fold] for fold in range(self._folds)])
        if FATAL in of_block.problem:
            raise keras_tuner.errors.FatalError(f"trial {trial.trial_id}: {of_block.problem}")
        self._tuner.on_trial_end(trial)
        return []

    def _completed(self, trial: Any, results: Sequence[Any]) -> None:
        oracle = self._tuner.oracle
        found = [result["metrics"] for result in results]
        metrics = found[0] if self._folds == 1 else averaged(found, oracle.objective.name)
        trial.hyperparameters = HyperParameters.from_config(results[0]["hyperparameters"])
        score = metrics.get(oracle.objective.name, 0.0)
        if not math.isfinite(score):
            trial.status, trial.message = "INVALID", f"the objective {oracle.objective.name} is {score}"
            return
        try:
            # Folds have their best epochs at several steps, so their means are of none.
            oracle.update_trial(trial.trial_id, metrics, step=results[0]["step"] if self._folds == 1 else 0)
            trial.status = "COMPLETED"
        except Exception as error:  # as keras-tuner has it: the trial is at fault
            trial.status, trial.message = "INVALID", "".join(traceback.format_exception(error))

    def _broken_off(self) -> list[TeamMessage]:
        posts = []
        for of_block in self._trials.values():
            if not of_block.halted:
                of_block.halted = True
                of_block.waiting.clear()
                reason = f"the search has ended: {self.failure or self.interrupted}"
                posts += [TeamMessage(team, Halt(run, reason)) for team, (run, _) in of_block.running.items()]
        return posts

    def _summary(self) -> dict[str, Any]:
        oracle, failure = self._tuner.oracle, self.failure
        content = {
            "oracle": oracle.get_state(),
            "trials": [trial.get_state() for trial in oracle.trials.values()],
            "failure": None if failure is None else [type(failure).__name__, str(failure)],
        }
        return dict(json.loads(json.dumps(content)))  # as it is written to files


def averaged(found: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """Return the means of the folds' metrics, and each fold's value of the objective as a metric of its own.

    Example:
        >>> averaged([{"val_loss": 0.5}, {"val_loss": 0.25}], "val_loss")
        {'val_loss': 0.375, 'val_loss of fold 0': 0.5, 'val_loss of fold 1': 0.25}
    """
    means = {name: float(value) for name, value in average_metrics_dicts(found).items()}
    return means | {
        f"{objective} of fold {fold}": float(metrics[objective])
        for fold, metrics in enumerate(found)
        if objective in metrics
    }
