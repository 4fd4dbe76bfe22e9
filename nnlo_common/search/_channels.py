"""Rank's channel to the coordinator and its partners: sorts messages by run and kind, alarms first.

Requirements that shaped this module:

* A rank of a block may be one run behind its partners, so it keeps messages about later runs and drops
  those about earlier ones.
* No rank waits for a rank that left its objective by an error. That rank sends an alarm, and every wait
  within the same run watches for it. A dead rank is an alarm for all.
* When the coordinator dies, the next living spare takes over. A spare has a copy of all that was decided
  before any rank is told of it. What a rank has told of its run, and has no answer to, it tells again.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.cluster.transport._endpoint import DivisibleWorld, Mail
from nnlo_common.protocol import Lost
from nnlo_common.search._search_messages import (
    Alarm,
    Choose,
    CoordinatorCopy,
    CopyKept,
    End,
    Halt,
    Left,
    LossReported,
    ParameterRequest,
    PruneRequest,
    Recall,
    RequestAnswer,
    SearchMessage,
    Start,
    from_text,
    to_text,
)

__all__ = [
    "CoordinatorChannel",
    "DIED",
    "Death",
    "Inheritance",
    "RankChannel",
    "SearchConnection",
    "TeamMessage",
    "connect_search",
]

# -- messages to teams and deaths in them, between the coordinator and its channel ---------------------


@dataclass(frozen=True, slots=True)
class TeamMessage:
    """Action: a message to a team.

    Attributes:
        team: the team's index; search ranks come after the blocks' teams.
        message: the message.
        leader_only: whether only the leader gets it; else every rank of the team.
        made_of: the original teams that are united from now on; empty: no change.
    """

    team: int
    message: SearchMessage
    leader_only: bool = False
    made_of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Death:
    """Event: a rank died.

    Attributes:
        team: the team that it was in at the start; -1: in none, it was a spare.
        rank: the rank.
        host: its host.
    """

    team: int
    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def error(self) -> str:
        """The error of the trial that the rank trained."""
        return f"{self}, which trained it, has died (killed, crashed or out of memory)"

    def of_block(self, living: int) -> str:
        """Describe the death and how many blocks are left."""
        return f"{self} has died; its block gets no more trials. Blocks left: {living}"


# -- coordinator's channel: messages to and from the teams and spares, and deaths among them -----------


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a spare has when it takes over from the coordinator that has died.

    Attributes:
        dead: the coordinator that has died.
        state: its state; None: it has told no team anything.
        changed: every trial that it has told of, by name.
        lines: the lines of its journal.
        deaths: all deaths in teams; some of them the coordinator knew.
    """

    dead: Death
    state: Mapping[str, Any] | None
    changed: Mapping[str, Any]
    lines: Sequence[str]
    deaths: Sequence[Death]


class CoordinatorChannel:
    """Sends and receives the messages between the coordinator and the teams, and copies for its spares.

    Args:
        mail: of the rank that coordinates, or may.
        teams: the ranks of every team.
        hosts: the host of every rank.
        rank: this rank.
        spares: the ranks that may take over, in this order.
    """

    def __init__(
        self,
        mail: Mail,
        teams: Sequence[tuple[int, ...]],
        hosts: Sequence[str],
        *,
        rank: int = 0,
        spares: Sequence[int] = (),
    ) -> None:
        self._mail, self._hosts, self._first = mail, hosts, tuple(teams)
        self._teams = list(teams)  # current ranks of each team
        self._team_of = {rank: index for index, team in enumerate(teams) for rank in team}
        self._rank, self._heirs = rank, [0, *spares]  # heirs: the coordinator, and who takes over from it
        self._present = {*self._team_of, *self._heirs} - {rank}
        self._early: deque[tuple[int, str] | Lost | Death] = (
            deque()
        )  # came while this rank waited for something else
        self._copies = 0
        self._left_before: list[int] = []  # spares that have left before this rank coordinated
        self._end: End | None = None  # what the teams were told

    @property
    def coordinates(self) -> bool:
        """Whether this rank is the coordinator."""
        return self._heirs[0] == self._rank

    @property
    def spares(self) -> Sequence[int]:
        """The living ranks that may take over from this one."""
        return self._heirs[1:]

    def copy(self, state: Mapping[str, Any], changed: Mapping[str, Any], lines: Sequence[str]) -> None:
        """Send the spares what this rank knows; return once they have it."""
        self._copies += 1
        text = to_text(CoordinatorCopy(self._copies, state, changed, tuple(lines)))
        for rank in self.spares:
            self._mail.send(rank, text)
        waiting = set(self.spares)
        while waiting:
            received = self._mail.receive(None)
            assert received is not None
            if isinstance(received, Lost) and received.rank in self.spares:
                waiting.discard(received.rank)
                self._early.append(self._death_of(received.rank))
            elif isinstance(received, tuple) and received[0] in waiting:
                waiting.discard(received[0])  # a spare sends nothing but this until the search is over
            else:
                self._early.append(received)

    def stand_by(self) -> End | Inheritance:
        """Keep what the coordinator sends until the search is over, or this rank must take over.

        Raises:
            PeerLostError: the search cannot continue.
        """
        state: Mapping[str, Any] | None = None
        changed, lines, deaths = dict[str, Any](), list[str](), list[Death]()
        dead = Death(-1, 0, self._hosts[0])
        told_by = 0
        while not self.coordinates:
            received = self._mail.receive(None)
            assert received is not None
            if isinstance(received, Lost):
                coordinator, death = self._heirs[0], self._death_of(received.rank)
                dead = death if death.rank == coordinator else dead
                deaths += [death] if death.team >= 0 else []
                continue
            rank, text = received
            message = from_text(text, f"the message from rank {rank}")
            if isinstance(message, CoordinatorCopy):
                if rank not in self._heirs:  # the last words of a dead coordinator
                    continue
                while self._heirs[0] != rank:  # those before it are dead
                    dead = Death(-1, self._heirs[0], self._hosts[self._heirs[0]])
                    self._present.discard(self._heirs.pop(0))
                if rank != told_by:  # it has taken over, and begins with a copy of everything
                    told_by = rank
                    changed.clear()
                    lines.clear()
                state = message.state
                changed |= message.changed
                lines += message.lines
                self._mail.send(rank, to_text(CopyKept(message.run)))
            elif isinstance(message, Left):
                self._note_left(rank)
            elif isinstance(message, End):
                self._leave()
                return message
            elif isinstance(message, LossReported):
                lost = PeerLostError(self._heirs[0], DIED)
                lost.said = True
                raise lost
            else:
                self._early.append(received)
        return Inheritance(dead, state, changed, lines, deaths)

    def _note_left(self, rank: int) -> None:
        self._present.discard(rank)
        if rank in self._heirs:
            self._heirs.remove(rank)
            self._left_before.append(rank)

    def _leave(self) -> None:
        """Leave as a spare once all others but the coordinator have left, so that no message is under way."""
        for rank in [*self._heirs, *self._left_before]:  # the latter, too, wait for all others
            if rank != self._rank:
                self._mail.send(rank, to_text(Left(-1)))
        others = self._present - {self._heirs[0]}
        while others & self._present:
            received = self._mail.receive(None)
            if isinstance(received, Lost):
                self._present.discard(received.rank)
            elif received is not None and isinstance(from_text(received[1]), Left):
                self._present.discard(received[0])

    def deliver(self, messages: Sequence[TeamMessage]) -> None:
        """Send messages to the living ranks of their teams."""
        for sent in messages:
            message = sent.message
            if isinstance(message, End):
                self._end = message
            if sent.made_of and isinstance(message, Start):
                self._regroup(sent.team, sent.made_of)
                message = replace(message, members=self._teams[sent.team])
            ranks, text = self._teams[sent.team], to_text(message)
            for rank in ranks[:1] if sent.leader_only else ranks:
                if rank in self._present:
                    self._mail.send(rank, text)

    def receive(self, timeout_s: float | None) -> tuple[int, SearchMessage] | Death | None:
        """Return the next message with its team, or a death; None after the timeout."""
        received = self._early.popleft() if self._early else self._mail.receive(timeout_s)
        if received is None or isinstance(received, Death):
            return received
        if isinstance(received, Lost):
            # None: a coordinator before this one, or a rank that has left.
            return self._death_of(received.rank) if received.rank in self._present else None
        rank, text = received
        message = from_text(text, f"the message from rank {rank}")
        if isinstance(message, Left):
            self._present.discard(rank)
        if rank not in self._team_of:  # a spare that leaves, or the last words of the coordinator before
            return None
        return self._team_of[rank], message

    def _death_of(self, rank: int) -> Death:
        self._present.discard(rank)
        if rank in self._heirs:
            self._heirs.remove(rank)
        return Death(self._team_of.get(rank, -1), rank, self._hosts[rank])

    def _regroup(self, team: int, made_of: Sequence[int]) -> None:
        """Unite the ranks of the original teams `made_of`; the first rank leads."""
        together = tuple(rank for one in made_of for rank in self._first[one])
        parted = [ranks for ranks in self._teams if not set(together).isdisjoint(ranks)]
        for one in {self._team_of[rank] for ranks in parted for rank in ranks}:
            self._teams[one] = self._first[one]
        for one in made_of:
            self._teams[one] = ()
        self._teams[team] = together

    def await_leaving(self) -> None:
        """Wait until every living rank has left, the spares last, so that no message is under way."""
        while self._present & self._team_of.keys():
            self.receive(None)
        if self._end is not None:
            for rank in self.spares:
                self._mail.send(rank, to_text(self._end))
        while self._present:
            self.receive(None)
        for rank in self._left_before:  # these wait for all others
            self._mail.send(rank, to_text(Left(-1)))


#: Problem in the error about the coordinator's death.
DIED = "has died; it coordinated the search"

_M = TypeVar("_M", bound=SearchMessage)
_Queue = deque[tuple[int, SearchMessage]]


class RankChannel:
    """Sends and receives one rank's messages.

    Attributes:
        members: the ranks that train together.
        rank: this rank's index among them.
        run: the number of the current run; -1 before the first.
        halted: why the coordinator halted the run; empty if it did not.
        lost: the indices of members that died.
        told: whether another rank reports the loss to the user.

    Args:
        mail: this rank's mail.
        coordinator: the coordinator's rank.
        members: the initial members.
        rank: this rank's initial index.
        spares: the ranks that take over from a dead coordinator, in this order.
    """

    def __init__(
        self, mail: Mail, coordinator: int, members: Sequence[int], rank: int, spares: Sequence[int] = ()
    ) -> None:
        self._mail, self._heirs = mail, [coordinator, *spares]
        self._replaced: set[int] = set()  # coordinators that are dead
        # What this rank has told of its run, less the requests that were answered.
        self._told: list[SearchMessage] = []
        self.members, self.rank = tuple(members), rank
        self._queues: dict[int, dict[type[SearchMessage], _Queue]] = {}
        self._orders: deque[Start | End | Choose] = deque()
        self.run, self.halted = -1, ""
        self._dead: set[int] = set()
        self.lost: set[int] = set()
        self._coordinator_lost = self.told = False

    @property
    def recalled(self) -> bool:
        """Whether a received message asks this rank to leave the run."""
        return bool(self._pending(Recall))

    @property
    def successions(self) -> int:
        """How many coordinators have died, as far as this rank knows."""
        return len(self._replaced)

    @property
    def _coordinator(self) -> int:
        return self._heirs[0]

    def regroup(self, members: Sequence[int]) -> None:
        """Train with other ranks from now on."""
        self.rank, self.members = members.index(self.members[self.rank]), tuple(members)
        self._look_for_lost()

    def next_order(self) -> Start | End | Choose:
        """Wait for the next run, the next choice, or the end."""
        while True:
            while not self._orders:
                self.take_in(None)
            order = self._orders.popleft()
            # A coordinator that has taken over repeats the orders for the runs under way.
            if not isinstance(order, Start) or order.run > self.run:
                break
        if isinstance(order, Start):
            self.run, self.halted = order.run, ""
            self._told.clear()
            for old in [run for run in self._queues if run < order.run]:
                del self._queues[old]
        return order

    def tell_coordinator(self, message: SearchMessage) -> None:
        """Send a message to the coordinator; again, if it dies before it has handled the message."""
        if message.run == self.run:
            self._told.append(message)
        self._mail.send(self._coordinator, to_text(message))

    def leave(self) -> None:
        """Tell the coordinator and its spares that this rank knows the search is over."""
        for heir in self._heirs:
            self._mail.send(heir, to_text(Left(-1)))

    def tell_partners(self, message: SearchMessage) -> None:
        """Send a message to all other ranks of the block."""
        text = to_text(message)
        for member, peer in enumerate(self.members):
            if member != self.rank:
                self._mail.send(peer, text)

    def check(self, gathering: int | None = None) -> None:
        """Receive all messages that have arrived, and raise alarms.

        Args:
            gathering: the gathering this rank waits in, if any. A gathering that all ranks have joined
                completes whatever happened since, so all ranks leave it or none does.

        Raises:
            PeerLostError: the trial must not continue.
        """
        while self.take_in(0):
            pass
        self._raise_alarms(gathering)

    def _raise_alarms(self, gathering: int | None = None) -> None:
        """Raise alarms received so far; receive nothing, or a caller's wait would miss it."""
        if self.lost:
            raise PeerLostError(min(self.lost), "of this block has died")
        for peer, alarm in self._pending(Alarm):
            assert isinstance(alarm, Alarm)
            if gathering is None or alarm.gathered <= gathering:
                raise PeerLostError(self.members.index(peer), f"of this block {alarm.problem}")
        for _, halt in self._pending(Halt):
            assert isinstance(halt, Halt)
            self.halted = halt.reason
            if gathering is None:
                raise PeerLostError(self._coordinator, f"has halted the trial: {halt.reason}")

    def wait(self, kind: type[_M]) -> _M:
        """Wait for the next message of a kind about this run.

        Raises:
            PeerLostError: the message will not come.
        """
        while True:
            while self.take_in(0):
                pass
            # Check this before alarms: partners of a leader that prunes must still get its verdict.
            if (found := self.taken(kind)) is not None:
                return found[1]
            self._raise_alarms()
            self.take_in(None)

    def taken(self, kind: type[_M]) -> tuple[int, _M] | None:
        """Return a received message of a kind about this run, with its sender's index in the block."""
        queue = self._pending(kind)
        if not queue:
            return None
        peer, message = queue.popleft()
        assert isinstance(message, kind)
        return (self.members.index(peer) if peer in self.members else -1), message

    def take_in(self, timeout_s: float | None) -> bool:
        """Receive and store the next message; False after the timeout.

        Raises:
            PeerLostError: the coordinator died.
        """
        received = None if self._coordinator_lost else self._mail.receive(timeout_s)
        if isinstance(received, Lost):
            self._dead.add(received.rank)
            self._look_for_lost()
            self._lose_heir(received.rank)
        elif received is not None:
            self._store(*received)
        if self._coordinator_lost:  # raise on every later call too: an objective may swallow the first
            raise PeerLostError(self._coordinator, DIED)
        return received is not None

    def _lose_heir(self, rank: int) -> None:
        """Turn to the next coordinator if this one is dead; tell it again what this rank has told."""
        if rank not in self._heirs:
            return
        if len(self._heirs) == 1:
            self._coordinator_lost = True
            return
        before = self._coordinator
        self._heirs.remove(rank)
        if rank == before:
            self._replaced.add(rank)
            self._orders = deque(order for order in self._orders if not isinstance(order, Choose))
            for message in self._told:
                self._mail.send(self._coordinator, to_text(message))

    def _store(self, peer: int, text: str) -> None:
        if peer in self._replaced:  # the next coordinator may have decided otherwise
            return
        message = from_text(text, f"the message from rank {peer}")
        if isinstance(message, LossReported):
            self._coordinator_lost = self.told = True
            return
        while peer in self._heirs and peer != self._coordinator:  # it has heard of the death first
            self._lose_heir(self._coordinator)
        if isinstance(message, RequestAnswer) and message.run == self.run:
            requests = (ParameterRequest, PruneRequest)
            self._told = [one for one in self._told if not isinstance(one, requests)]
        if isinstance(message, (Start, End, Choose)):
            self._orders.append(message)
        elif message.run >= self.run:
            queues = self._queues.setdefault(message.run, defaultdict(deque))
            queues[type(message)].append((peer, message))

    def _look_for_lost(self) -> None:
        self.lost = {member for member, peer in enumerate(self.members) if peer in self._dead}

    def _pending(self, kind: type[SearchMessage]) -> _Queue:
        return self._queues.setdefault(self.run, defaultdict(deque))[kind]


# -- connection of the ranks of a search: opens the channels of all ranks, and closes them -------------
# One rank reports that a search cannot continue. Under ULFM, MPI_Abort ends only the rank that calls it,
# so the other ranks run into the same error in turn.

# Each rank waits for the ranks before it; the first message between two ranks takes a while.
_TURN_S, _LAST_TURN, _DELIVERY_S = 0.4, 25, 0.3


@dataclass(frozen=True, slots=True)
class SearchConnection:
    """One rank's connection to a running search.

    Attributes:
        channel: to the coordinator and within the team; unused on the coordinator.
        coordinator_channel: to all teams and spares; used only on the coordinator and on spares.
        interrupts: the signals that this process received.
    """

    channel: RankChannel
    coordinator_channel: CoordinatorChannel
    interrupts: Interrupts


@contextmanager
def connect_search(
    world: DivisibleWorld, teams: Sequence[tuple[int, ...]], *, hint: str, spares: Sequence[int] = ()
) -> Iterator[SearchConnection]:
    """Connect the ranks of a search (collective); on exit wait until no message is under way.

    Args:
        world: the ranks; the first is the coordinator.
        teams: the ranks of each team, and of each search rank.
        hint: tells the user what a rerun does after a death that ends the search.
        spares: the ranks that take over from a dead coordinator, in this order.

    Raises:
        PeerLostError: a rank that the search needs died.
    """
    mine = next((team for team in teams if world.rank in team), (world.rank,))
    hosts = world.gather_text(world.host)
    mail = world.mail()
    channel = RankChannel(mail, 0, mine, mine.index(world.rank), spares)
    coordinator_channel = CoordinatorChannel(mail, teams, hosts, rank=world.rank, spares=spares)
    with (
        Interrupts() as interrupts,
        _reporting_loss(channel, mail, world, hosts, hint=hint, spares=len(spares)),
    ):
        yield SearchConnection(channel, coordinator_channel, interrupts)
        if coordinator_channel.coordinates:
            coordinator_channel.await_leaving()  # before the mail closes
        elif world.rank not in spares:
            channel.leave()
    mail.close()


@contextmanager
def _reporting_loss(
    channel: RankChannel, mail: Mail, world: DivisibleWorld, hosts: Sequence[str], *, hint: str, spares: int
) -> Iterator[None]:
    """Let only one rank report the death of a rank that the search needs."""
    try:
        yield
    except PeerLostError as lost:
        more = (
            f"; with spares={spares + 1} another rank would have taken over" if lost.problem == DIED else ""
        )
        end = PeerLostError(lost.rank, f"on {hosts[lost.rank]} {lost.problem}. {hint}{more}")
        end.said = not _reports(mail, world.rank, world.size, reported=channel.told or lost.said)
        raise end from lost.__cause__


def _reports(mail: Mail, rank: int, size: int, *, reported: bool) -> bool:
    """Return whether this rank reports the loss: only if no other rank has. If so, notify the others."""
    until_s = time.monotonic() + _TURN_S * max(0, min(rank - 1, _LAST_TURN))
    while not reported and (left_s := until_s - time.monotonic()) > 0:
        received = mail.receive(left_s)
        reported = isinstance(received, tuple) and isinstance(from_text(received[1]), LossReported)
    if reported:
        return False
    for peer in range(size):
        if peer != rank:
            mail.send(peer, to_text(LossReported(-1)))
    with suppress(PeerLostError):  # a notified rank may exit
        mail.receive(_DELIVERY_S)
    return True
