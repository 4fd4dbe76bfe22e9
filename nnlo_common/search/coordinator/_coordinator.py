"""The coordinator as a state machine: messages of the teams in, messages to them out; no MPI.

    team t: Done ─► Start to t, or to others     the next fold or trial
                    Halt to others               a fold has failed, or the search is to end
                    End to all                   once nothing is left and nobody trains
    a rank of t has died ─► Halt to t's block    whose trial fails; it gets no other
    team t is idle ─► Recall to the leader of t' once nothing is left to begin, in an elastic search
    team t': Done ("recalled") ─► Start to t' and t as one team from now on
    whatever else a team says                    answered by the source of the trials

The coordinator decides what a trial's life is. Which parameters it has, what its reports mean and what its
end tells whom is the business of the source: an Optuna study, or an oracle of keras-tuner.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnlo_common.base._errors import PeerLostError, ProtocolError
from nnlo_common.search.coordinator._elastic import ElasticPolicy
from nnlo_common.search.coordinator._roster import Roster
from nnlo_common.search.coordinator._running_trial import RunningTrial
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.search.coordinator._trial_source import TrialSource
from nnlo_common.search.messages._search_messages import Chosen, Done, End, Halt, Recall, SearchMessage
from nnlo_common.search.messages._team_events import Death, TeamMessage

__all__ = ["SIGNAL", "Coordinator"]

#: Why trials were broken off that were to be trained again: the process is expected to end.
SIGNAL = "a signal (SIGTERM or SIGUSR1) has come"


class Coordinator:
    """Hands out the trials of a search and takes in what becomes of them.

    Args:
        source: gives the trials, and learns how they end.
        blocks: how many blocks there are.
        teams: how many teams each block has: 1, or as many as folds.
        folds: in how many folds each trial is trained.
        time_left: how long there is; None: for ever.
        clock: the time, in seconds.
        search_ranks: how many ranks choose parameters; their teams come after those of the blocks.
        lockstep: whether the source learns of the ends of trials in the order in which they began, so that
            the search repeats, whatever the pace of the blocks.
        elastic: whether idle teams help those that train when nothing is left to begin.

    Attributes:
        over: whether all teams have been told that the search is.
        interrupted: why trials were broken off that are to be trained again; empty where none was.
    """

    def __init__(
        self,
        source: TrialSource,
        *,
        blocks: int,
        teams: int = 1,
        folds: int = 1,
        time_left: TimeLeft | None = None,
        clock: Callable[[], float] = time.time,
        search_ranks: int = 0,
        lockstep: bool = False,
        elastic: bool = False,
    ) -> None:
        self._source, self._folds, self._lockstep = source, folds, lockstep
        self._time, self._clock = time_left or TimeLeft(), clock
        self._roster, self._runs = Roster(blocks, teams), itertools.count()
        self._elastic = ElasticPolicy(self._roster, self._time) if elastic else None
        self._search_ranks = range(blocks * teams, blocks * teams + search_ranks)
        self._untold: list[RunningTrial] = []  # those of whose end the source has not been told, in order
        self._lost: list[Death] = []
        self._broken: set[int] = set()  # runs of which a rank has died
        self._stopped = self._cut = False  # cut: in lock-step what ends later does not count
        self.over, self.interrupted = False, ""

    def begin(self) -> list[TeamMessage]:
        """Give every block its first trial."""
        return self._fed()

    def think(self) -> bool:
        """Choose the next trial while all blocks train; say whether there was one to choose."""
        return bool(self._training) and self._source.think(len(self._roster.living))

    def look(self) -> list[TeamMessage]:
        """Break off what is running when the time is up; let idle teams help what takes long."""
        if self._training and not self.interrupted and self._time.over(self._clock()):
            return self.interrupt("the time is up")
        # Where nobody trains the source has not had a trial yet, so it is asked again.
        return self._helped() if self._untold or self.over else self._fed()

    def interrupt(self, reason: str) -> list[TeamMessage]:
        """Break off what is running, so that the same command trains it again."""
        if self.over or self.interrupted:
            return []
        self.interrupted = reason
        return self._stop(reason)

    def lost(self, death: Death) -> list[TeamMessage]:
        """Go on without a block of which a rank has died, or without a search rank.

        The trial of the block fails, or is tried again by another.

        Raises:
            PeerLostError: that was the last block, and there is something left to train.
        """
        self._lost.append(death)
        if death.team in self._search_ranks:
            left = self._source.lose_search_rank(death.team)
            self._source.warn(f"search {death} has died. Search ranks that go on: {left}")
            return [] if self.over else self._fed()
        team = self._roster.lose(death.team)
        if self._elastic is not None:
            self._elastic.report_death()
        self._source.warn(death.of_block(len(self._roster.living)))
        running = self._roster.training.get(team)
        if running is None:
            return []
        run = running.runs[team]
        self._broken.add(run)
        state = "halted" if running.halted else "failed"
        return self._done(team, running, Done(run, state, error=death.error, failure="died"))

    def handle(self, team: int, message: SearchMessage) -> list[TeamMessage]:
        """Take in what the leader of a team says, and return what to answer.

        Raises:
            ProtocolError: the team does not train that.
            NNLOError: the sampler has failed on a search rank.
        """
        if isinstance(message, Chosen):
            if any(death.team == team for death in self._lost):
                return []
            self._source.chosen(team, message)
            return self._fed()
        if message.run in self._broken:  # written before the ranks knew of the death
            return []
        running = self._roster.training.get(team)
        if running is None or running.runs[team] != message.run:
            raise ProtocolError(f"team {team} speaks of run {message.run}, which it does not train")
        if isinstance(message, Done):
            return self._done(team, running, message)
        return self._source.handle(team, running, message)

    # -- beginning ------------------------------------------------------------------------------------

    @property
    def _training(self) -> list[RunningTrial]:
        return [running for running in self._untold if not running.over]

    def _fed(self) -> list[TeamMessage]:
        """Start the next trials on idle blocks, and end the search when there is nothing to wait for."""
        messages = []
        source, living, idle = self._source, self._roster.living, self._roster.idle
        first = not self._training
        for block in [*idle]:
            if not source.open:
                break
            now_s = self._clock()
            if not self._time.suffices(now_s, [running.began_s for running in self._training]):
                source.warn(f"no more trials are begun: {self._time.told}")
                source.withdraw("the time does not suffice")
                break
            trial = source.take(block, first=first, living=len(living))
            if trial is not None:
                idle.remove(block)
                messages += self._begun(block, trial, now_s)
        messages += [*source.orders(len(idle), len(living)), *self._obey_source(), *self._helped()]
        if self._untold or self.over or (living and source.pending):
            return messages
        if not living and (left := source.left()):
            told = f"; trials left: {left}" if left < math.inf else ""
            raise PeerLostError(self._lost[-1].rank, f"has died, and with it the last block{told}")
        self.over = True
        end = End(-1, source.finish(self._lost), self.interrupted)
        everyone = range(self._roster.count + len(self._search_ranks))
        return [*messages, *(TeamMessage(team, end) for team in everyone)]

    def _begun(self, block: int, trial: Any, now_s: float) -> list[TeamMessage]:
        teams = self._roster.teams(block)
        running = RunningTrial(trial, folds=self._folds, teams=len(teams), began_s=now_s, block=block)
        self._untold.append(running)
        return [self._start(team, running) for team in teams]

    def _start(self, team: int, running: RunningTrial) -> TeamMessage:
        """Start the next fold."""
        fold, run = running.waiting.popleft(), next(self._runs)
        running.running[team], running.runs[team] = fold, run
        self._roster.training[team] = running
        start = self._source.start(running, run, fold)
        return TeamMessage(team, start, made_of=self._roster.news(team))

    # -- ending ---------------------------------------------------------------------------------------

    def _done(self, team: int, running: RunningTrial, message: Done) -> list[TeamMessage]:
        fold = running.running.pop(team)
        del running.runs[team], self._roster.training[team]
        running.asking.discard(team)
        message = _checked(message)
        messages = []
        if message.state == "recalled":
            if not running.halted:
                running.waiting.appendleft(fold)
                return [self._again(team, running)]
            message = Done(message.run, "halted", error=f"broken off: {running.halted}")
        if self._elastic is not None and self._elastic.ended(team, running, message):
            running.waiting.appendleft(fold)
            self._source.warn(
                f"trial {running.trial.number} has failed when more ranks went on with it, so it goes on "
                f"with those it had:\n{message.error}"
            )
            return [self._start(team, running), *self._fed()]
        if message.state == "halted" and not running.halted:
            messages += self.interrupt(SIGNAL)  # a training in it has saved and left
        if message.state == "complete":
            running.values[fold] = message.values
            self._source.fold_done(running, fold, message)
        elif running.ending is None:
            running.ending = message
        if running.ending is not None:
            running.waiting.clear()
            reason = f"another fold of the trial has ended it ({running.ending.state})"
            messages += self._halted(running, reason)
        if running.over:
            return messages + self._ended(running)
        if running.waiting:
            return [*messages, self._start(team, running)]
        return messages + self._source.judged(running) + self._fed()

    def _ended(self, running: RunningTrial) -> list[TeamMessage]:
        """Tell the source of a trial's end, or wait with it for those that began before."""
        running.seconds = self._clock() - running.began_s
        if running.result.state in ("complete", "pruned"):
            self._time.took(running.seconds)
        messages = []
        for ended in self._due(running):
            self._source.tell(ended, interrupted=bool(self.interrupted), stopped=self._stopped)
            messages += [*self._obey_source(), *self._fed()]
        return messages

    def _due(self, running: RunningTrial) -> Iterator[RunningTrial]:
        """Give the trials of whose end the source is to be told now that one has ended, one by one."""
        if not self._lockstep:
            self._untold.remove(running)
            yield running
        while self._lockstep and self._untold and self._untold[0].over:
            ended = self._untold.pop(0)
            if self._cut:  # whether it ended in time was chance
                ended.ending = Done(0, "halted", error="broken off: an earlier trial was the last")
            self._cut |= ended.result.state == "halted"
            yield ended

    def _obey_source(self) -> list[TeamMessage]:
        """End the search if the source says so."""
        if self._stopped or not self._source.stop_reason:
            return []
        self._cut = True
        return self._stop(self._source.stop_reason)

    def _stop(self, reason: str) -> list[TeamMessage]:
        """Break off what is running, and begin nothing any more."""
        self._stopped = True
        self._source.withdraw(reason)
        return [message for running in self._training for message in self._halted(running, reason)]

    def _halted(self, running: RunningTrial, reason: str) -> list[TeamMessage]:
        """Break off what is running of a trial."""
        if running.halted:
            return []
        running.halted = reason
        running.waiting.clear()
        return [TeamMessage(team, Halt(run, reason)) for team, run in running.runs.items()]

    # -- helping, in an elastic search ----------------------------------------------------------------

    def _helped(self) -> list[TeamMessage]:
        """Let idle teams help those that train, when nothing is left to begin."""
        if self._elastic is None or self._stopped or self._source.pending:
            return []
        # Idle teams of a block that trains wait for its next trial, if there is to be one.
        if self._source.open and not self._roster.idle:
            return []
        messages = []
        for team, running in self._elastic.folds(self._training):
            self._note_help(running, [team])
            messages.append(self._start(team, running))
        recalls = self._elastic.recalls(self._clock())
        runs = [(team, self._roster.training[team].runs[team]) for team in recalls]
        return messages + [TeamMessage(team, Recall(run), leader_only=True) for team, run in runs]

    def _again(self, team: int, running: RunningTrial) -> TeamMessage:
        """Start again, with all who are idle, the fold that a team has left for that."""
        assert self._elastic is not None  # who else would have recalled it
        others = self._elastic.joining(team)
        self._note_help(running, others)
        self._roster.unite(team, others)
        return self._start(team, running)

    def _note_help(self, running: RunningTrial, teams: Sequence[int]) -> None:
        blocks = set().union(*map(self._roster.blocks_of, teams))
        self._source.add_helpers(running, blocks, self._clock())


def _checked(message: Done) -> Done:
    """Return a message as it is, or the failure that NaN is."""
    if message.state != "complete" or not any(map(math.isnan, message.values)):
        return message
    said = f"the objective returned {message.values}, which holds NaN"
    return Done(message.run, "failed", error=said, failure="NaN")
