"""A rank's channel to the coordinator and its partners: messages sorted by run and kind, alarms first.

Requirements that shaped this module:

* A rank of a block may be one run behind its partners, so messages about later ones are kept, and those
  about earlier ones dropped.
* Nobody waits for a rank that has left its objective by an error. That rank sends an alarm, and whoever
  waits for anything within the same run looks out for it. A rank that is dead is everybody's alarm.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TypeVar

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._mail import Mail
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

#: What has become of the rank that coordinates.
DIED = "has died, which coordinated the search"

_M = TypeVar("_M", bound=SearchMessage)
_Box = deque[tuple[int, SearchMessage]]


class RankChannel:
    """The messages to and from one rank.

    Attributes:
        members: the ranks that train together.
        rank: this rank's number among them.
        run: the number of the run that is under way; -1 before the first.
        halted: why the coordinator has broken it off; empty where it has not.
        lost: which of those that train together have died.
        told: whether another rank tells the user that the coordinator has.

    Args:
        mail: this rank's.
        coordinator: the rank that hands out trials.
        members: as of the attribute, to begin with.
        rank: as of the attribute, to begin with.
    """

    def __init__(self, mail: Mail, coordinator: int, members: Sequence[int], rank: int) -> None:
        self._mail, self._coordinator = mail, coordinator
        self.members, self.rank = tuple(members), rank
        self._boxes: dict[int, dict[type[SearchMessage], _Box]] = {}
        self._orders: deque[Start | End | Choose] = deque()
        self.run, self.halted = -1, ""
        self._dead: set[int] = set()
        self.lost: set[int] = set()
        self._orphaned = self.told = False

    @property
    def recalled(self) -> bool:
        """Whether the coordinator has asked, as far as messages have been taken in, to leave this run."""
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
            for old in [run for run in self._boxes if run < order.run]:
                del self._boxes[old]
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
        """Take in what has come.

        Args:
            gathering: what this rank waits in, if it is one. Ranks leave a gathering all or none: as long as
                all have taken part in it, it comes to its end whatever has happened since.

        Raises:
            PeerLostError: the trial is not to go on.
        """
        while self.take_in(0):
            pass
        self._heed(gathering)

    def _heed(self, gathering: int | None = None) -> None:
        """Raise what has been taken in; nothing more is, or a wait would miss it."""
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
            PeerLostError: it will not come.
        """
        while True:
            while self.take_in(0):
                pass
            # Before the alarm: a leader that prunes has told its partners so, and they do it themselves.
            if (found := self.taken(kind)) is not None:
                return found[1]
            self._heed()
            self.take_in(None)

    def taken(self, kind: type[_M]) -> tuple[int, _M] | None:
        """Return a message of a kind about this run that is there, with its sender in the block."""
        box = self._pending(kind)
        if not box:
            return None
        peer, message = box.popleft()
        assert isinstance(message, kind)
        return (self.members.index(peer) if peer in self.members else -1), message

    def take_in(self, timeout_s: float | None) -> bool:
        """Put away the next message; False if there was none in time.

        Raises:
            PeerLostError: the coordinator has died.
        """
        received = None if self._orphaned else self._mail.receive(timeout_s)
        if isinstance(received, Lost):
            self._dead.add(received.rank)
            self._look_for_lost()
            self._orphaned = received.rank == self._coordinator
        message = from_text(received[1]) if isinstance(received, tuple) else None
        if isinstance(message, LossReported):
            self._orphaned = self.told = True
        if self._orphaned:  # for whoever asks next, too: an objective may take it for its trial's end
            raise PeerLostError(self._coordinator, DIED)
        if message is None:
            return received is not None
        assert isinstance(received, tuple)  # or it would hold no message
        peer, _ = received
        if isinstance(message, (Start, End, Choose)):
            self._orders.append(message)
        elif message.run >= self.run:
            boxes = self._boxes.setdefault(message.run, defaultdict(deque))
            boxes[type(message)].append((peer, message))
        return True

    def _look_for_lost(self) -> None:
        self.lost = {member for member, peer in enumerate(self.members) if peer in self._dead}

    def _pending(self, kind: type[SearchMessage]) -> _Box:
        return self._boxes.setdefault(self.run, defaultdict(deque))[kind]
