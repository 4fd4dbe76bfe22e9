"""Rank's channel to the coordinator and its partners: sorts messages by run and kind, alarms first.

Requirements that shaped this module:

* A rank of a block may be one run behind its partners, so it keeps messages about later runs and drops
  those about earlier ones.
* No rank waits for a rank that left its objective by an error. That rank sends an alarm, and every wait
  within the same run watches for it. A dead rank is an alarm for all.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TypeVar

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._endpoint import Mail
from nnlo_common.protocol import Lost
from nnlo_common.search.messages._search_messages import (
    Alarm,
    Choose,
    End,
    Halt,
    LossReported,
    Recall,
    SearchMessage,
    Start,
    from_text,
    to_text,
)

__all__ = ["DIED", "RankChannel"]

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
    """

    def __init__(self, mail: Mail, coordinator: int, members: Sequence[int], rank: int) -> None:
        self._mail, self._coordinator = mail, coordinator
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

    def regroup(self, members: Sequence[int]) -> None:
        """Train with other ranks from now on."""
        self.rank, self.members = members.index(self.members[self.rank]), tuple(members)
        self._look_for_lost()

    def next_order(self) -> Start | End | Choose:
        """Wait for the next run, the next choice, or the end."""
        while not self._orders:
            self.take_in(None)
        order = self._orders.popleft()
        if isinstance(order, Start):
            self.run, self.halted = order.run, ""
            for old in [run for run in self._queues if run < order.run]:
                del self._queues[old]
        return order

    def tell_coordinator(self, message: SearchMessage) -> None:
        """Send a message to the coordinator."""
        self._mail.send(self._coordinator, to_text(message))

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
            self._coordinator_lost = received.rank == self._coordinator
        elif received is not None:
            self._store(*received)
        if self._coordinator_lost:  # raise on every later call too: an objective may swallow the first
            raise PeerLostError(self._coordinator, DIED)
        return received is not None

    def _store(self, peer: int, text: str) -> None:
        message = from_text(text, f"the message from rank {peer}")
        if isinstance(message, LossReported):
            self._coordinator_lost = self.told = True
        elif isinstance(message, (Start, End, Choose)):
            self._orders.append(message)
        elif message.run >= self.run:
            queues = self._queues.setdefault(message.run, defaultdict(deque))
            queues[type(message)].append((peer, message))

    def _look_for_lost(self) -> None:
        self.lost = {member for member, peer in enumerate(self.members) if peer in self._dead}

    def _pending(self, kind: type[SearchMessage]) -> _Queue:
        return self._queues.setdefault(self.run, defaultdict(deque))[kind]
