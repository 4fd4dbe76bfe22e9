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
    """Event: a message has come in `frame`, which is the machine's until a `Send` or `Release`."""

    message: Message
    frame: Frame


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: `rank` is dead or gone for good."""

    rank: int


class Send(NamedTuple):
    """Action: send `message` to `rank`; `frame`, if given, holds its vector, and may have come from there."""

    rank: int
    message: Message
    frame: Frame | None = None


class Release(NamedTuple):
    """Action: `frame`, which came from `rank`, is not needed any more."""

    rank: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Wait:
    """Action: nothing more can be done before the next event."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Action: a gradient is computed here. It takes virtual time; real time passes by itself."""


Event: TypeAlias = Received | Lost
Action: TypeAlias = Send | Release | Wait | Compute


class Story:
    """The last things that happened to a state machine, for the error that it may have to raise."""

    __slots__ = ("_name", "_recent")

    def __init__(self, name: str, length: int = 32) -> None:
        self._name = name
        self._recent: deque[tuple[str, object]] = deque(maxlen=length)

    def tell(self, what: str, about: object = "") -> None:
        """Remember one event; it is formatted only if somebody asks."""
        if isinstance(about, Message):
            # Without the vector: it belongs to somebody else, who will overwrite it.
            about = (about.kind, about.sender, about.sequence, about.clock, about.pulled_at)
        self._recent.append((what, about))

    def lines(self) -> list[str]:
        """Return the story, oldest event first."""
        return [f"{what} {_told(about)}".rstrip() for what, about in self._recent]

    def error(self, problem: str) -> ProtocolError:
        """Return the error to raise, with the story."""
        return ProtocolError(f"{self._name}: {problem}", self.lines())


def _told(about: object) -> str:
    if isinstance(about, tuple):
        kind, sender, sequence, clock, pulled_at = about
        return f"{kind.name} from {sender}, sequence {sequence}, clock {clock}, pulled at {pulled_at}"
    return str(about)
