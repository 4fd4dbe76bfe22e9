"""Memory for the messages of a link: the posted receives, and where the parts of a message lie in it."""

from __future__ import annotations

from collections import deque

from nnlo_common.base._flat_vector import HEADER_BYTES, Frame
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import MPI
from nnlo_common.protocol._messages import PART, announced

__all__ = ["SHORT_BYTES", "Channel", "Slot", "numbers_in", "places"]

# Reading a reply of this size within a host costs less than one poll by a thread: 0.1 ms.
SHORT_BYTES = 1 << 20


class Channel:
    """The receive slots of one link, in posting order.

    MPI matches the messages of one pair to receives in posting order, but may complete a short message before
    an earlier long one. So a message counts as received when all before it are.
    """

    __slots__ = ("link", "posted", "reads_late", "staging")

    def __init__(self, link: Link, *, near: bool) -> None:
        self.link = link
        #: The peer reads short replies after its compute step, not through a progress thread.
        self.reads_late = near and link.depth > 1 and 4 * link.size <= SHORT_BYTES
        self.posted: deque[Slot] = deque()
        self.staging: deque[Frame] = deque()

    def staged(self) -> Frame:
        """Return the frame for the next outgoing copy: the least recently used one."""
        if not self.staging:
            self.staging.extend(Frame(self.link.size) for _ in range(self.link.depth + 1))
        self.staging.rotate()
        return self.staging[0]


class Slot:
    """Memory for one message, its receive request and their state."""

    __slots__ = ("arrived", "channel", "frame", "index", "parts", "receive", "replying")

    def __init__(self, channel: Channel, index: int, frame: Frame, receive: MPI.Prequest) -> None:
        self.channel, self.index, self.frame, self.receive = channel, index, frame, receive
        self.arrived = self.replying = False
        self.parts: deque[MPI.Request] = deque()  # of a message in parts: those under way, but the first

    def post(self) -> None:
        """Post the receive again."""
        self.arrived = self.replying = False
        self.frame.header[0] = 0  # see MPIEndpoint._moving
        self.channel.posted.append(self)
        self.receive.Start()

    def places(self) -> list[slice]:
        """Return where the parts of the message that has begun to arrive lie."""
        return places(HEADER_BYTES + 4 * min(announced(self.frame), self.frame.vector.size))

    def retire(self) -> None:
        """Stop expecting messages: the peer is dead."""
        self.arrived, self.replying = True, False
        self.frame.header[0] = 0
        self.parts.clear()


def places(size: int) -> list[slice]:
    """Return where the parts of a message of `size` bytes lie; the first includes the header."""
    ends = [*range(HEADER_BYTES + 4 * PART, size, 4 * PART), size]
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def numbers_in(place: slice) -> slice:
    """Return the numbers of the vector that lie in this place of the message."""
    return slice(max(0, place.start - HEADER_BYTES) // 4, (place.stop - HEADER_BYTES) // 4)
