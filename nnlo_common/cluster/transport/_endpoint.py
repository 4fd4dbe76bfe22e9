"""Endpoint: the interface through which one rank sends and receives messages, on every transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import Apart, Frame, PartWork, Vector
from nnlo_common.protocol import Event, Lost, Message

__all__ = [
    "DivisibleWorld",
    "Endpoint",
    "Group",
    "GroupCalls",
    "Link",
    "Mail",
    "MemberLostError",
    "Numbers",
    "PartWorld",
    "RankWorld",
    "Transfer",
]

# -- group: the ranks of one logical worker, as one of them sees the others, on every transport --------

#: A few numbers that the ranks of a group compare.
Numbers: TypeAlias = npt.NDArray[np.float64]


class MemberLostError(PeerLostError):
    """A rank of a group has died; the others can go on by `Group.without_dead`."""


class Transfer(Protocol):
    """A broadcast under way."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`: call it again."""


class GroupCalls(Protocol):
    """What the ranks of a group tell each other; all of them call each method, in the same order.

    Attributes:
        index: this rank's number in the group; 0 is the lead.
        ranks: the numbers of all its ranks in the training, by index.
    """

    index: int
    ranks: tuple[int, ...]

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each; all ranks pass equally many."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index; each rank may pass another number."""

    def broadcast(self, data: npt.NDArray[np.uint8]) -> Transfer:
        """Begin to copy the lead's bytes into those of the others; do not change them meanwhile."""

    def close(self) -> None:
        """Release its resources."""


class Group(GroupCalls, Protocol):
    """The ranks of one logical worker, with sums; all of them call each method, in the same order."""

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks, with the same bits on each.

        Call it after a `gather`, so that no rank waits long in it.
        """

    def deal(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Give each rank its row; return the rows that all have for this one, by rank."""

    def show(self, row: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Return the rows of all ranks, equally long."""

    def barrier(self) -> None:
        """Return once all ranks have called it; what they wrote to shared memory before is then seen."""

    def twin(self) -> Group:
        """Return another group of the same ranks, which another thread may use.

        Raises:
            ConfigurationError: only one thread may use the transport.
        """

    def communicator(self) -> Any:
        """Return the MPI communicator of these ranks; None if they are threads."""

    def without_dead(self) -> Group:
        """Return the group of the ranks that live; all of them call it (collective).

        What others wait for in this group ends with a `MemberLostError`, if the group was made `lasting`.
        """

    def end(self, dead: int) -> NoReturn:
        """End this rank, because its group cannot go on without one that has died.

        Args:
            dead: that rank's number in the training.
        """


@dataclass(frozen=True, slots=True)
class Link:
    """One pair of ranks that exchange messages about one shard, seen from one side.

    Attributes:
        peer: the other rank.
        shard: the index of the shard.
        size: the largest number of values in a message.
        depth: how many messages may be in flight to this side at once.
        serving: this side is the server.
        ahead: how many values of a vector may travel ahead of its message to the server; 0: none.
        in_order: they leave from the first on, as they are packed; else from the last, as a backward pass
            makes them.
    """

    peer: int
    shard: int
    size: int
    depth: int
    serving: bool
    ahead: int = 0
    in_order: bool = False


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
        other frame before that. A vector outside such a frame may be sent from where it is, and may change
        once `receive` has returned an event. With `fill`, which computes a part of the vector, parts may be
        sent while later ones are computed; all are computed on return.
        """

    def send_ahead(self, peer: int, shard: int, vector: Vector, start: int, apart: Apart = ()) -> None:
        """Begin to send what lies behind `start` in a vector whose message follows; it changes no more.

        It may wait for the message, in a short vector or on a link without `ahead`. What lies apart is sent
        from there, or copied into the vector; it changes no more either.
        """

    def withdraw(self, peer: int, shard: int) -> None:
        """Let what was sent ahead of a message count for nothing: the vector has changed, or none follows."""

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

    def gather_from_living(self, text: str) -> list[str | None]:
        """Give every rank the texts of all ranks that live, None for the others (collective over them).

        Args:
            text: this rank's text.
        """

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open an endpoint for these links (collective)."""

    def group(self, ranks: Sequence[int], *, naps: bool, lasting: bool = False) -> Group:
        """Return the group of these ranks, this one among them, lead first (collective over them).

        Args:
            ranks: its ranks.
            naps: a rank that waits must leave its core to others.
            lasting: when one of them dies the others get a `MemberLostError`; else the group ends.
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


# -- mail: short texts between any two ranks at any time -----------------------------------------------
# An `Endpoint` carries the vectors of one training along links agreed on beforehand. Mail needs no links:
# any rank sends to any other, and the receiver polls.


class Mail(Protocol):
    """One rank's mailbox."""

    def send(self, peer: int, text: str) -> None:
        """Send a text; texts from one rank to another arrive in order."""

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next sender and text; None after `timeout_s`.

        Where ranks survive deaths, each death is returned once, as `Lost`.
        """

    def close(self) -> None:
        """Complete all sends; all ranks call it, after every text was received."""


class PartWorld(RankWorld, Protocol):
    """A subset of the ranks of another world."""

    def part(self, ranks: Sequence[int]) -> PartWorld:
        """Return the world of these ranks, this one among them, renumbered from 0 (collective over them)."""

    def revoke(self) -> None:
        """End every collective wait of these ranks with an error, because one of them is dead."""

    def close(self) -> None:
        """Release the resources of `DivisibleWorld.part` (collective)."""


class DivisibleWorld(RankWorld, Protocol):
    """Ranks that can be split into parts and can send each other mail."""

    def mail(self) -> Mail:
        """Open this rank's mailbox (collective)."""

    def part(self, ranks: Sequence[int]) -> PartWorld:
        """Return the world of these ranks, this one among them, renumbered from 0 (collective over them)."""
