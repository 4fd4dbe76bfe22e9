"""Events that go into a state machine, and actions that come out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from nnlo_common.base._errors import ConfigurationError, ProtocolError
from nnlo_common.base._flat_vector import Frame, PartWork, Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol._messages import Kind, Message
from nnlo_common.protocol._worker_records import Peer

__all__ = [
    "Action",
    "Compute",
    "Event",
    "Lost",
    "Part",
    "Received",
    "Release",
    "Send",
    "Story",
    "Wait",
    "kept",
    "restored",
    "restored_peers",
]

#: A part of a vector that has arrived: its place, and its numbers.
Part: TypeAlias = tuple[slice, Vector]
#: Receives a vector part by part, into the given memory or, without any, into little memory in turn.
Arrival: TypeAlias = Callable[[Vector | None], Iterator[Part | None]]


class Received(NamedTuple):
    """Event: a message arrived in `frame`, which the machine owns until it returns a `Send` or `Release`.

    Attributes:
        message: the message.
        frame: the memory that holds it.
        parts: gives the parts of a long vector in order, each once it has arrived, and None from time to
            time while it has not; to be called once. Only the first one is in the frame. None: all of it is
            in the message.
    """

    message: Message
    frame: Frame
    parts: Arrival | None = None

    def coming(self, into: Vector | None = None) -> Iterator[Part | None]:
        """Give the parts of the vector as they arrive, and None now and then while none has.

        Args:
            into: where the numbers go; None: each part's are valid until the next one's.
        """
        if self.parts is not None:
            return self.parts(into)
        if self.message.vector is None:
            return iter(())
        return given([(slice(None), self.message.vector)], into)

    def arriving(self, into: Vector | None = None) -> Iterator[Part]:
        """Give the parts of the vector as they arrive, one for a vector that is there; see `coming`."""
        return (part for part in self.coming(into) if part is not None)

    def whole(self) -> Received:
        """Wait for all parts; return the event with all of its vector in the message."""
        if self.parts is not None:
            for _ in self.parts(self.message.vector):
                pass
        return Received(self.message, self.frame)

    def watched(self, waits: Callable[[], object], comes: Callable[[], object] = lambda: None) -> Received:
        """Return the event with parts that are watched.

        Args:
            waits: called from time to time while a part has not come.
            comes: called when one has come.
        """
        if self.parts is None:
            return self
        arrival = self.parts

        def parts(into: Vector | None) -> Iterator[Part | None]:
            for part in arrival(into):
                (waits if part is None else comes)()
                yield part

        return Received(self.message, self.frame, parts)


def given(parts: Iterable[Part], into: Vector | None) -> Iterator[Part]:
    """Give parts that are there, copied `into` memory if there is any."""
    for place, numbers in parts:
        if into is not None:
            np.copyto(into[place], numbers)
        yield place, numbers if into is None else into[place]


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: `rank` is dead or gone for good."""

    rank: int


class Send(NamedTuple):
    """Action: send `message` to `rank`.

    Attributes:
        rank: the receiver.
        message: the message.
        frame: holds its vector, and may be the request's. Or the vector is the centre: then the machine must
            take no other event before that has been sent, or copied into the frame.
        fill: computes a part of the vector; call it once for each part, in order, before the machine takes
            another event, whether the message can be sent or not.
    """

    rank: int
    message: Message
    frame: Frame | None = None
    fill: PartWork | None = None


class Release(NamedTuple):
    """Action: return `frame`, which came from `rank`, to the transport."""

    rank: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Wait:
    """Action: deliver the next event before continuing."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Action: a gradient is computed here; the virtual cluster advances its clock, real runs ignore it."""


Event: TypeAlias = Received | Lost
Action: TypeAlias = Send | Release | Wait | Compute


class Story:
    """Recent events of a state machine, to attach to its errors."""

    __slots__ = ("_name", "_recent")

    def __init__(self, name: str, length: int = 32) -> None:
        self._name = name
        self._recent: deque[tuple[str, object]] = deque(maxlen=length)

    def tell(self, what: str, about: object = "") -> None:
        """Record one event; `lines` formats it later."""
        if isinstance(about, Message):
            # Drop the vector: its frame will be reused.
            about = (about.kind, about.sender, about.sequence, about.clock, about.pulled_at)
        self._recent.append((what, about))

    def lines(self) -> list[str]:
        """Return the recorded events, oldest first."""
        return [f"{what} {_described(about)}".rstrip() for what, about in self._recent]

    def error(self, problem: str) -> ProtocolError:
        """Return the error to raise, with the recorded events."""
        return ProtocolError(f"{self._name}: {problem}", self.lines())


def _described(about: object) -> str:
    if isinstance(about, tuple):
        kind, sender, sequence, clock, pulled_at = about
        return f"{kind.name} from {sender}, sequence {sequence}, clock {clock}, pulled at {pulled_at}"
    return str(about)


# -- saved state of a server about its workers: their waiting messages and their records ---------------


def kept(message: Message) -> State:
    """Return a copy of a waiting message as a plain tree."""
    return {
        "kind": message.kind.name,
        "sender": message.sender,
        "sequence": message.sequence,
        "clock": message.clock,
        "pulled_at": message.pulled_at,
        "weight": message.scalar,
        "shard": message.shard,
        "samples": message.samples,
        "vector": None if message.vector is None else message.vector.copy(),
    }


def restored(owner: str, state: Mapping[str, Any], size: int) -> Received:
    """Rebuild the event whose message was `kept`, in a frame of its own.

    Raises:
        ConfigurationError: the state is not a kept message, or its vector does not have `size` numbers.
    """
    vector = state.get("vector")
    owner = f"{owner}, a waiting message"
    numbers = dict.fromkeys(("sender", "sequence", "clock", "pulled_at", "shard", "samples"), int)
    expected = None if vector is None else np.zeros(size, np.float32)
    require(owner, state, kind=str, weight=float, vector=expected, **numbers)
    if state["kind"] not in Kind.__members__:
        raise ConfigurationError(f"{owner}: unknown kind {state['kind']!r} of message; is the state damaged?")
    frame = Frame(size)
    if vector is not None:
        np.copyto(frame.vector, vector)
    fields = {name: state[name] for name in numbers}
    kept_vector = None if vector is None else frame.vector
    return Received(Message(Kind[state["kind"]], scalar=state["weight"], vector=kept_vector, **fields), frame)


def restored_peers(owner: str, state: Mapping[str, Any]) -> dict[int, Peer]:
    """Return the workers of a server's saved state, after checking all its parts.

    Raises:
        ConfigurationError: it is not a server's state.
    """
    parts = {"rule": Mapping, "staleness": [[int]], "workers": Mapping, "pending": [Mapping]}
    parts["progress_at"] = [float]
    if isinstance(state, Mapping) and "wires" in state:  # there are none with float32
        parts["wires"] = Mapping
    require(owner, state, rate=float, **parts)
    if not all(isinstance(peer, Mapping) and rank.isdecimal() for rank, peer in state["workers"].items()):
        raise ConfigurationError(f"{owner}: its workers are not records by rank; is the state damaged?")
    return {int(rank): Peer.of(f"{owner}, rank {rank}", peer) for rank, peer in state["workers"].items()}
