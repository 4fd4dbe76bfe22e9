"""The coordinator as a state machine: messages of the teams in, messages to them out; no MPI.

    team t: Suggest, Verdict ─► Answer to t's leader       a parameter, or whether to prune
    team t: Report, Note                                   kept with the trial
    team t: Done ─► Start to t, or to others Halt          the next fold or trial; the target is reached
                    End to all                             once nothing is left and nobody trains
    a rank of t has died ─► Halt to t's block              whose trial fails; it gets no other

A team is the ranks that train one fold together. A block, which trains one trial, is one team, or as many as
there are folds. All that is random or remembered is Optuna's study, which lives on this rank only.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.distributions import json_to_distribution
from optuna.pruners import WilcoxonPruner
from optuna.trial import Trial, TrialState

from nnlo_common._errors import PeerLostError, ProtocolError
from nnlo_common.tune._ahead import Ahead
from nnlo_common.tune._endings import ERROR, FAILURE, SECONDS, Failures, keep_folds, log_best, tell
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
from nnlo_common.tune._time_left import TimeLeft
from nnlo_common.tune._under_way import UnderWay

__all__ = ["RETRY_OF", "SIGNAL", "Coordinator", "Post", "seed_of", "known_to_all"]

_LOG = optuna.logging.get_logger("optuna.study")
#: The user attribute that names the failed trial that a trial repeats.
RETRY_OF = "nnlo:retry of"
_TRIES = "nnlo:tries"
#: Why trials were broken off that were to be trained again: the process is expected to end.
SIGNAL = "a signal (SIGTERM or SIGUSR1) has come"


def seed_of(seed: int, run: int) -> int:
    """Return the seed of a run: the same whichever block trains it, and another for each run.

    Example:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(0, 2), seed_of(0, 1) < 2**32
        (True, False, True)
    """
    digest = hashlib.blake2b(f"{seed} {run}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def known_to_all(study: optuna.Study) -> int:
    """Return how many trials a study begins with that have ended: the script has given them to all ranks."""
    trials = study.get_trials(deepcopy=False)
    waiting = (number for number, trial in enumerate(trials) if not trial.state.is_finished())
    return next(waiting, len(trials))


@dataclass(frozen=True, slots=True)
class Post:
    """Action: a message to a team.

    Attributes:
        team: its index.
        message: what it says.
        leader_only: whether it is for the leader alone; else each rank of the team gets it.
    """

    team: int
    message: Message
    leader_only: bool = False


class Coordinator:
    """Hands out the trials of a study and takes in what becomes of them.

    Args:
        study: the study.
        blocks: how many blocks there are.
        n_trials: how many trials are to be finished; one that is tried again counts once.
        teams: how many teams each block has: 1, or as many as folds.
        folds: in how many folds each trial is trained.
        seed: of the study.
        retries: how often a failed trial is tried again.
        target: the value at which the search ends.
        failures: what a failed trial tells the sampler; None: nothing.
        time_left: how long there is; None: for ever.
        clock: the time, in seconds.
        record: where to write down what happens.
        known: how many trials of the study all ranks have already; None: `known_to_all` of it now.

    Attributes:
        over: whether all teams have been told that the search is.
        interrupted: why trials were broken off that are to be trained again; empty where none was.
    """

    def __init__(
        self,
        study: optuna.Study,
        *,
        blocks: int,
        n_trials: int,
        teams: int = 1,
        folds: int = 1,
        seed: int = 0,
        retries: int = 0,
        target: float | None = None,
        failures: Failures | None = None,
        time_left: TimeLeft | None = None,
        clock: Callable[[], float] = time.time,
        record: Record | None = None,
        known: int | None = None,
    ) -> None:
        self._study, self._blocks, self._left = study, blocks, n_trials
        self._teams, self._folds = teams, folds
        self._seed, self._retries, self._target = seed, retries, target
        self._failures, self._time = failures or Failures(study), time_left or TimeLeft()
        self._clock, self._record = clock, record or Record()
        self._trials: dict[int, UnderWay] = {}  # by block
        self._asked: deque[Trial] = deque()  # ahead, for whoever ends next
        self._ahead = Ahead(blocks)
        self._lost: dict[int, tuple[int, str]] = {}  # who has died: team and place, by rank
        self._known = known_to_all(study) if known is None else known
        self._by_fold = folds > 1 and isinstance(study.pruner, WilcoxonPruner)
        self._stopped = False
        self.over, self.interrupted = False, ""
        # As Optuna's own loop does, so that a sampler may say that it is at its end.
        study._thread_local.in_optimize_loop, study._stop_flag = True, False

    def begin(self) -> list[Post]:
        """Give every block its first trial."""
        return self._fed()

    def think(self) -> bool:
        """Choose the next trial while all blocks train; say whether there was one to choose.

        With one block it would be chosen without the result of the only trial before it.
        """
        enough = len(self._asked) >= self._ahead.depth
        if len(self._living) == 1 or enough or not self._left or not self._trials:
            return False
        self._asked.append(self._ask())
        _ = self._asked[-1].relative_params  # or Optuna would choose them when the first is asked for
        return True

    def look(self) -> list[Post]:
        """Break off what is running when the time is up."""
        if self._trials and not self.interrupted and self._time.over(self._clock()):
            return self.interrupt("the time is up")
        return []

    def interrupt(self, reason: str) -> list[Post]:
        """Break off what is running, so that the same command trains it again."""
        if self.over or self.interrupted:
            return []
        self.interrupted = reason
        return self._stop(reason)

    def lost(self, team: int, rank: int, host: str) -> list[Post]:
        """Go on without a block of which a rank has died.

        Its trial fails, or is tried again by another block.

        Raises:
            PeerLostError: that was the last block, and there is something left to train.
        """
        self._lost[rank] = team, f"rank {rank} on {host}"
        _LOG.warning(
            "rank %d on %s has died; its block takes no more trials. Blocks that go on: %d",
            *(rank, host, len(self._living)),
        )
        under = self._trials.get(team // self._teams)
        if under is None or team not in under.running:
            return []
        error = f"rank {rank} on {host}, which trained it, has died (killed, crashed or out of memory)"
        state = "halted" if under.halted else "failed"
        run = self._run(under.trial, under.running[team])
        return self._done(team, under, Done(run, state, error=error, failure="died"))

    def handle(self, team: int, message: Message) -> list[Post]:
        """Take in what the leader of a team says, and return what to answer.

        Raises:
            ProtocolError: the team does not train that.
        """
        if team in self._short:  # written before its ranks knew of the death
            return []
        under = self._trials.get(team // self._teams)
        if under is None or self._run(under.trial, under.running.get(team, -1)) != message.run:
            raise ProtocolError(f"team {team} speaks of run {message.run}, which it does not train")
        if isinstance(message, Suggest):
            return [Post(team, self._suggest(under.trial, message), leader_only=True)]
        if isinstance(message, Verdict):
            under.asking.add(team)
            return self._judged(under)
        if isinstance(message, Report):
            if not self._by_fold:
                under.report(under.running[team], message.step, message.value)
                self._tell_means(under)
        elif isinstance(message, Note):
            self._note(under.trial, message)
        elif isinstance(message, Done):
            return self._done(team, under, message)
        else:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the coordinator")
        return []

    # -- inside ---------------------------------------------------------------------------------------

    def _run(self, trial: Trial, fold: int) -> int:
        return trial.number * self._folds + fold if fold >= 0 else -1

    def _ask(self) -> Trial:
        self._left -= 1
        return self._study.ask()

    @property
    def _short(self) -> set[int]:
        """The teams that lack a rank."""
        return {team for team, _ in self._lost.values()}

    @property
    def _living(self) -> list[int]:
        """The blocks that have all of their ranks."""
        short = {team // self._teams for team in self._short}
        return [block for block in range(self._blocks) if block not in short]

    def _fed(self) -> list[Post]:
        """Start the next trials on idle blocks, and end the search when there is nothing to wait for."""
        posts = []
        living, beginning = self._living, not self._trials
        for block in living:
            if block in self._trials:
                continue
            if not self._asked and not self._left:
                break
            now_s = self._clock()
            if not self._time.suffices(now_s, [under.began_s for under in self._trials.values()]):
                self._out_of_time()
                break
            if not beginning:
                self._ahead.taken(len(self._asked))
            trial = self._asked.popleft() if self._asked else self._ask()
            under = UnderWay(trial, folds=self._folds, teams=self._teams, began_s=now_s)
            self._trials[block] = under
            self._record.begun(self._study.get_trials(deepcopy=False)[trial.number])
            for team in range(block * self._teams, (block + 1) * self._teams):
                posts.append(self._start(team, under))
        if not self._trials and not self.over:
            if not living and (left := self._left + len(self._asked)):
                last = [*self._lost][-1]
                raise PeerLostError(last, f"has died, and with it the last block; trials left: {left}")
            posts += self._ended()
        return posts

    def _start(self, team: int, under: UnderWay) -> Post:
        """Start the next fold."""
        fold = under.waiting.popleft()
        under.running[team] = fold
        run = self._run(under.trial, fold)
        start = Start(
            run,
            seed_of(self._seed, run),
            len(self._study.directions),
            json.loads(json.dumps(under.trial.user_attrs)),
            under.trial.number,
            fold,
            self._folds,
            self._seed,
        )
        return Post(team, start)

    def _ended(self) -> list[Post]:
        self.over = True
        log_best(self._study)
        if self._lost:
            _LOG.warning(
                "the search has ended without %s, which died",
                "; ".join(place for _, place in self._lost.values()),
            )
        self._study._thread_local.in_optimize_loop = False
        trials = self._study.get_trials(deepcopy=False)[self._known :]
        kept = tuple(packed(trial) for trial in trials if trial.state.is_finished())
        return [Post(team, End(-1, kept, self.interrupted)) for team in range(self._blocks * self._teams)]

    def _suggest(self, trial: Trial, message: Suggest) -> Answer:
        distribution = json_to_distribution(message.distribution)
        try:
            value = trial._suggest(message.name, distribution)  # what all suggest_... methods call
        except ValueError as error:
            if message.name not in trial.distributions:
                raise
            return Answer(message.run, 0.0, f"suggest {message.name!r} differs between the folds: {error}")
        internal = float(distribution.to_internal_repr(value))
        self._record.suggested(trial.number, message.name, internal, message.distribution)
        return Answer(message.run, internal)

    def _note(self, trial: Trial, message: Note) -> None:
        if message.constraint:
            trial.set_constraint(message.key, message.value)
        else:
            trial.set_user_attr(message.key, message.value)

    def _tell_means(self, under: UnderWay) -> None:
        for step, value in under.means():
            under.trial.report(value, step)

    def _judged(self, under: UnderWay) -> list[Post]:
        """Answer the teams of a trial once all have asked, so that all obey the same verdict."""
        if under.halted or not under.all_ask:
            return []
        # Some pruners return NumPy's bool.
        prune = not self._by_fold and under.judged and bool(under.trial.should_prune())
        asking, under.asking = sorted(under.asking), set()
        answers = [(team, self._run(under.trial, under.running[team])) for team in asking]
        return [Post(team, Answer(run, prune), leader_only=True) for team, run in answers]

    def _done(self, team: int, under: UnderWay, message: Done) -> list[Post]:
        fold = under.running.pop(team)
        under.asking.discard(team)
        message = _checked(message)
        posts = []
        if message.state == "halted" and not under.halted:
            posts += self.interrupt(SIGNAL)
        if message.state == "complete":
            under.values[fold] = message.values
            self._fold_done(under, fold, message)
        elif under.ending is None:
            under.ending = message
        if under.ending is not None:
            under.waiting.clear()
            posts += self._halted(under, f"another fold of the trial has ended it ({under.ending.state})")
        if under.over:
            del self._trials[team // self._teams]
            return posts + self._finished(under)
        if under.waiting:
            return [*posts, self._start(team, under)]
        return posts + self._judged(under)

    def _fold_done(self, under: UnderWay, fold: int, message: Done) -> None:
        """Let the pruner know of a fold's end."""
        if self._folds == 1 or under.ending is not None:
            return
        if not self._by_fold:
            self._tell_means(under)
        elif len(self._study.directions) == 1:
            under.trial.report(message.values[0], fold)
            if not under.over and under.trial.should_prune():
                under.ending = Done(message.run, "pruned")

    def _finished(self, under: UnderWay) -> list[Post]:
        """Take in the end of a trial, and give its block the next."""
        trial, seconds = under.trial, self._clock() - under.began_s
        ending = under.result
        if self._folds > 1:
            keep_folds(trial, under.outcomes)
        trial.set_user_attr(SECONDS, round(seconds, 3))
        if ending.state in ("failed", "halted"):
            self._failed(trial, ending)
        else:
            self._time.took(seconds)
            tell(self._study, trial, ending.state, ending.values, self._failures)
            self._write_down(trial)
        posts = []
        if ending.state == "complete" and self._reached(ending.values):
            posts = self._stop(f"trial {trial.number} has reached {ending.values[0]}")
        elif self._study._stop_flag:  # what Optuna's own loop looks at: a grid is used up
            self._left = 0
        return posts + self._fed()

    def _failed(self, trial: Trial, ending: Done) -> None:
        trial.set_user_attr(ERROR, ending.error)
        again = False
        if ending.state == "failed":
            trial.set_user_attr(FAILURE, ending.failure or "error")
            _LOG.warning("trial %d failed:\n%s", trial.number, ending.error)
            again = self._queued_again(trial)
        # What is tried again has not failed for good, so it tells the sampler nothing yet.
        tell(self._study, trial, "halted" if again else ending.state, None, self._failures)
        if ending.state == "failed" or not self.interrupted:
            self._write_down(trial)

    def _queued_again(self, trial: Trial) -> bool:
        attributes: dict[str, Any] = trial.user_attrs
        tries = attributes.get(_TRIES, 0)
        if tries >= self._retries or (self._stopped and not self.interrupted):
            return False
        first = attributes.get(RETRY_OF, trial.number)
        self._study.enqueue_trial(trial.params, user_attrs={RETRY_OF: first, _TRIES: tries + 1})
        self._left += not self.interrupted
        trials = self._study.get_trials(deepcopy=False)
        self._record.queued(trials[-1], trials[trial.number])
        return True

    def _write_down(self, trial: Trial) -> None:
        self._record.finished(self._study.get_trials(deepcopy=False)[trial.number])

    def _reached(self, values: tuple[float, ...]) -> bool:
        if self._target is None:
            return False
        if self._study.direction is optuna.study.StudyDirection.MAXIMIZE:
            return values[0] >= self._target
        return values[0] <= self._target

    def _out_of_time(self) -> None:
        left = self._left + len(self._asked)
        _LOG.warning(
            "%d trials are not begun: the longest has taken %.0f s, and there is less time left",
            left,
            self._time.longest_s,
        )
        self._begin_nothing("the time does not suffice")

    def _begin_nothing(self, reason: str) -> None:
        """Let nothing of ours stand open in the study; what the user has queued stays as it is."""
        self._left = 0
        waiting = self._study.get_trials(deepcopy=False, states=[TrialState.WAITING])
        again = [trial._trial_id for trial in waiting if RETRY_OF in trial.user_attrs]
        storage = self._study._storage
        for number in [*(trial._trial_id for trial in self._asked), *again]:
            storage.set_trial_user_attr(number, ERROR, f"not begun: {reason}")
            storage.set_trial_state_values(number, TrialState.FAIL)
        self._asked.clear()

    def _stop(self, reason: str) -> list[Post]:
        """Break off what is running, and begin nothing any more."""
        self._stopped = True
        self._begin_nothing(reason)
        return [post for under in self._trials.values() for post in self._halted(under, reason)]

    def _halted(self, under: UnderWay, reason: str) -> list[Post]:
        """Break off what is running of a trial."""
        if under.halted:
            return []
        under.halted = reason
        under.waiting.clear()
        return [
            Post(team, Halt(self._run(under.trial, fold), reason)) for team, fold in under.running.items()
        ]


def _checked(message: Done) -> Done:
    """Return a message as it is, or the failure that NaN is."""
    if message.state != "complete" or not any(map(math.isnan, message.values)):
        return message
    said = f"the objective returned {message.values}, which holds NaN"
    return Done(message.run, "failed", error=said, failure="NaN")
