"""Endpoints of a group: what its lead receives about the centre, all its ranks receive, in the same order.

Every rank of a group runs the same state machine of a worker. Only the lead's messages go out, and each reply
to it is broadcast in the group when the lead takes it. So the machines of all ranks take the same events at
the same points, and their numbers stay equal bit for bit, whatever the algorithm.

    servers ◄──► lead ──broadcast──► members

Queries are not shared: each rank asks the query service for itself, while the others train.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from nnlo_common.base._flat_vector import HEADER_BYTES, Frame, PartWork
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.cluster.transport._group import Group, Transfer
from nnlo_common.protocol import Event, Message, Received, decode
from nnlo_common.protocol._events import Part
from nnlo_common.protocol._messages import announced

__all__ = ["LeadEndpoint", "MemberEndpoint", "QueryEndpoint"]


class LeadEndpoint:
    """Endpoint of a group's lead for its messages with the servers; the group receives the replies, too.

    Args:
        endpoint: the lead's own endpoint.
        group: its group.
        asking: the channel of queries, whose answers are the lead's alone.
    """

    def __init__(self, endpoint: Endpoint, group: Group, asking: int) -> None:
        self._endpoint, self._group, self._asking = endpoint, group, asking
        self._early: deque[Event] = deque()  # replies that came while the lead waited for an answer
        self._arriving: tuple[Received, Iterator[Part | None]] | None = None  # a reply that has begun to
        self.send, self.release, self.flush = endpoint.send, endpoint.release, endpoint.flush
        self.abandon = endpoint.abandon

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
        self.abandon = endpoint.abandon


class MemberEndpoint:
    """Endpoint of any other rank of a group: sends nothing, and receives what the lead receives.

    Args:
        endpoint: this rank's own endpoint, for its queries; closed with this one.
        group: its group.
        size: the largest number of values in a message.
    """

    def __init__(self, endpoint: Endpoint, group: Group, size: int) -> None:
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
