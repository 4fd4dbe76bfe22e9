"""Long vectors in parts: of a reply, while later ones are computed; of a request, ahead of its message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from nnlo_common.base._flat_vector import HEADER_BYTES, Apart, Frame, Vector, blocks, put_together
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import MPI
from nnlo_common.protocol._events import Part

__all__ = ["PART", "IncomingAhead", "IncomingParts", "OutgoingAhead", "bytes_of", "parts", "tag_of_parts"]

# -- parts of a long reply: a server sends each once it is computed, a worker receives a few at a time --
# A long exchange is limited by the memory. So later parts are computed while earlier ones are sent and
# applied, and the worker receives them where they belong or, to compute with them, in turn into little
# memory, which stays in a cache. The first part is a message like any other, whose header announces the
# rest; they have a tag of their own.

#: Numbers in a part: 512 KiB. A longer reply is sent in parts.
PART = 1 << 17
# Parts of a vector of this size are longer. A few of either kind stay in a second-level cache.
_LARGE, _LONG_PART = 1 << 21, 1 << 18
# Parts whose receives are posted ahead. Within a host the worker copies all that has come, in one call.
_AHEAD_NEAR, _AHEAD_FAR = 2, 3
# MPI grants tags up to 32767; those of shards are far below.
_TAG = 1 << 14


def parts(size: int) -> Iterator[slice]:
    """Cut a vector of `size` numbers into parts.

    Example:
        >>> [(part.start, part.stop) for part in parts(PART + 7)]
        [(0, 131072), (131072, 131079)]
    """
    return blocks(slice(0, size), PART if size < _LARGE else _LONG_PART)


def bytes_of(part: slice) -> slice:
    """Return the place of a part in a frame; the header belongs to the first."""
    return slice(HEADER_BYTES + 4 * part.start if part.start else 0, HEADER_BYTES + 4 * part.stop)


def tag_of_parts(shard: int) -> int:
    """Return the tag of all parts behind the first."""
    return _TAG + shard


class IncomingParts:
    """The parts behind the first of the replies of one server.

    Args:
        comm: the communicator.
        link: to the server.
        near: the server is on this host.
    """

    def __init__(self, comm: MPI.Intracomm, link: Link, *, near: bool) -> None:
        self._comm, self._link = comm, link
        self._ahead = _AHEAD_NEAR if near else _AHEAD_FAR
        self._room = deque(Frame(min(link.size, _LONG_PART)) for _ in range(self._ahead + 1))
        self._posted: deque[tuple[Part, MPI.Request]] = deque()
        self._later: deque[slice] = deque()
        self.first = slice(0, 0)  # the part that came with the header

    def __bool__(self) -> bool:
        """Whether any part has not been taken."""
        return bool(self._posted or self._later)

    def expect(self, size: int) -> None:
        """Expect the parts of a reply of `size` numbers, whose first is there."""
        self.first, *later = parts(size)
        self._later.extend(later)

    def post(self, into: Vector | None = None) -> None:
        """Post receives of the next parts; call it after `expect` and after each `take`.

        Args:
            into: where the numbers go; None: into memory that is used again.
        """
        while self._later and len(self._posted) < self._ahead:
            part = self._later.popleft()
            memory = self._room[0].vector[: part.stop - part.start] if into is None else into[part]
            request = self._comm.Irecv(
                [memory.view(np.uint8), MPI.BYTE], self._link.peer, tag_of_parts(self._link.shard)
            )
            self._posted.append(((part, memory), request))
            self._room.rotate(-1)

    @property
    def next(self) -> MPI.Request:
        """The request of the next part."""
        return self._posted[0][-1]

    def take(self) -> Part:
        """Return the next part, which has arrived; its numbers are valid until the next call."""
        part, _ = self._posted.popleft()
        return part

    def finish(self) -> None:
        """Wait for all parts: their sender waits until they are received."""
        while self:
            self.post()
            self.next.Wait()
            self.take()

    def forget(self) -> None:
        """Expect no more parts: their sender is dead."""
        self._posted.clear()
        self._later.clear()


# -- a vector that travels ahead of its message: a backward pass makes a gradient from its end to its
# beginning, a wire packs one from its beginning to its end, and each part leaves once it is made. The server
# keeps memory of its own for it, so that other messages may pass it. Its message, a header alone, says that
# it is complete.


class OutgoingAhead:
    """What a worker sends ahead of a message to one server.

    Args:
        comm: the communicator.
        link: to the server.
    """

    def __init__(self, comm: MPI.Intracomm, link: Link) -> None:
        self._comm, self._link = comm, link
        self._vector: Vector | None = None
        self._left: list[slice] = []  # the next one last
        self._apart: list[tuple[slice, Vector]] = []  # what of the vector lies elsewhere

    @property
    def open(self) -> bool:
        """Whether a part has left whose message has not."""
        return self._vector is not None

    def is_of(self, vector: Vector | None) -> bool:
        """Whether the parts that have left are of this vector."""
        mine = self._vector
        if mine is None or vector is None or mine.size != vector.size:
            return False
        return mine is vector or mine.__array_interface__["data"] == vector.__array_interface__["data"]

    def send(self, vector: Vector, start: int, apart: Apart = ()) -> Iterator[MPI.Request]:
        """Send the parts that lie behind `start` and have not left; give their requests."""
        if self._vector is None:
            self._vector, self._left, self._apart = vector, [*parts(vector.size)], []
        self._apart += apart
        while self._left and self._left[-1].start >= start:
            yield from self.send_part(self._vector, self._left.pop())

    def takes(self, vector: Vector | None) -> bool:
        """Whether the parts of this vector may leave in order, as they are made."""
        return self._link.in_order and vector is not None and vector.size == self._link.ahead

    def send_part(self, vector: Vector, part: slice) -> Iterator[MPI.Request]:
        """Send a part; give its request."""
        memory = self._memory_of(part, vector).view(np.uint8)
        yield self._comm.Isend([memory, MPI.BYTE], self._link.peer, tag_of_parts(self._link.shard))

    def _memory_of(self, part: slice, vector: Vector) -> Vector:
        """Return where the numbers of a part lie: all of them elsewhere, or in the vector."""
        for place, numbers in self._apart:
            if place.start <= part.start and part.stop <= place.stop:
                return numbers[part.start - place.start : part.stop - place.start]
        put_together(vector, part, self._apart)
        return vector[part]

    def rest(self) -> Iterator[MPI.Request]:
        """Send all parts that have not left, and forget the vector: its message follows."""
        if self._vector is not None:
            yield from self.send(self._vector, 0)
        self._vector, self._apart = None, []


class IncomingAhead:
    """What travels ahead of the messages of one worker, on the server.

    Args:
        comm: the communicator.
        link: to the worker.

    Attributes:
        frame: the memory of the vector, with room for the header that follows it.
    """

    def __init__(self, comm: MPI.Intracomm, link: Link) -> None:
        self.frame = Frame(link.size)
        order = [*parts(link.ahead)]
        self._requests = [
            comm.Recv_init(
                [self.frame.vector[part].view(np.uint8), MPI.BYTE], link.peer, tag_of_parts(link.shard)
            )
            for part in (order if link.in_order else reversed(order))
        ]
        self._in_order = link.in_order
        self._waits = False  # for parts

    def post(self) -> None:
        """Post the receives of all parts, unless they are."""
        if not self._waits:
            self.frame.vector[0] = 0  # see `arriving`
            MPI.Prequest.Startall(self._requests)
            self._waits = True

    @property
    def arriving(self) -> bool:
        """Whether parts come one after the other now, as far as is visible: what is packed begins with no 0.

        Between those of a backward pass there is time to sleep.
        """
        return self._in_order and self._waits and bool(self.frame.vector[:1].view(np.uint32)[0])

    def missing(self, came: Callable[[MPI.Request], bool]) -> MPI.Request | None:
        """Return the receive of a part that has not come; None: all have.

        Args:
            came: returns whether a receive is complete.
        """
        return next((request for request in reversed(self._requests) if not came(request)), None)

    def take(self, frame: Frame) -> Frame:
        """Return the vector behind the header of its message, which has come in `frame`; `post` follows."""
        self.frame.bytes[:HEADER_BYTES] = frame.bytes[:HEADER_BYTES]
        self._waits = False
        return self.frame

    def close(self) -> None:
        """Cancel the receives."""
        for request in self._requests:
            if self._waits:
                request.Cancel()
                request.Wait()
            request.Free()
