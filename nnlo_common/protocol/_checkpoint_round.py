"""Checkpoint round on the first server: when ranks save, which ranks write, and when it is complete.

    requested or due ─► all pause ─► close the previous draft ─► open a draft ─► collect parts ─► close it

Events go in, actions come out. `nnlo_common.training.checkpoint._saving` performs the actions: it does the
disk work and talks to the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from nnlo_common.base._errors import ProtocolError
from nnlo_common.protocol._events import Lost
from nnlo_common.protocol._query_messages import DraftAnswer, PartQuery

__all__ = [
    "AllPaused",
    "AnswerDraftQuery",
    "AskForPause",
    "CheckpointRequested",
    "CheckpointRound",
    "CloseDraft",
    "CopyOwn",
    "DraftAsked",
    "DraftOpened",
    "Due",
    "NothingMore",
    "OpenDraft",
    "PartReported",
    "RoundAction",
    "RoundEvent",
    "Turned",
    "WarnSkipped",
    "WriteOwn",
]


# -- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    """A worker asks for a checkpoint.

    Attributes:
        end: all ranks leave after it.
        busy: this server is still writing the previous one.
    """

    end: bool
    busy: bool


@dataclass(frozen=True, slots=True)
class Due:
    """All ranks save at the next pause without a request; `last`: the training ends there."""

    last: bool


@dataclass(frozen=True, slots=True)
class AllPaused:
    """All workers pause; they and this server have reported their earlier parts, other servers perhaps not.

    Attributes:
        pauses: the number of this pause.
        savers: the ranks that have something to save.
        workers: all workers.
    """

    pauses: int
    savers: frozenset[int]
    workers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DraftOpened:
    """A draft was created on disk, or not (None); `recalled`: a search resumes it with more ranks."""

    number: int | None
    recalled: bool


@dataclass(frozen=True, slots=True)
class DraftAsked:
    """A rank asks which draft its part belongs to: that of the pause with this number; 0: of the last one."""

    rank: int
    pauses: int


@dataclass(frozen=True, slots=True)
class PartReported:
    """A rank has written its part, or failed to."""

    rank: int
    part: PartQuery


@dataclass(frozen=True, slots=True)
class NothingMore:
    """A rank will send no more reports; it may have left."""

    rank: int


@dataclass(frozen=True, slots=True)
class Turned:
    """A worker has taken a dead server's place: after the next pause it saves as that."""

    rank: int


RoundEvent: TypeAlias = (
    CheckpointRequested
    | Due
    | AllPaused
    | DraftOpened
    | DraftAsked
    | PartReported
    | NothingMore
    | Turned
    | Lost
)


# -- actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskForPause:
    """Make all workers pause at their next batch boundary."""


@dataclass(frozen=True, slots=True)
class WarnSkipped:
    """Log that a checkpoint is skipped because the previous one is still being written."""


@dataclass(frozen=True, slots=True)
class CopyOwn:
    """Copy this server's state before the next event is handled."""


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Begin a checkpoint on disk once the writer is idle, and report the result as `DraftOpened`."""


@dataclass(frozen=True, slots=True)
class WriteOwn:
    """Write the copied state."""


@dataclass(frozen=True, slots=True)
class AnswerDraftQuery:
    """Answer a rank's `DraftAsked`."""

    rank: int
    answer: DraftAnswer


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """Commit the draft with these parts; on `trouble`, remove it and log why."""

    parts: tuple[PartQuery, ...]
    trouble: str


RoundAction: TypeAlias = (
    AskForPause | WarnSkipped | CopyOwn | OpenDraft | WriteOwn | AnswerDraftQuery | CloseDraft
)


# -- the machine ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _DraftState:
    """A checkpoint whose parts are being written."""

    number: int
    expected: frozenset[int]
    parts: dict[int, PartQuery] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)  # the ranks that know its number
    trouble: str = ""


class CheckpointRound:
    """Schedules checkpoints on the first server; does no input or output.

    Attributes:
        wanted: save a checkpoint at the next pause.
        opening: all have paused for a checkpoint whose draft is not open yet.
        end: all ranks leave after the next checkpoint.
        recalled: they leave because a search resumes with more ranks.

    Args:
        rank: the first server's.
        takes_over: it serves in the place of a dead first server, whose pauses and drafts it does not know.
    """

    def __init__(self, rank: int, *, takes_over: bool = False) -> None:
        self.rank = rank
        self._takes_over = self._begins = takes_over  # and no pause has come since
        self.wanted = self.opening = self.end = self.recalled = False
        self._last = False
        self._ordered = False  # OpenDraft is out, DraftOpened has not come
        self._pauses = 0
        self._number: int | None = None  # of the checkpoint begun at the last pause
        self._draft: _DraftState | None = None
        self._savers: frozenset[int] = frozenset()
        self._trouble = ""  # of the checkpoint that is opened
        self._silent: set[int] = set()  # ranks that send no more reports for this draft
        self._over: set[int] = set()  # ranks that send no reports at all
        self._lost: set[int] = set()
        self._asking: dict[int, int] = {}  # ranks whose DraftAsked is unanswered, with their pauses
        self._handlers: dict[type, Callable[[Any], list[RoundAction]]] = {
            CheckpointRequested: self._request,
            Due: self._due,
            AllPaused: self._all_paused,
            DraftOpened: self._opened,
            DraftAsked: self._asked,
            PartReported: self._reported,
            NothingMore: self._nothing_more,
            Turned: self._turned,
            Lost: self._lose,
        }

    @property
    def closed(self) -> bool:
        """Whether no checkpoint is under way."""
        return self._draft is None and not self.opening

    @property
    def awaited(self) -> frozenset[int]:
        """The ranks that have not reported their part of the draft."""
        draft = self._draft
        return (
            frozenset() if draft is None else draft.expected - draft.parts.keys() - self._silent - self._lost
        )

    def handle(self, event: RoundEvent) -> list[RoundAction]:
        """Take one event and return the actions to perform, in order.

        Raises:
            ProtocolError: a draft was opened without `OpenDraft`.
        """
        return self._handlers[type(event)](event)

    def validate(self) -> None:
        """Check every invariant; tests call it after each event."""
        ahead = not any(map(self._knows, self._asking.values()))
        for holds, what in (
            (self._draft is None or self.awaited, "a draft with no parts outstanding is closed"),
            (self.opening or ahead, "each draft query is answered as soon as the draft is known"),
            (not (self._asking.keys() & self._lost), "no dead rank has an unanswered query"),
            (self._number is None or not self.opening, "no draft number is sent before the draft is open"),
            (not self.recalled or self.end, "recalled ranks leave"),
        ):
            if not holds:
                raise AssertionError(f"broken invariant: {what}")

    def _request(self, event: CheckpointRequested) -> list[RoundAction]:
        self.end |= event.end
        if not event.end and (event.busy or not self.closed):
            return [WarnSkipped()]
        if self.wanted:
            return []
        self.wanted = True
        return [AskForPause()]

    def _due(self, event: Due) -> list[RoundAction]:
        self.wanted, self._last = True, event.last
        return []

    def _all_paused(self, event: AllPaused) -> list[RoundAction]:
        wanted, self.wanted = self.wanted, False
        self._pauses, self._number, self._begins = event.pauses, None, False
        if not wanted:
            return self._answers()
        # As spares or workers these had saved for the last time, and they wait in the last round.
        late = event.savers & self._over
        self.opening, self._savers = True, event.savers - late | {self.rank}
        if late:
            self._trouble = f"rank {min(late)} has taken a dead server's place after its last part"
        self._silent |= event.workers
        return [CopyOwn(), *self._move_on()]

    def _opened(self, event: DraftOpened) -> list[RoundAction]:
        if not self._ordered:
            raise ProtocolError(f"draft {event.number} was opened, but none was requested")
        self.opening = self._ordered = False
        self.recalled = event.recalled and not self.end and not self._last
        self.end |= self.recalled
        self._number, self._silent = event.number, set()
        trouble, self._trouble = self._trouble, ""
        if event.number is None:
            return self._answers()
        self._draft = _DraftState(event.number, self._savers, trouble=trouble)
        return [WriteOwn(), *self._answers()]

    def _asked(self, event: DraftAsked) -> list[RoundAction]:
        self._asking[event.rank] = event.pauses
        return self._answers()

    def _reported(self, event: PartReported) -> list[RoundAction]:
        draft, part = self._draft, event.part
        # A draft of a dead server may have had the same number.
        told = draft is not None and (event.rank in draft.told or not self._takes_over)
        if draft is not None and part.number == draft.number and (told or event.rank == self.rank):
            draft.parts[event.rank] = part
            draft.trouble = part.trouble or draft.trouble
        return self._move_on()

    def _nothing_more(self, event: NothingMore) -> list[RoundAction]:
        self._silent.add(event.rank)
        self._over.add(event.rank)
        return self._move_on()

    def _turned(self, event: Turned) -> list[RoundAction]:
        """Wait no more for what it would have written as a worker, unless it knows where, or asks."""
        rank, draft = event.rank, self._draft
        text = f"rank {rank} has taken a dead server's place before it had written its part"
        if rank in self._asking:
            return []
        if self.opening and rank in self._savers:
            self._savers, self._trouble = self._savers - {rank}, text
        if draft is not None and rank in draft.expected - draft.parts.keys() - draft.told:
            draft.expected, draft.trouble = draft.expected - {rank}, draft.trouble or text
        return self._move_on()

    def _lose(self, event: Lost) -> list[RoundAction]:
        if event.rank == self.rank:  # it was a worker, which is gone, and saves as a server
            return []
        self._lost.add(event.rank)
        self._asking.pop(event.rank, None)
        return self._move_on()

    def _move_on(self) -> list[RoundAction]:
        """Close the draft if all parts are in, then open the next one if all pause for it."""
        actions: list[RoundAction] = []
        draft = self._draft
        if draft is not None and not self.awaited:
            missing = draft.expected - draft.parts.keys()
            if missing and not draft.trouble:
                rank = min(missing)
                how = "died before it had" if rank in self._lost else "not"
                draft.trouble = f"rank {rank} has {how} written its part"
            self._draft = None
            parts = tuple(part for _, part in sorted(draft.parts.items()) if not part.trouble)
            actions.append(CloseDraft(parts, draft.trouble))
        if self.opening and self._draft is None and not self._ordered:
            self._ordered = True
            actions.append(OpenDraft())
        return actions

    def _answers(self) -> list[RoundAction]:
        if self.opening:
            return []
        ready = {rank: pauses for rank, pauses in sorted(self._asking.items()) if self._knows(pauses)}
        self._asking = {rank: pauses for rank, pauses in self._asking.items() if rank not in ready}
        return [AnswerDraftQuery(rank, self._answer(rank, pauses)) for rank, pauses in ready.items()]

    def _knows(self, pauses: int) -> bool:
        """Whether a rank can be told the draft of this pause; it may have seen the pause earlier."""
        return pauses <= self._pauses or self._begins

    def _answer(self, rank: int, pauses: int) -> DraftAnswer:
        # Whoever has taken over from a dead server may come late, when its part is not awaited any more.
        draft, number = self._draft, self._number
        if pauses and not (pauses == self._pauses and draft is not None and rank in draft.expected):
            number = None
        if draft is not None and number is not None:
            draft.told.add(rank)
        return DraftAnswer(number=number, end=self.end, recalled=self.recalled)
