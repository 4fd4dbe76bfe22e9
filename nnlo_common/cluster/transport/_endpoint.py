"""Endpoint: the interface through which one rank sends and receives messages, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from nnlo_common.base._flat_vector import Frame, PartWork
from nnlo_common.cluster.transport._group import Group
from nnlo_common.protocol import Event, Message

__all__ = ["Endpoint", "Link", "RankWorld"]


@dataclass(frozen=True, slots=True)
class Link:
    """One pair of ranks that exchange messages about one shard, seen from one side.

    Attributes:
        peer: the other rank.
        shard: the index of the shard.
        size: the largest number of values in a message.
        depth: how many messages may be in flight to this side at once.
        serving: this side is the server.
    """

    peer: int
    shard: int
    size: int
    depth: int
    serving: bool


class Endpoint(Protocol):
    """One rank's end of a transport: sends, receives, and owns the memory of the messages.

    Do not change a vector sent without a frame before its reply arrives (for one-way messages: before the
    next reply from the same rank).
    """

    def send(
        self, peer: int, message: Message, frame: Frame | None = None, fill: PartWork | None = None
    ) -> None:
        """Send `message`, from the `frame` that holds its vector, if there is one.

        A frame received from `peer` is released once the send completes. Do not change the vector of any
        other frame before that. With `fill`, which computes a part of the vector, parts may be sent while
        later ones are computed; all are computed on return.
        """

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Wait for the next event without burning a core; None after `timeout_s`.

        Without a time limit it waits until there is one.
        """

    def release(self, peer: int, frame: Frame) -> None:
        """Release the memory of a message from `peer` that gets no reply."""

    def abandon(self, peer: int) -> None:
        """Never wait for this peer again: it may be silent for good. What it sends still arrives."""

    def flush(self) -> None:
        """Make sends without a frame progress; call it before computing for long.

        On return they are complete, or a thread completes them and receives the replies.
        """

    def close(self) -> None:
        """Complete all sends and release all memory."""


class RankWorld(Protocol):
    """A set of ranks, seen from one of them: MPI processes, or threads of one process."""

    #: Whether each rank is a process, with process-wide settings of its own.
    own_process: bool
    #: Whether these are the ranks of one trial of a search: each trial has a world of its own.
    of_trial: bool
    #: Whether the other ranks survive the death of one.
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
        """Whether a training must stop after its next checkpoint: a search resumes it on more ranks."""

    def gather_text(self, text: str, *, patient: bool = False) -> list[str]:
        """Give every rank the texts of all ranks (collective).

        Args:
            text: this rank's text.
            patient: another rank may come much later, e.g. one that writes files: never report it as missing.
        """

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open an endpoint for these links (collective)."""

    def group(self, ranks: Sequence[int], *, naps: bool) -> Group:
        """Return the group of these ranks, this one among them, lead first (collective over them).

        Args:
            ranks: its ranks.
            naps: a rank that waits must leave its core to others.
        """

    def engage(self) -> Callable[[], None]:
        """Abort the job if this rank fails or exits before the returned function is called."""

    def at_end(
        self, call: Callable[[], object], in_middle: Callable[[], bool] = lambda: False
    ) -> Callable[[], None]:
        """Register `call` for the end of the script; the returned function cancels it.

        Args:
            call: what to do.
            in_middle: whether an epoch is under way; then an exit with a status other than 0 ends the job.
        """

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Register `call` for when this rank waits outside of a training; only a search does that."""

    def drop(self, rank: int) -> bool:
        """Take another rank out of the job if the rest survive it; return whether they do.

        It is killed if it can be reached. Else it may speak again later.
        """

    def cast_off(self) -> None:
        """Note that the others have dropped this rank, so that its end does not end the job."""

    def abort(self, code: int) -> NoReturn:
        """End all ranks now."""
