"""Endpoints of a group: what its lead receives about the centre, all its ranks receive, in the same order.

Every rank of a group runs the same state machine of a worker. Only the lead's messages go out, and each reply
to it is broadcast in the group when the lead takes it. So the machines of all ranks take the same events at
the same points, and their numbers stay equal bit for bit, whatever the algorithm.

    servers ◄──► lead ──broadcast──► members

Queries are not shared: each rank asks the query service for itself, while the others train.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._flat_vector import HEADER_BYTES, Apart, Frame, PartWork, Vector
from nnlo_common.cluster.transport._endpoint import Endpoint, GroupCalls, Link, Numbers, Transfer
from nnlo_common.protocol import Event, Kind, Message, Received, decode
from nnlo_common.protocol._events import Part
from nnlo_common.protocol._messages import announced

__all__ = ["EndpointGroup", "LeadEndpoint", "MemberEndpoint", "QueryEndpoint", "group_links"]

# -- group of ranks over an endpoint: its operations are messages, which a trial of a search can break off --
# A collective call of MPI that a rank has begun can neither be cancelled nor end without the others, so a
# trial in which one rank is pruned, fails or is halted could not end. Here every wait is for a message,
# at an endpoint that looks for alarms, and messages still under way are received and dropped when the
# trial ends.
#
#     members ──part──► lead ──result──► members
#
# The lead adds up in the order of the ranks, so that all get the same bits. It has the traffic of all
# members, which suits the few ranks of a trial's group.

#: The most numbers in a message; longer vectors are cut.
PIECE = 1 << 16


def group_links(index: int, size: int) -> list[Link]:
    """Return the links of a rank of a group: the lead's to all others, theirs to the lead.

    Example:
        >>> [link.peer for link in group_links(0, 3)], [link.peer for link in group_links(2, 3)]
        ([1, 2], [0])
    """
    peers = range(1, size) if index == 0 else [0]
    return [Link(peer, 0, PIECE, 1, index == 0) for peer in peers]


class EndpointGroup:
    """The ranks of one logical worker.

    Args:
        endpoint: an endpoint of these ranks alone, with `group_links`; closed with the group.
        index: this rank's number among them; 0 is the lead.
        ranks: their numbers in the training.
    """

    def __init__(self, endpoint: Endpoint, index: int, ranks: Sequence[int]) -> None:
        self._endpoint, self.index, self.ranks = endpoint, index, tuple(ranks)
        self._arrived: dict[int, deque[tuple[Vector, Frame]]] = defaultdict(deque)  # by peer, unread
        self._sent = 0

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each."""
        everyone: Numbers = np.zeros((len(self.ranks), numbers.size))
        everyone[self.index] = numbers
        self._collect([row.view(np.float32) for row in everyone])
        self._spread(everyone.reshape(-1).view(np.float32))
        return everyone

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index."""
        sizes = self.gather(np.array([len(data)], np.float64))[:, 0].astype(int).tolist()
        everyone = [np.zeros(-(-size // 4), np.float32) for size in sizes]
        everyone[self.index].view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
        self._collect(everyone)
        for part in everyone:
            self._spread(part)
        return [part.view(np.uint8)[:size].tobytes() for part, size in zip(everyone, sizes, strict=True)]

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks, added in their order."""
        for start in range(0, vector.size, PIECE):
            piece = vector[start : start + PIECE]
            if self.index:
                self._send(0, piece)
            else:
                for peer in range(1, len(self.ranks)):
                    other, frame = self._next(peer)
                    piece += other
                    self._endpoint.release(peer, frame)
            self._spread(piece)

    def deal(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Give each rank its row; return the rows that all have for this one, by rank."""
        return np.stack([rows_of.reshape(rows.shape)[self.index] for rows_of in self.show(rows.reshape(-1))])

    def show(self, row: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Return the rows of all ranks, equally long."""
        return np.stack([np.frombuffer(data, np.uint16) for data in self.gather_bytes(row.tobytes())])

    def broadcast(self, data: npt.NDArray[np.uint8]) -> _LeadCopy:
        """Begin to copy the lead's bytes into those of the others."""
        numbers = np.zeros(-(-data.size // 4), np.float32)
        if self.index == 0:
            numbers.view(np.uint8)[: data.size] = data
            self._spread(numbers)
        return _LeadCopy(self, numbers, data)

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self.gather(np.zeros(1))

    def twin(self) -> EndpointGroup:
        """Refuse: only one thread may use the endpoint."""
        raise ConfigurationError("a second thread cannot add up gradients in a trial of a search")

    def communicator(self) -> None:
        """Return None: no call of a trial's group may be one that cannot be broken off."""

    def without_dead(self) -> EndpointGroup:
        """Refuse: a trial ends with any of its ranks."""
        raise ConfigurationError("a trial of a search cannot go on without one of its ranks")

    def end(self, dead: int) -> NoReturn:
        """Raise: a trial ends with any of its ranks."""
        raise PeerLostError(dead, "has died in a trial of a search")

    def close(self) -> None:
        """Release its resources."""
        self._endpoint.close()

    def _collect(self, parts: Sequence[Vector]) -> None:
        """Fill the lead's parts with those of the others."""
        if self.index:
            self._send(0, parts[self.index])
            return
        for peer in range(1, len(self.ranks)):
            self._receive(peer, parts[peer])

    def _spread(self, numbers: Vector) -> None:
        """Copy the lead's numbers to the others."""
        if self.index:
            self._receive(0, numbers)
            return
        for peer in range(1, len(self.ranks)):
            self._send(peer, numbers)
        self._endpoint.flush()  # the lead may compute next

    def _send(self, peer: int, numbers: Vector) -> None:
        kind = Kind.CENTER if self.index == 0 else Kind.EXCHANGE
        for start in range(0, numbers.size, PIECE):
            self._sent += 1
            piece = numbers[start : start + PIECE]
            self._endpoint.send(peer, Message(kind, self.index, self._sent, vector=piece))

    def _receive(self, peer: int, into: Vector, timeout_s: float | None = None) -> bool:
        """Receive all pieces; False after `timeout_s`, with nothing taken."""
        if into.size and not self._awaited(peer, timeout_s):
            return False
        for start in range(0, into.size, PIECE):
            numbers, frame = self._next(peer)
            into[start : start + PIECE] = numbers
            self._endpoint.release(peer, frame)
        return True

    def _next(self, peer: int) -> tuple[Vector, Frame]:
        self._awaited(peer)
        return self._arrived[peer].popleft()

    def _awaited(self, peer: int, timeout_s: float | None = None) -> bool:
        """Wait until a message of a peer is there; False after `timeout_s`."""
        while not self._arrived[peer]:
            event = self._endpoint.receive(timeout_s)
            if event is None:
                return False
            if not isinstance(event, Received):
                raise PeerLostError(self.ranks[event.rank], "has died; its group waited for it")
            message = event.message
            assert message.vector is not None  # of these kinds all have one
            self._arrived[message.sender].append((message.vector, event.frame))
        return True


class _LeadCopy:
    """A broadcast under way."""

    def __init__(self, group: EndpointGroup, numbers: Vector, data: npt.NDArray[np.uint8]) -> None:
        self._group, self._numbers, self._data = group, numbers, data

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`."""
        if self._group.index and not self._group._receive(0, self._numbers, timeout_s):
            return False
        self._data[:] = self._numbers.view(np.uint8)[: self._data.size]
        return True


class LeadEndpoint:
    """Endpoint of a group's lead for its messages with the servers; the group receives the replies, too.

    Args:
        endpoint: the lead's own endpoint.
        group: its group.
        asking: the channel of queries, whose answers are the lead's alone.
    """

    def __init__(self, endpoint: Endpoint, group: GroupCalls, asking: int) -> None:
        self._endpoint, self._group, self._asking = endpoint, group, asking
        self._early: deque[Event] = deque()  # replies that came while the lead waited for an answer
        self._arriving: tuple[Received, Iterator[Part | None]] | None = None  # a reply that has begun to
        self.send, self.release, self.flush = endpoint.send, endpoint.release, endpoint.flush
        self.send_ahead, self.withdraw, self.abandon = (
            endpoint.send_ahead,
            endpoint.withdraw,
            endpoint.abandon,
        )

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next reply, which all ranks of the group get; None after `timeout_s`."""
        if self._arriving is None:
            event = self._early.popleft() if self._early else self._endpoint.receive(timeout_s)
            if not isinstance(event, Received):
                return event
            self._arriving = event, iter(()) if event.parts is None else event.parts(event.message.vector)
        event, parts = self._arriving
        for part in parts:
            if part is None and timeout_s is not None:
                return None
        self._arriving, vector = None, event.message.vector
        size = HEADER_BYTES + (0 if vector is None else vector.nbytes)
        self._group.broadcast(event.frame.bytes[:HEADER_BYTES]).wait()
        if size > HEADER_BYTES:
            self._group.broadcast(event.frame.bytes[HEADER_BYTES:size]).wait()
        return Received(event.message, event.frame)

    def receive_answer(self, timeout_s: float | None = None) -> Event | None:
        """Return the answer to a query; None after `timeout_s`. Replies wait until they are received."""
        event = self._endpoint.receive(timeout_s)
        if isinstance(event, Received) and event.message.shard != self._asking:
            self._early.append(event)
            return None
        return event

    def close(self) -> None:
        """Complete all sends and release all memory."""
        self._endpoint.close()
        self._group.close()


class QueryEndpoint:
    """A lead's endpoint for its queries, beside its `LeadEndpoint`.

    Args:
        endpoint: the lead's endpoint.
    """

    def __init__(self, endpoint: LeadEndpoint) -> None:
        self.send, self.release, self.flush = endpoint.send, endpoint.release, endpoint.flush
        self.receive, self.close = endpoint.receive_answer, endpoint.close
        self.send_ahead, self.withdraw, self.abandon = (
            endpoint.send_ahead,
            endpoint.withdraw,
            endpoint.abandon,
        )


class MemberEndpoint:
    """Endpoint of any other rank of a group: sends nothing, and receives what the lead receives.

    Args:
        endpoint: this rank's own endpoint, for its queries; closed with this one.
        group: its group.
        size: the largest number of values in a message.
    """

    def __init__(self, endpoint: Endpoint, group: GroupCalls, size: int) -> None:
        self._endpoint, self._group, self._size = endpoint, group, size
        self._header = np.empty(HEADER_BYTES, np.uint8)
        self._transfer: Transfer | None = None  # of the next header
        self._frames: list[Frame] = []  # free
        self._lent: dict[int, Frame] = {}  # those of received messages, by id

    def send(
        self,
        peer: int,
        message: Message,  # noqa: ARG002
        frame: Frame | None = None,
        fill: PartWork | None = None,  # noqa: ARG002 - only servers fill
    ) -> None:
        """Send nothing, because the lead sends the same message; a received frame is free again."""
        if frame is not None:
            self.release(peer, frame)

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        """Send nothing, because the lead does."""

    def withdraw(self, peer: int, shard: int) -> None:
        """Send nothing, because the lead does."""

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next reply that the lead receives; None after `timeout_s`."""
        if self._transfer is None:
            self._transfer = self._group.broadcast(self._header)
        if not self._transfer.wait(timeout_s):
            return None
        self._transfer = None
        frame = self._frames.pop() if self._frames else Frame(self._size)
        self._lent[id(frame)] = frame
        frame.bytes[:HEADER_BYTES] = self._header
        size = HEADER_BYTES + 4 * announced(frame)
        if size > HEADER_BYTES:
            self._group.broadcast(frame.bytes[HEADER_BYTES:size]).wait()
        return Received(decode(frame, size), frame)

    def release(self, peer: int, frame: Frame) -> None:  # noqa: ARG002
        """Use the memory of a received message again; do nothing for any other."""
        if self._lent.pop(id(frame), None) is not None:
            self._frames.append(frame)

    def abandon(self, peer: int) -> None:
        """Never wait for this peer again."""
        self._endpoint.abandon(peer)

    def flush(self) -> None:
        """Do nothing: this rank sends nothing here."""

    def close(self) -> None:
        """Release all memory."""
        self._endpoint.close()
        self._group.close()
