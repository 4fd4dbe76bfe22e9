"""Events that go into a state machine, and actions that come out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from nnlo_common.base._errors import ProtocolError
from nnlo_common.base._flat_vector import Frame
from nnlo_common.protocol._messages import Message

__all__ = ["Action", "Compute", "Event", "Lost", "Received", "Release", "Send", "Story", "Wait"]


class Received(NamedTuple):
    """Event: a message arrived in `frame`, which the machine owns until it returns a `Send` or `Release`."""

    message: Message
    frame: Frame


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: `rank` is dead or gone for good."""

    rank: int


class Send(NamedTuple):
    """Action: send `message` to `rank`; `frame`, if given, holds its vector, and may be the request's."""

    rank: int
    message: Message
    frame: Frame | None = None


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
