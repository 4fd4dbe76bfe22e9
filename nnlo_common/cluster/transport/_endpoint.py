"""Endpoint: the interface through which one rank sends and receives messages, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from nnlo_common.base._flat_vector import Frame
from nnlo_common.protocol import Event, Message

__all__ = ["Endpoint", "Link", "RankWorld"]


@dataclass(frozen=True, slots=True)
class Link:
    """One pair of ranks that exchange messages about one shard, as one of the two sees it.

    Attributes:
        peer: the other rank.
        shard: what they talk about.
        size: how many numbers a message may hold.
        depth: how many messages may be on their way to this side at once.
        serving: this side is the server.
    """

    peer: int
    shard: int
    size: int
    depth: int
    serving: bool


class Endpoint(Protocol):
    """One rank's door: sends, receives and owns the memory that messages lie in.

    A vector that is sent without a frame must stay as it is until its reply has come (for one-way
    messages: until the next reply from the same rank).
    """

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:
        """Send `message`, from the `frame` that holds its vector, if there is one.

        A frame that came from `peer` is given back once the message has left. In any other one the vector
        stays as it is until then.
        """

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Wait for the next event, without burning a core; None if there was none in time.

        Without a time limit there always is one.
        """

    def release(self, peer: int, frame: Frame) -> None:
        """Give back the memory of a message from `peer` that is not replied to."""

    def flush(self) -> None:
        """See to it that what was sent without a frame leaves; call it before a long absence.

        Either it has left on return, or somebody else goes on with it and with taking in replies.
        """

    def close(self) -> None:
        """Let everything leave that was sent, and give all memory back."""


class RankWorld(Protocol):
    """A set of ranks, as one of them sees it: MPI's, or threads of one process."""

    #: Whether each rank is a process of its own, whose settings are its own too.
    own_process: bool
    #: Whether the others go on when one of them dies.
    survives_loss: bool

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def host(self) -> str:
        """The machine that this rank is on."""

    @property
    def recalled(self) -> bool:
        """Whether a training is to leave after its next checkpoint, for more ranks of a search to go on."""

    def gather_text(self, text: str) -> list[str]:
        """Give every rank the texts of all ranks (collective)."""

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open this rank's door (collective)."""

    def engage(self) -> Callable[[], None]:
        """Make this rank's failure or early end everybody's, until the returned function is called."""

    def at_end(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call this when the script is over, unless the returned function is called before."""

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Call this before this rank waits for others outside of a training; only a search makes it wait."""

    def drop(self, rank: int) -> bool:
        """End another rank, if that is possible and the others go on without it; say whether."""

    def abort(self, code: int) -> NoReturn:
        """End all ranks now."""
