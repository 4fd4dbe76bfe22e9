"""The coordinator as a state machine: messages of the blocks in, messages to them out; no MPI and no clock.

    block b: Suggest, Verdict ─► Answer to b's leader      a parameter, or whether to prune
    block b: Report, Note                                  kept with the trial
    block b: Done ─► Start to b, or to others Halt         the next trial; the target is reached
                     End to all                            once nothing is left and nobody trains

All that is random or remembered is Optuna's study, which lives on this rank only.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import json_to_distribution
from optuna.trial import Trial, TrialState

from nnlo_common._errors import ProtocolError
from nnlo_common.tune._messages import (
    Answer,
    Done,
    End,
    Halt,
    Message,
    Note,
    Report,
    Start,
    Suggest,
    Verdict,
)
from nnlo_common.tune._record import Record, packed

__all__ = ["ERROR", "RETRY_OF", "Coordinator", "Post", "seed_of"]

# Optuna's own, so that its verbosity is obeyed: users know its lines.
_LOG = optuna.logging.get_logger("optuna.study")
#: The user attribute that holds what went wrong in a failed trial.
ERROR = "nnlo:error"
#: The user attribute that names the failed trial that a trial repeats.
RETRY_OF = "nnlo:retry of"
_TRIES = "nnlo:tries"


def seed_of(seed: int, trial: int) -> int:
    """Return the seed of a trial: the same whichever block trains it, and another for each trial.

    Example:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(0, 2), seed_of(0, 1) < 2**32
        (True, False, True)
    """
    digest = hashlib.blake2b(f"{seed} {trial}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True, slots=True)
class Post:
    """Action: a message to a block.

    Attributes:
        block: its index.
        message: what it says.
        leader_only: whether it is for the leader alone; else each rank of the block gets it.
    """

    block: int
    message: Message
    leader_only: bool = False


class Coordinator:
    """Hands out the trials of a study and takes in what becomes of them.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be finished; one that is tried again counts once.
        seed: of the study.
        retries: how often a failed trial is tried again.
        target: the value at which the search ends.
        record: where to write down what happens.
        known: how many trials of the study all ranks have already; None: those that are in it now.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        blocks: int,
        n_trials: int,
        seed: int = 0,
        retries: int = 0,
        target: float | None = None,
        record: Record | None = None,
        known: int | None = None,
    ) -> None:
        self._study, self._blocks, self._left = study, blocks, n_trials
        self._seed, self._retries, self._target = seed, retries, target
        self._record = record or Record()
        self._running: dict[int, Trial] = {}
        self._halted: set[int] = set()  # blocks that have been told to break off
        self._asked: deque[Trial] = deque()  # ahead, for whoever ends next
        self._known = len(study.get_trials(deepcopy=False)) if known is None else known
        self.over = False
        # As Optuna's own loop does, so that a sampler may say that it is at its end.
        study._thread_local.in_optimize_loop, study._stop_flag = True, False

    def begin(self) -> list[Post]:
        """Give every block its first trial."""
        return self._fed(range(self._blocks))

    def think(self) -> bool:
        """Choose the next trial while all blocks train; say whether there was one to choose.

        With one block it would be chosen without the result of the only trial before it.
        """
        if self._blocks == 1 or self._asked or not self._left or not self._running:
            return False
        self._asked.append(self._ask())
        return True

    def handle(self, block: int, message: Message) -> list[Post]:
        """Take in what the leader of a block says, and return what to answer.

        Raises:
            ProtocolError: the block does not train that trial.
        """
        trial = self._running.get(block)
        if trial is None or trial.number != message.trial:
            raise ProtocolError(f"block {block} speaks of trial {message.trial}, which it does not train")
        if isinstance(message, Suggest):
            return [Post(block, Answer(trial.number, self._suggest(trial, message)), leader_only=True)]
        if isinstance(message, Verdict):
            prune = bool(trial.should_prune())  # some pruners return NumPy's
            return [Post(block, Answer(trial.number, prune), leader_only=True)]
        if isinstance(message, Report):
            trial.report(message.value, message.step)
        elif isinstance(message, Note):
            self._note(trial, message)
        elif isinstance(message, Done):
            return self._done(block, trial, message)
        else:
            raise ProtocolError(f"block {block} sent {message!r}, which is not for the coordinator")
        return []

    # -- inside ---------------------------------------------------------------------------------------

    def _ask(self) -> Trial:
        self._left -= 1
        return self._study.ask()

    def _fed(self, blocks: Iterable[int]) -> list[Post]:
        """Start the next trials on idle blocks, and end the search when there is nothing to wait for."""
        posts = []
        for block in blocks:
            if not self._asked and not self._left:
                break
            trial = self._asked.popleft() if self._asked else self._ask()
            self._running[block] = trial
            start = Start(
                trial.number,
                seed_of(self._seed, trial.number),
                len(self._study.directions),
                json.loads(json.dumps(trial.user_attrs)),
            )
            posts.append(Post(block, start))
        if not self._running and not self.over:
            self.over = True
            if len(self._study.directions) == 1 and self._study.get_trials(False, [TrialState.COMPLETE]):
                best = self._study.best_trial
                _LOG.info(
                    "Best is trial %d with value: %s and parameters: %s.",
                    best.number,
                    best.value,
                    best.params,
                )
            self._study._thread_local.in_optimize_loop = False
            trials = self._study.get_trials(deepcopy=False)[self._known :]
            kept = tuple(packed(trial) for trial in trials if trial.state.is_finished())
            posts += [Post(block, End(-1, kept)) for block in range(self._blocks)]
        return posts

    def _suggest(self, trial: Trial, message: Suggest) -> float:
        distribution = json_to_distribution(message.distribution)
        value = trial._suggest(message.name, distribution)  # what all suggest_... methods call
        internal = float(distribution.to_internal_repr(value))
        self._record.suggested(trial.number, message.name, internal, message.distribution)
        return internal

    def _note(self, trial: Trial, message: Note) -> None:
        if message.constraint:
            trial.set_constraint(message.key, message.value)
        else:
            trial.set_user_attr(message.key, message.value)

    def _done(self, block: int, trial: Trial, message: Done) -> list[Post]:
        del self._running[block]
        self._halted.discard(block)
        state, error = message.state, message.error
        if state == "complete" and any(map(math.isnan, message.values)):
            state, error = "failed", f"the objective returned {message.values}, which holds NaN"
        if state == "complete":
            self._study.tell(trial, list(message.values))
            told = "Trial %d finished with values: %s and parameters: %s."
            _LOG.info(told, trial.number, list(message.values), trial.params)
        elif state == "pruned":
            self._study.tell(trial, state=TrialState.PRUNED)
            _LOG.info("Trial %d pruned.", trial.number)
        else:
            self._failed(trial, error, again=state == "failed")
        finished = self._study.get_trials(deepcopy=False)[trial.number]
        self._record.finished(finished)
        posts = []
        if state == "complete" and self._reached(message.values):
            posts = self._stop(f"trial {trial.number} has reached {message.values[0]}")
        elif self._study._stop_flag:  # what Optuna's own loop looks at: a grid is used up
            self._left = 0
        idle = [one for one in range(self._blocks) if one not in self._running]
        return posts + self._fed(idle)

    def _failed(self, trial: Trial, error: str, *, again: bool) -> None:
        trial.set_user_attr(ERROR, error)
        attributes: dict[str, Any] = trial.user_attrs
        tries = attributes.get(_TRIES, 0)
        if again and tries < self._retries:
            first = attributes.get(RETRY_OF, trial.number)
            self._study.enqueue_trial(trial.params, user_attrs={RETRY_OF: first, _TRIES: tries + 1})
            self._left += 1
            trials = self._study.get_trials(deepcopy=False)
            self._record.queued(trials[-1], trials[trial.number])
        if again:
            _LOG.warning("trial %d failed:\n%s", trial.number, error)
        self._study.tell(trial, state=TrialState.FAIL)

    def _reached(self, values: tuple[float, ...]) -> bool:
        if self._target is None:
            return False
        if self._study.direction is optuna.study.StudyDirection.MAXIMIZE:
            return values[0] >= self._target
        return values[0] <= self._target

    def _stop(self, reason: str) -> list[Post]:
        """Break off what is running, and begin nothing any more."""
        self._left = 0
        while self._asked:
            self._failed(self._asked.popleft(), f"not begun: {reason}", again=False)
        going = [block for block in self._running if block not in self._halted]
        self._halted.update(going)
        return [Post(block, Halt(self._running[block].number, reason)) for block in going]
