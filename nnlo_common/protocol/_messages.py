"""Messages between worker and server: one header of 64 bytes and at most one vector.

Every request but the one-way kinds gets exactly one reply, which repeats the request's sequence number.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._flat_vector import HEADER_BYTES, Frame, Vector

__all__ = ["ONE_WAY", "REPLIES", "Kind", "Message", "decode", "encode"]


class Kind(enum.IntEnum):
    """What a message means; the numbers are on the wire and never change."""

    JOIN = 1
    """Worker: let me in. Answered by CENTER, or by ACK if I keep parameters of my own."""
    EXCHANGE = 2
    """Worker: a contribution, and I want the reply. Answered by CENTER."""
    PUSH = 3
    """Worker: a contribution. Answered by ACK."""
    PULL = 4
    """Worker: I want the centre. Answered by CENTER."""
    LOCK = 5
    """Worker: I want the centre, and nobody else may move it until my COMMIT. Answered by CENTER."""
    COMMIT = 6
    """Worker: what I was granted the lock for; gives the lock back. One way."""
    EPOCH = 7
    """Worker: I have finished one more epoch. One way."""
    LEAVE = 8
    """Worker: do not wait for me any more. One way."""
    CENTER = 9
    """Server: the centre, or what the rule replies instead, after `clock` commits."""
    ACK = 10
    """Server: done, at `clock` commits; no vector."""
    VIEW = 11
    """Worker: I want the centre once all have finished as many epochs as I have. Answered by CENTER."""
    OPTIONS = 12
    """Worker: what my contributions from now on are to be stepped with, e.g. a learning rate. One way."""
    ASK = 13
    """Anybody, to the query service: a question beside the exchange. Answered by ANSWER."""
    ANSWER = 14
    """The query service: what was asked for."""
    PAUSE = 15
    """Worker: I am at a batch boundary and ask for nothing before the answer. Answered by PAUSED."""
    PAUSED = 16
    """Server: all workers are at a batch boundary, nothing is under way; or, `called_off`: go on first."""


#: Requests that get no reply.
ONE_WAY = frozenset({Kind.COMMIT, Kind.EPOCH, Kind.LEAVE, Kind.OPTIONS})
#: What servers send.
REPLIES = frozenset({Kind.CENTER, Kind.ACK, Kind.ANSWER, Kind.PAUSED})
#: Messages that carry a vector.
WITH_VECTOR = frozenset(
    {Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT, Kind.CENTER, Kind.OPTIONS, Kind.ASK, Kind.ANSWER}
)


class Message(NamedTuple):
    """One message; a tuple, since to make a frozen dataclass takes four times as long.

    Attributes:
        kind: what it means.
        sender: the rank that sent it.
        sequence: requests: 0 to join, then 1, 2, 3, ... per worker and shard, also across a checkpoint; to
            pause, the last one's once more. Replies: the request's.
        clock: requests: the sender's steps; replies: the centre's commits.
        pulled_at: requests: the centre's commits when the sender last took it.
        scalar: read it as `share` in requests, as `rate` in replies.
        shard: which piece of the centre this is about.
        stop: replies: finish training now.
        mark: read it as `keeps_parameters`, `refreshes`, `last_pull` or `called_off`, by the kind.
        samples: requests: how many samples the sender has taken so far.
        vector: the numbers, if the kind has any.
        pause: replies: pause at your next batch boundary.
    """

    kind: Kind
    sender: int
    sequence: int
    clock: int = 0
    pulled_at: int = 0
    scalar: float = 1.0
    shard: int = 0
    stop: bool = False
    mark: bool = False
    samples: int = 0
    vector: Vector | None = None
    pause: bool = False

    @property
    def share(self) -> float:
        """Requests: the sender's share in a mean."""
        return self.scalar

    @property
    def rate(self) -> float:
        """Replies: the learning rate that workers are to take over; 0: none."""
        return self.scalar

    @property
    def keeps_parameters(self) -> bool:
        """JOIN: I have parameters of my own and keep them."""
        return self.mark

    @property
    def refreshes(self) -> bool:
        """VIEW: I go on from what I get; who does not only looks."""
        return self.mark

    @property
    def last_pull(self) -> bool:
        """PULL of another server: I shall not ask again."""
        return self.mark

    @property
    def called_off(self) -> bool:
        """PAUSED: there is no pause; go on first, as others wait for you."""
        return self.mark

    def __str__(self) -> str:
        size = "" if self.vector is None else f" [{self.vector.size}]"
        return (
            f"{self.kind.name}{size} from {self.sender}, sequence {self.sequence}, shard {self.shard}, "
            f"clock {self.clock}, pulled at {self.pulled_at}"
        )


_HEADER = struct.Struct("<4sBBHIIQQQQdQ")
_MAGIC = b"nnlo"
_VERSION = 1
_KINDS = {int(kind): kind for kind in Kind}


def encode(message: Message, frame: Frame) -> int:
    """Write the header of `message` into `frame` and return how many bytes of the frame travel.

    The vector must already lie in the frame.
    """
    size = 0 if message.vector is None else message.vector.size
    _HEADER.pack_into(
        frame.header,
        0,
        _MAGIC,
        _VERSION,
        message.kind,
        message.stop | message.mark << 1 | message.pause << 2,
        message.sender,
        message.shard,
        message.sequence,
        message.clock,
        message.pulled_at,
        size,
        message.scalar,
        message.samples,
    )
    return HEADER_BYTES + 4 * size


def decode(frame: Frame, received_bytes: int | None = None) -> Message:
    """Read the message in `frame`; its vector is a view of the frame.

    Args:
        frame: where it lies.
        received_bytes: how many bytes came, if the transport knows.

    Raises:
        ProtocolError: these bytes are no message of this version.
    """
    if received_bytes is not None and received_bytes < HEADER_BYTES:
        raise ProtocolError(
            f"received {received_bytes} bytes, which is less than a header of {HEADER_BYTES}; "
            "does anybody else send on this communicator?"
        )
    fields = _HEADER.unpack(frame.header)
    magic, version, kind, flags, sender, shard, sequence, clock, pulled_at, size, scalar, samples = fields
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise ProtocolError(
            f"received a message that starts with {bytes(frame.bytes[:6])!r}; expected {_MAGIC!r}, version "
            f"{_VERSION}. Do all ranks run the same nnlo, on a communicator nobody else sends on?"
        )
    if size > frame.vector.size or received_bytes not in (None, HEADER_BYTES + 4 * size):
        raise ProtocolError(
            f"{_KINDS[kind].name} from rank {sender} announces {size} numbers, but {received_bytes} bytes "
            f"came and there is room for {frame.vector.size} numbers"
        )
    vector = frame.vector[:size] if _KINDS[kind] in WITH_VECTOR else None
    return Message(
        _KINDS[kind],
        sender,
        sequence,
        clock,
        pulled_at,
        scalar,
        shard,
        bool(flags & 1),
        bool(flags & 2),
        samples,
        vector,
        bool(flags & 4),
    )
