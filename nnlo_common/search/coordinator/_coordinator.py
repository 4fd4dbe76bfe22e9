"""State machine of the coordinator: takes messages from teams, returns messages to send; no MPI.

    team t: Done ─► Start to t, or to others     the next fold or trial
                    Halt to others               a fold failed, or the search ends
                    End to all                   nothing is left and no team trains
    a rank of t died ─► Halt to t's block        its trial fails; the block gets no other
    team t is idle ─► Recall to the leader of t' nothing is left to begin, in an elastic search
    team t': Done ("recalled") ─► Start to t' and t, one team from now on
    any other message                            answered by the source of the trials
    before each reply: CoordinatorCopy to the spares, one of which goes on from it if this rank dies

The coordinator decides when a trial begins and ends. The source (an Optuna study, or an oracle of
keras-tuner) chooses parameters, handles reports and records results.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nnlo_common.base._errors import PeerLostError, ProtocolError
from nnlo_common.base._signals import Interrupts
from nnlo_common.search._channels import CoordinatorChannel, Death, Inheritance, TeamMessage
from nnlo_common.search._search_messages import Chosen, Done, End, Halt, Recall, SearchMessage
from nnlo_common.search.coordinator._parameter_choice import RunningTrial, TrialSource
from nnlo_common.search.coordinator._time_left import TimeLeft

__all__ = ["Coordinator", "ElasticPolicy", "Roster", "SIGNAL", "check_interrupts", "run_coordinator"]

# -- roster of the blocks, their teams, and the trial that each team trains; pure, like the coordinator.
# A team is the ranks that train one fold together. A block, which gets a whole trial, is one team or one
# team per fold. At the end of a search teams may unite under the number of the first; they part when one
# of their ranks dies or they fail together.


class Roster:
    """The teams of all blocks.

    Attributes:
        count: the number of teams at the start.
        training: by team, the trial it trains a fold of.

    Args:
        blocks: the number of blocks.
        teams: teams per block.

    Example:
        >>> roster = Roster(blocks=3, teams=1)
        >>> roster.unite(0, [1, 2])
        >>> roster.living, roster.strength(0), roster.news(0), roster.news(0)
        ([0], 3, (0, 1, 2), ())
        >>> roster.lose(1), roster.living
        (0, [0, 2])
    """

    def __init__(self, blocks: int, teams: int) -> None:
        self.count, self._each = blocks * teams, teams
        self.training: dict[int, RunningTrial] = {}
        self._made_of = {team: [team] for team in range(self.count)}
        self._teams = {block: [block * teams + index for index in range(teams)] for block in range(blocks)}
        self._incomplete: set[int] = set()
        self._changed: set[int] = set()

    @property
    def incomplete(self) -> list[int]:
        """The original teams that lost a rank."""
        return sorted(self._incomplete)

    @incomplete.setter
    def incomplete(self, teams: Iterable[int]) -> None:
        self._incomplete = set(teams)

    @property
    def living(self) -> list[int]:
        """The blocks that have teams, none of which lost a rank."""
        return [
            block
            for block, teams in self._teams.items()
            if teams and not self._incomplete.intersection(teams)
        ]

    @property
    def idle(self) -> list[int]:
        """The living blocks that train nothing."""
        return [block for block in self.living if not self.training.keys() & self._teams[block]]

    @property
    def idle_teams(self) -> list[int]:
        """The teams of living blocks that train nothing."""
        teams = (team for block in self.living for team in self._teams[block])
        return [team for team in teams if team not in self.training]

    def teams(self, block: int) -> list[int]:
        """Return the teams of a block."""
        return self._teams[block]

    def blocks_of(self, team: int) -> set[int]:
        """Return the blocks that a team's ranks came from."""
        return {one // self._each for one in self._made_of[team]}

    def strength(self, team: int) -> int:
        """Return how many original teams are in a team."""
        return len(self._made_of[team])

    def news(self, team: int) -> tuple[int, ...]:
        """Return the original teams in a team, once after each change; else nothing."""
        if team not in self._changed:
            return ()
        self._changed.discard(team)
        return tuple(self._made_of[team])

    def unite(self, team: int, others: Sequence[int]) -> None:
        """Unite teams under the number of the first."""
        for other in others:
            self._teams[other // self._each].remove(other)
            self._made_of[team] += self._made_of.pop(other)
            self._changed.add(team)

    def lose(self, team: int) -> int:
        """Record a death in an original team; return the team that now contains it.

        If that is a united team, it parts.
        """
        self._incomplete.add(team)
        whole = next(one for one, made_of in self._made_of.items() if team in made_of)
        self.part(whole)
        return whole

    def part(self, team: int) -> None:
        """Split a united team into its original teams."""
        for one in self._made_of[team][1:]:
            self._made_of[one] = [one]
            self._teams[one // self._each].append(one)
            self._changed |= {team, one}
        self._made_of[team] = [team]


# -- elastic end of a search: when nothing is left to begin, idle teams help running trials ------------
#     a waiting fold     is trained by an idle team
#     a running fold     is recalled: its team leaves after its next checkpoint and resumes with idle teams
#
# Help goes to the trial with the fewest ranks; among equals to the one that began last, which has most
# left to do. A trial about to end is not recalled, because a restart takes time too. After a death no
# team is recalled: MPI cannot split a communicator that has dead ranks.

# A trial is about to end after this share of the longest trial's time.
_ENDS_SOON = 0.75
# Failures that the added ranks did not cause.
_FAILS_ANYWAY = ("died", "NaN")


class ElasticPolicy:
    """Decides which idle teams help which trial.

    Args:
        roster: the teams.
        time_left: how long trials take.
    """

    def __init__(self, roster: Roster, time_left: TimeLeft) -> None:
        self._roster, self._time = roster, time_left
        self._recalled: set[int] = set()
        self._failed_with_helpers: set[int] = set()  # numbers of trials; they get no more helpers
        self._rank_died = False

    def folds(self, trials: Iterable[RunningTrial]) -> list[tuple[int, RunningTrial]]:
        """Pair idle teams with trials that have a waiting fold."""
        waiting = [running for running in trials for _ in running.waiting]
        return list(zip(self._roster.idle_teams, waiting, strict=False))

    def recalls(self, now_s: float) -> list[int]:
        """Return the teams to recall so that idle teams can join them; at most as many as are idle."""
        wanted = 0 if self._rank_died else len(self._roster.idle_teams) - len(self._recalled)
        training = self._roster.training.items()
        helped = sorted(
            (self._roster.strength(team), -running.began_s, team)
            for team, running in training
            if team not in self._recalled and self._needs_help(running, now_s)
        )
        teams = [team for _, _, team in helped[: max(0, wanted)]]
        self._recalled.update(teams)
        return teams

    def joining(self, team: int) -> list[int]:
        """Return the idle teams that join a recalled team; leave a share for recalled teams still to come."""
        idle, leaving = [one for one in self._roster.idle_teams if one != team], max(1, len(self._recalled))
        self._recalled.discard(team)
        if self._rank_died:
            return []
        return idle[: math.ceil(len(idle) / leaving)]

    def ended(self, team: int, running: RunningTrial, message: Done) -> bool:
        """Handle the end of a team's run; return whether to restart it without the teams that joined it.

        A training may fail only because it cannot use so many ranks; a failure without helpers counts.
        """
        self._recalled.discard(team)
        helped = self._roster.strength(team) > 1 and message.state == "failed" and not running.halted
        if not helped or message.failure in _FAILS_ANYWAY:
            return False
        self._failed_with_helpers.add(running.trial.number)
        self._roster.part(team)
        return True

    def report_death(self) -> None:
        """Recall no more teams, because a rank died."""
        self._rank_died = True

    def _needs_help(self, running: RunningTrial, now_s: float) -> bool:
        if running.halted or running.trial.number in self._failed_with_helpers:
            return False
        return not _ENDS_SOON * self._time.longest_s < now_s - running.began_s < self._time.longest_s


#: Reason given when a signal interrupted trials that the next start trains again.
SIGNAL = "a signal (SIGTERM or SIGUSR1) has come"


class Coordinator:
    """Hands out the trials of a search and handles their results.

    Args:
        source: provides trials and receives their results.
        blocks: the number of blocks.
        teams: teams per block: 1, or one per fold.
        folds: folds per trial.
        time_left: the time limit; None: no limit.
        clock: returns the time, in seconds.
        searchers: the teams of the search ranks, numbered after those of the blocks.
        lockstep: whether to report ends of trials to the source in the order in which the trials began, so
            that the search repeats at any pace of the blocks.
        elastic: whether idle teams help running trials when nothing is left to begin.

    Attributes:
        over: whether the search is over and every team has been sent `End`.
        interrupted: why trials were interrupted that the next start trains again; empty if none were.
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
        searchers: Sequence[int] = (),
        lockstep: bool = False,
        elastic: bool = False,
    ) -> None:
        self._source, self._folds, self._lockstep = source, folds, lockstep
        self._teams = teams
        self._time, self._clock = time_left or TimeLeft(), clock
        self._roster, self._run_count = Roster(blocks, teams), 0
        self._elastic = ElasticPolicy(self._roster, self._time) if elastic else None
        self._searchers = searchers
        self._runs_before = 0  # how many runs began before this rank took over
        self._unreported: list[RunningTrial] = []  # trials whose end the source does not know, in order
        self._lost: list[Death] = []
        self._broken: set[int] = set()  # runs that lost a rank
        self._stopped = self._cut = False  # cut: in lock-step, discard later results
        self.over, self.interrupted = False, ""

    def begin(self) -> list[TeamMessage]:
        """Give every block its first trial."""
        return self._fill_blocks()

    def think(self) -> bool:
        """Choose the next trial while all blocks train; return whether there was one to choose."""
        return bool(self._training) and self._source.chooser.think(len(self._roster.living))

    def look(self) -> list[TeamMessage]:
        """Interrupt running trials when the time is up; let idle teams help long trials."""
        if self._training and not self.interrupted and self._time.over(self._clock()):
            return self.interrupt("the time is up")
        # No trial runs, so the source had none to give last time: ask again.
        return self._help_running() if self._unreported or self.over else self._fill_blocks()

    def interrupt(self, reason: str) -> list[TeamMessage]:
        """Interrupt running trials; the same command trains them again."""
        if self.over or self.interrupted:
            return []
        self.interrupted = reason
        return self._stop(reason)

    def lost(self, death: Death) -> list[TeamMessage]:
        """Continue without the block or the search rank that died.

        The block's trial fails, or another block retries it.

        Raises:
            PeerLostError: the last block died, and trials are left.
        """
        self._lost.append(death)
        if death.team < 0:
            self._source.warn(f"spare {death} has died, so it cannot take over from this rank")
            return []
        if death.team in self._searchers:
            left = self._source.chooser.lose_search_rank(death.team)
            self._source.warn(f"search {death} has died. Search ranks left: {left}")
            return [] if self.over else self._fill_blocks()
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
        """Handle a message from a team's leader; return the replies.

        Raises:
            ProtocolError: the message is about a run that the team does not train.
            NNLOError: the sampler failed on a search rank.
        """
        if isinstance(message, Chosen):
            if any(death.team == team for death in self._lost):
                return []
            self._source.chooser.chosen(team, message)
            return self._fill_blocks()
        if message.run in self._broken:  # sent before the ranks knew of the death
            return []
        running = self._roster.training.get(team)
        if running is None or running.runs[team] != message.run:
            if message.run < self._runs_before:  # the coordinator that has died has handled it
                return []
            raise ProtocolError(f"team {team} sent a message about run {message.run}, not its own")
        if isinstance(message, Done):
            return self._done(team, running, message)
        return self._source.handle(team, running, message)

    # -- copies for spares ----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return what another rank needs to go on from here, besides what `TrialSource.changes` gives."""
        return {
            "runs": self._run_count,
            "running": [running.state() for running in self._unreported],
            "incomplete": self._roster.incomplete,
            "lost": [(death.team, death.rank, death.host) for death in self._lost],
            "broken": sorted(self._broken),
            "stopped": self._stopped,
            "cut": self._cut,
            "over": self.over,
            "interrupted": self.interrupted,
            "longest_s": self._time.longest_s,
            "source": self._source.state(),
        }

    def changes(self) -> tuple[dict[str, Any], list[str]]:
        """Return the trials that have changed since the last call, by name, and new lines of the journal."""
        return self._source.changes()

    def take_over(self, inherited: Inheritance, here: str) -> list[TeamMessage]:
        """Go on as the coordinator that has died; return what the teams may not have been told.

        Args:
            inherited: what this rank has from it; the source has its trials already.
            here: this rank, for the user.
        """
        state = inherited.state
        self._source.warn(f"{inherited.dead}, which coordinated the search, has died; {here} takes over")
        if state is None:
            self._lost.append(inherited.dead)
            messages = [message for death in inherited.deaths for message in self.lost(death)]
            return [*messages, *self.begin()]
        self._run_count = self._runs_before = state["runs"]
        self._roster.incomplete = state["incomplete"]
        self._source.restore(state["source"])
        for one in state["running"]:
            running = RunningTrial.again(
                self._source.trial(one["trial"]), one, folds=self._folds, teams=self._teams
            )
            self._unreported.append(running)
            self._roster.training |= dict.fromkeys(running.runs, running)
        self._lost += [Death(*one) for one in state["lost"]]
        self._broken = set(state["broken"])
        self._stopped, self._cut, self.interrupted = state["stopped"], state["cut"], state["interrupted"]
        self._time.took(state["longest_s"])
        known = {death.rank for death in self._lost}
        self._lost.append(inherited.dead)
        if state["over"]:
            return self._end()
        messages = [
            TeamMessage(team, self._source.start(running, run, running.running[team]))
            for running in self._training
            for team, run in running.runs.items()
        ]
        messages += [
            TeamMessage(team, Halt(run, running.halted))
            for running in self._training
            if running.halted
            for team, run in running.runs.items()
        ]
        for team in self._searchers:
            if any(death.team == team for death in self._lost):
                self._source.chooser.lose_search_rank(team)
        for death in inherited.deaths:
            if death.rank not in known:
                messages += self.lost(death)
        return [*messages, *([] if self.over else self._fill_blocks())]

    # -- beginning ------------------------------------------------------------------------------------

    @property
    def _training(self) -> list[RunningTrial]:
        return [running for running in self._unreported if not running.over]

    def _fill_blocks(self) -> list[TeamMessage]:
        """Start trials on idle blocks; end the search when nothing runs and nothing is left."""
        messages = []
        source, living, idle = self._source, self._roster.living, self._roster.idle
        chooser = source.chooser
        first = not self._training
        for block in [*idle]:
            if not chooser.open:
                break
            now_s = self._clock()
            if not self._time.suffices(now_s, [running.began_s for running in self._training]):
                source.warn(f"no more trials begin: {self._time.told}")
                source.withdraw("too little time is left")
                break
            trial = source.take(block, first=first, living=len(living))
            if trial is not None:
                idle.remove(block)
                messages += self._begun(block, trial, now_s)
        messages += [*chooser.orders(len(idle), len(living)), *self._obey_source(), *self._help_running()]
        if self._unreported or self.over or (living and chooser.pending):
            return messages
        if not living and (left := chooser.left()):
            count = f"; trials left: {left}" if left < math.inf else ""
            raise PeerLostError(self._lost[-1].rank, f"has died, and with it the last block{count}")
        return [*messages, *self._end()]

    def _end(self) -> list[TeamMessage]:
        """End the search."""
        self.over = True
        end = End(-1, self._source.finish(self._lost), self.interrupted)
        everyone = range(self._roster.count + len(self._searchers))
        return [TeamMessage(team, end) for team in everyone]

    def _begun(self, block: int, trial: Any, now_s: float) -> list[TeamMessage]:
        teams = self._roster.teams(block)
        running = RunningTrial(trial, folds=self._folds, teams=len(teams), began_s=now_s, block=block)
        self._unreported.append(running)
        return [self._start(team, running) for team in teams]

    def _start(self, team: int, running: RunningTrial) -> TeamMessage:
        """Start the next fold."""
        fold, run = running.waiting.popleft(), self._run_count
        self._run_count += 1
        running.running[team], running.runs[team] = fold, run
        self._roster.training[team] = running
        start = self._source.start(running, run, fold)
        return TeamMessage(team, start, made_of=self._roster.news(team))

    # -- ending ---------------------------------------------------------------------------------------

    def _done(self, team: int, running: RunningTrial, message: Done) -> list[TeamMessage]:
        fold = running.running.pop(team)
        del running.runs[team], self._roster.training[team]
        running.asking.discard(team)
        message = _nan_as_failure(message)
        messages = []
        if message.state == "recalled":
            if not running.halted:
                running.waiting.appendleft(fold)
                return [self._restart_recalled(team, running)]
            message = Done.halted(message.run, running.halted)
        if self._elastic is not None and self._elastic.ended(team, running, message):
            running.waiting.appendleft(fold)
            self._source.warn(
                f"trial {running.trial.number} failed after more ranks joined it; it continues on its "
                f"original ranks:\n{message.error}"
            )
            return [self._start(team, running), *self._fill_blocks()]
        if message.state == "halted" and not running.halted:
            messages += self.interrupt(SIGNAL)  # a training saved at a signal and left
        if message.state == "complete":
            running.values[fold] = message.values
            self._source.fold_done(running, fold, message)
        elif running.ending is None:
            running.ending = message
        if running.ending is not None:
            running.waiting.clear()
            reason = f"another fold ended the trial ({running.ending.state})"
            messages += self._halt_trial(running, reason)
        if running.over:
            return messages + self._ended(running)
        if running.waiting:
            return [*messages, self._start(team, running)]
        return messages + self._source.judged(running) + self._fill_blocks()

    def _ended(self, running: RunningTrial) -> list[TeamMessage]:
        """Report a trial's end to the source; in lock-step only after all trials that began earlier."""
        running.seconds = self._clock() - running.began_s
        if running.result.state in ("complete", "pruned"):
            self._time.took(running.seconds)
        messages = []
        for ended in self._reportable(running):
            self._source.tell(ended, interrupted=bool(self.interrupted), stopped=self._stopped)
            messages += [*self._obey_source(), *self._fill_blocks()]
        return messages

    def _reportable(self, running: RunningTrial) -> Iterator[RunningTrial]:
        """Yield the ended trials to report to the source now."""
        if not self._lockstep:
            self._unreported.remove(running)
            yield running
        while self._lockstep and self._unreported and self._unreported[0].over:
            ended = self._unreported.pop(0)
            if self._cut:  # only timing decided that it ended before the stop
                ended.ending = Done.halted(0, "an earlier trial was the last")
            self._cut |= ended.result.state == "halted"
            yield ended

    def _obey_source(self) -> list[TeamMessage]:
        """End the search if the source has a reason to stop."""
        if self._stopped or not self._source.stop_reason:
            return []
        self._cut = True
        return self._stop(self._source.stop_reason)

    def _stop(self, reason: str) -> list[TeamMessage]:
        """Interrupt running trials and begin no more."""
        self._stopped = True
        self._source.withdraw(reason)
        return [message for running in self._training for message in self._halt_trial(running, reason)]

    def _halt_trial(self, running: RunningTrial, reason: str) -> list[TeamMessage]:
        """Interrupt the folds of a trial that are running."""
        if running.halted:
            return []
        running.halted = reason
        running.waiting.clear()
        return [TeamMessage(team, Halt(run, reason)) for team, run in running.runs.items()]

    # -- helping, in an elastic search ----------------------------------------------------------------

    def _help_running(self) -> list[TeamMessage]:
        """Let idle teams help running trials when nothing is left to begin."""
        if self._elastic is None or self._stopped or self._source.chooser.pending:
            return []
        # Every block has a trial: its idle teams wait for the next one.
        if self._source.chooser.open and not self._roster.idle:
            return []
        messages = []
        for team, running in self._elastic.folds(self._training):
            self._note_help(running, [team])
            messages.append(self._start(team, running))
        recalls = self._elastic.recalls(self._clock())
        runs = [(team, self._roster.training[team].runs[team]) for team in recalls]
        return messages + [TeamMessage(team, Recall(run), leader_only=True) for team, run in runs]

    def _restart_recalled(self, team: int, running: RunningTrial) -> TeamMessage:
        """Restart the fold of a recalled team, together with the idle teams."""
        assert self._elastic is not None
        others = self._elastic.joining(team)
        self._note_help(running, others)
        self._roster.unite(team, others)
        return self._start(team, running)

    def _note_help(self, running: RunningTrial, teams: Sequence[int]) -> None:
        blocks = set().union(*map(self._roster.blocks_of, teams))
        self._source.add_helpers(running, blocks, self._clock())


def _nan_as_failure(message: Done) -> Done:
    """Return the message, or a failure if a value is NaN."""
    if message.state != "complete" or not any(map(math.isnan, message.values)):
        return message
    said = f"the objective returned NaN: {message.values}"
    return Done(message.run, "failed", error=said, failure="NaN")


# -- event loop of the coordinator's rank: passes messages, deaths, signals and time to the state machine.

# How often the coordinator checks the clock and signals while no message arrives.
_LOOK_EVERY_S = 0.2
# Choose trials ahead only after this much silence: a block that begins asks for one parameter after another
# and must not wait for a choice in between.
_QUIET_S = 5e-3


def check_interrupts(coordinator: Coordinator, interrupts: Interrupts) -> list[TeamMessage]:
    """Interrupt running trials after a signal or at the time limit."""
    return coordinator.interrupt(SIGNAL) if interrupts.came else coordinator.look()


def run_coordinator(
    coordinator: Coordinator,
    channel: CoordinatorChannel,
    interrupts: Interrupts,
    *,
    inherited: Inheritance | None = None,
    here: str = "",
) -> None:
    """Run the coordinator until the search is over.

    Args:
        coordinator: the coordinator.
        channel: its channel.
        interrupts: the signals that this process received.
        inherited: what this rank has from the coordinator that has died; None: none has.
        here: names this rank, if it takes over.
    """

    def deliver(messages: list[TeamMessage]) -> None:
        # Spares first: what any rank has been told, the next coordinator must know.
        if messages and channel.spares:
            channel.copy(coordinator.state(), *coordinator.changes())
        channel.deliver(messages)

    deliver(coordinator.begin() if inherited is None else coordinator.take_over(inherited, here))
    while not coordinator.over:
        event = channel.receive(_QUIET_S)
        if event is None and coordinator.think():
            continue
        event = event or channel.receive(_LOOK_EVERY_S)
        if isinstance(event, Death):
            deliver(coordinator.lost(event))
        elif event is not None:
            deliver(coordinator.handle(*event))
        deliver(check_interrupts(coordinator, interrupts))
