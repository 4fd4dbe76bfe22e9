"""Messages between worker and server: a header of 64 bytes and at most one vector.

Each request gets exactly one reply with the same sequence number; the one-way kinds get none.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._flat_vector import HEADER_BYTES, Frame, Vector

__all__ = ["ONE_WAY", "REPLIES", "Kind", "Message", "decode", "encode"]


class Kind(enum.IntEnum):
    """Kind of a message; the numbers are on the wire and never change."""

    JOIN = 1
    """Worker: asks to join. Answered by CENTER, or by ACK if the worker keeps its own parameters."""
    EXCHANGE = 2
    """Worker: sends a contribution and asks for the rule's reply. Answered by CENTER."""
    PUSH = 3
    """Worker: sends a contribution. Answered by ACK."""
    PULL = 4
    """Worker: asks for the centre. Answered by CENTER."""
    LOCK = 5
    """Worker: asks for the centre, which only its COMMIT may move next. Answered by CENTER."""
    COMMIT = 6
    """Worker: sends the contribution it took the lock for, and releases the lock. One way."""
    EPOCH = 7
    """Worker: has finished one more epoch. One way."""
    LEAVE = 8
    """Worker: leaves; the server stops waiting for it. One way."""
    CENTER = 9
    """Server: the centre after `clock` commits, or the rule's reply in its place."""
    ACK = 10
    """Server: done, at `clock` commits; no vector."""
    VIEW = 11
    """Worker: asks for the centre once all have finished as many epochs as it has. Answered by CENTER."""
    OPTIONS = 12
    """Worker: options for its later contributions, e.g. a learning rate. One way."""
    ASK = 13
    """Any rank, to the query service: a query. Answered by ANSWER."""
    ANSWER = 14
    """Query service: the answer to a query."""
    PAUSE = 15
    """Worker: is at a batch boundary and sends no exchange before the answer. Answered by PAUSED."""
    PAUSED = 16
    """Server: all workers are at a batch boundary, nothing is under way; or the pause is cancelled."""
    DROPPED = 17
    """Server: the worker was silent for too long, and the others continue without it."""
    SAMPLE = 18
    """Worker: coordinates of its next contribution, of all shards. One way."""
    COPY = 19
    """Server, to a spare: a piece of the server's state. Answered by ACK."""
    PLACE = 20
    """Spare, to whoever serves, or may: trains in the place of a dead worker from now on. One way."""
    TURN = 21
    """Worker: trains no more, and serves another shard, or stands by to. Answered by ACK; what comes before
    answers what it has asked for as a worker."""
    CALL = 22
    """First server, to another: calls a spare to train in the place of a dead worker, or not. One way."""
    WITHDRAWN = 23
    """Worker, to the transport of a server: what it has sent ahead of a message counts for nothing."""
    ROUND = 24
    """Worker, after a JOIN that is `again`: how many contributions of this epoch it has sent. One way."""


#: Requests that get no reply.
ONE_WAY = frozenset(
    {
        Kind.COMMIT,
        Kind.EPOCH,
        Kind.LEAVE,
        Kind.OPTIONS,
        Kind.SAMPLE,
        Kind.PLACE,
        Kind.CALL,
        Kind.ROUND,
    }
)
#: Kinds that servers send.
REPLIES = frozenset({Kind.CENTER, Kind.ACK, Kind.ANSWER, Kind.PAUSED, Kind.DROPPED})
#: Messages that carry a vector.
WITH_VECTOR = frozenset(
    {
        Kind.EXCHANGE,
        Kind.PUSH,
        Kind.COMMIT,
        Kind.CENTER,
        Kind.OPTIONS,
        Kind.ASK,
        Kind.ANSWER,
        Kind.SAMPLE,
        Kind.COPY,
    }
)


class Message(NamedTuple):
    """One message; a tuple, because a frozen dataclass takes four times as long to create.

    Attributes:
        kind: its kind.
        sender: the rank that sent it.
        sequence: requests: 0 to join, then 1, 2, 3, ... per worker and shard, also across a checkpoint; a
            PAUSE repeats the last number. Replies: the request's.
        clock: requests: the sender's steps, but `epochs` in PLACE, CALL and a JOIN that is `again`; replies:
            the centre's commits; read it as `pauses` in PAUSE and PAUSED, as `round` in ROUND.
        pulled_at: requests: the centre's commits when the sender last pulled; read it as `progress_before` in
            replies, as `pausing` in PAUSED, as `place` in PLACE and CALL.
        scalar: read it as `share` in requests, as `rate` in replies, as `waited` in EPOCH, as `silence_s` in
            DROPPED, as `views` in a JOIN that is `again`, as `pausing` in PAUSE.
        shard: the shard it is about.
        stop: replies: finish training now; read it as `again` in JOIN and PAUSE, as
            `last_copy` in COPY, as `stood_by` in LEAVE, as `takes_back` in CALL.
        mark: read it as `keeps_parameters`, `after_last_round`, `refreshes`, `looks`, `last_pull`,
            `cancelled`, `final` or `to_turn`, by the kind.
        samples: requests: the number of samples the sender has taken so far, but `pauses` in a JOIN that is
            `again`; read it as `progress` in replies, as `spare` in CALL.
        vector: the numbers, if the kind has any.
        pause: replies: pause at the next batch boundary; read it as `newly` in JOIN.
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
        """Replies: the learning rate that workers adopt; 0: none."""
        return self.scalar

    @property
    def progress(self) -> int:
        """Replies: the samples of one process that all contributions so far were worth."""
        return self.samples

    @property
    def progress_before(self) -> int:
        """Replies: the progress when the receiver's epoch was begun."""
        return self.pulled_at

    @property
    def waited(self) -> float:
        """EPOCH: the share of the epoch that the sender has spent in exchanges."""
        return self.scalar

    @property
    def silence_s(self) -> float:
        """DROPPED: how long the worker had been silent."""
        return self.scalar

    @property
    def keeps_parameters(self) -> bool:
        """JOIN: the worker keeps its own parameters."""
        return self.mark and not self.again

    @property
    def after_last_round(self) -> bool:
        """JOIN that is `again`: the worker has contributed to the last round, and does not any more."""
        return self.mark and self.kind is Kind.JOIN and self.again

    @property
    def again(self) -> bool:
        """JOIN and PAUSE: the worker goes on with a rank that replaces a dead server, or was a spare."""
        return self.stop and self.kind in (Kind.JOIN, Kind.PAUSE)

    @property
    def trained(self) -> bool:
        """JOIN that is `again`: the worker has had the centre after a commit, or has finished an epoch."""
        return self.again and self.pulled_at + self.epochs > 0

    @property
    def last_copy(self) -> bool:
        """COPY: no more copies come, and this is none."""
        return self.kind is Kind.COPY and self.stop

    @property
    def epochs(self) -> int:
        """PLACE, CALL, and JOIN that is `again`: the epochs that the worker has finished."""
        return self.clock

    @property
    def steps(self) -> int:
        """Requests: the sender's steps; 0: it has made none, or does not say."""
        others = self.kind in (Kind.PAUSE, Kind.PLACE, Kind.CALL, Kind.ROUND)
        return 0 if others or self.again else self.clock

    @property
    def round(self) -> int:
        """ROUND: how many contributions of this epoch the worker has sent, also to servers that have died."""
        return self.clock

    @property
    def place(self) -> int:
        """PLACE and CALL: the dead worker."""
        return self.pulled_at

    @property
    def spare(self) -> int:
        """CALL: who is to train in its place."""
        return self.samples

    @property
    def takes_back(self) -> bool:
        """CALL: the spare is not called, or not any more."""
        return self.stop and self.kind is Kind.CALL

    @property
    def newly(self) -> bool:
        """JOIN that is `again`: the sender was a spare, and has made no pause with a server of this shard."""
        return self.pause and self.kind is Kind.JOIN

    @property
    def views(self) -> int:
        """JOIN that is `again`: how often the worker has viewed the centre together with all others."""
        return int(self.scalar)

    @property
    def pauses(self) -> int:
        """PAUSE and PAUSED: the number of the pause; JOIN that is `again`: of the last that was granted.

        The first server counts the pauses, and workers tell the others its number.
        """
        return self.samples if self.kind is Kind.JOIN else self.clock

    @property
    def pausing(self) -> int:
        """PAUSE and PAUSED: to how many workers the first server has granted it; 0: it is not known."""
        return int(self.scalar) if self.kind is Kind.PAUSE else self.pulled_at

    @property
    def refreshes(self) -> bool:
        """VIEW: the worker continues from the centre it gets; otherwise it only looks."""
        return self.mark

    @property
    def looks(self) -> bool:
        """PULL from a worker: it only looks, at the centre itself, not at the rule's reply."""
        return self.mark

    @property
    def last_pull(self) -> bool:
        """PULL from another server: its last."""
        return self.mark

    @property
    def cancelled(self) -> bool:
        """PAUSED: the pause is cancelled; the worker continues, because others wait for it."""
        return self.mark

    @property
    def final(self) -> bool:
        """CENTER to another server: no worker is awaited any more."""
        return self.mark

    @property
    def to_turn(self) -> bool:
        """ACK: it answers a TURN."""
        return self.kind is Kind.ACK and self.mark

    @property
    def needs_no_more(self) -> bool:
        """LEAVE: its sender serves, or stands by to, and needs nothing more; else it is a worker."""
        return self.kind is Kind.LEAVE and self.sequence == 0

    @property
    def stood_by(self) -> bool:
        """LEAVE: its sender needs nothing more, and takes nobody's place from now on."""
        return self.needs_no_more and self.stop

    def with_vector(self, vector: Vector) -> Message:
        """Return the message with another vector."""
        return Message(*self[:10], vector, self.pause)

    def of_all(self, pausing: int) -> Message:
        """Return a PAUSED that says how many workers pause."""
        return Message(self.kind, self.sender, self.sequence, self.clock, pausing, *self[5:])

    def of(self, sender: int) -> Message:
        """Return the message as if another rank had sent it."""
        return Message(self.kind, sender, *self[2:])

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


def encode(message: Message, frame: Frame, *, in_parts: bool = False) -> int:
    """Write the header of `message` into `frame` and return the number of bytes to send.

    Args:
        message: its vector must be in the frame already.
        frame: the memory that is sent.
        in_parts: the vector follows in several parts.
    """
    size = 0 if message.vector is None else message.vector.size
    _HEADER.pack_into(
        frame.header,
        0,
        _MAGIC,
        _VERSION,
        message.kind,
        message.stop | message.mark << 1 | message.pause << 2 | in_parts << 3,
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


def announced(frame: Frame) -> int:
    """Return the number of values that the header in `frame` announces."""
    size: int = _HEADER.unpack(frame.header)[9]
    return size


def kind_in(frame: Frame) -> Kind | None:
    """Return the kind of the message in `frame`; None: none of this version."""
    kind: int = _HEADER.unpack(frame.header)[2]
    return _KINDS.get(kind)


def comes_in_parts(frame: Frame) -> bool:
    """Return whether the header in `frame` announces a vector in several parts."""
    flags: int = _HEADER.unpack(frame.header)[3]
    return bool(flags & 8)


def decode(frame: Frame, received_bytes: int | None = None) -> Message:
    """Read the message in `frame`; its vector is a view of the frame.

    Args:
        frame: the memory that holds it.
        received_bytes: the number of bytes received, if the transport knows.

    Raises:
        ProtocolError: the bytes are not a message of this version.
    """
    if received_bytes is not None and received_bytes < HEADER_BYTES:
        raise ProtocolError(
            f"received {received_bytes} bytes, less than a header of {HEADER_BYTES}; "
            "does other code send on this communicator?"
        )
    fields = _HEADER.unpack(frame.header)
    magic, version, kind, flags, sender, shard, sequence, clock, pulled_at, size, scalar, samples = fields
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise ProtocolError(
            f"received a message that starts with {bytes(frame.bytes[:6])!r}; expected {_MAGIC!r}, version "
            f"{_VERSION}. Run the same nnlo on all ranks, on a communicator that no other code sends on"
        )
    if size > frame.vector.size or received_bytes not in (None, HEADER_BYTES + 4 * size):
        raise ProtocolError(
            f"{_KINDS[kind].name} from rank {sender} announces {size} numbers, but {received_bytes} bytes "
            f"arrived, and the frame holds {frame.vector.size} numbers; do all ranks build the same model?"
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
