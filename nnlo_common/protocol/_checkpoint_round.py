"""Checkpoint round on the first server: when all save, who writes a part, and when the checkpoint is whole.

    wished or due ─► all pause ─► the one before is closed ─► a draft is opened ─► parts come ─► it is closed

Events go in, actions come out. What to do with the disk and with the other ranks is the shell's affair:
`nnlo_common.training.checkpoint._saving`.
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
    "AskForPause",
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
    "SayLeftOut",
    "TellDraft",
    "Wished",
    "WriteOwn",
]


# -- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wished:
    """A worker wants a checkpoint.

    Attributes:
        end: and all are to leave after it.
        busy: this server still writes.
    """

    end: bool
    busy: bool


@dataclass(frozen=True, slots=True)
class Due:
    """All ranks save at the next pause without being asked; `last`: the training ends there."""

    last: bool


@dataclass(frozen=True, slots=True)
class AllPaused:
    """All workers pause; they and this server have reported their parts of before, others perhaps not yet.

    Attributes:
        pauses: how many there were.
        savers: the ranks that have something to save.
        workers: all of them.
    """

    pauses: int
    savers: frozenset[int]
    workers: frozenset[int]


@dataclass(frozen=True, slots=True)
class DraftOpened:
    """The disk has taken a draft, or has not (None); `recalled`: a search has more ranks go on with it."""

    number: int | None
    recalled: bool


@dataclass(frozen=True, slots=True)
class DraftAsked:
    """A rank that knows of so many pauses asks where its part goes."""

    rank: int
    pauses: int


@dataclass(frozen=True, slots=True)
class PartReported:
    """A rank's part is written, or cannot be."""

    rank: int
    part: PartQuery


@dataclass(frozen=True, slots=True)
class NothingMore:
    """A rank has reported all that it ever will; it may have left."""

    rank: int


RoundEvent: TypeAlias = (
    Wished | Due | AllPaused | DraftOpened | DraftAsked | PartReported | NothingMore | Lost
)


# -- actions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AskForPause:
    """Have all workers pause at their next batch boundary."""


@dataclass(frozen=True, slots=True)
class SayLeftOut:
    """Say that a checkpoint is left out, as the one before is still being written."""


@dataclass(frozen=True, slots=True)
class CopyOwn:
    """Copy what this server has to save, before anything else is handled."""


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Begin a checkpoint on the disk, once it is idle, and say how that went."""


@dataclass(frozen=True, slots=True)
class WriteOwn:
    """Write what was copied."""


@dataclass(frozen=True, slots=True)
class TellDraft:
    """Answer a rank that has asked where its part goes."""

    rank: int
    answer: DraftAnswer


@dataclass(frozen=True, slots=True)
class CloseDraft:
    """Give the draft with these parts its name, or, where there was trouble, remove it and say so."""

    parts: tuple[PartQuery, ...]
    trouble: str


RoundAction: TypeAlias = AskForPause | SayLeftOut | CopyOwn | OpenDraft | WriteOwn | TellDraft | CloseDraft


# -- the machine ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _DraftState:
    """A checkpoint whose parts are being written."""

    number: int
    expected: frozenset[int]
    parts: dict[int, PartQuery] = field(default_factory=dict)
    trouble: str = ""


class CheckpointRound:
    """Decides on the first server what is saved when; does no input or output.

    Attributes:
        wanted: there is to be a checkpoint at the next pause.
        opening: all have paused for one, and no draft is open yet.
        end: all leave after the next checkpoint.
        recalled: they do so for a search.

    Args:
        rank: the first server's.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.wanted = self.opening = self.end = self.recalled = False
        self._last = False
        self._ordered = False  # the disk is asked for a draft
        self._pauses = 0
        self._number: int | None = None  # of what is written after the last pause
        self._draft: _DraftState | None = None
        self._savers: frozenset[int] = frozenset()
        self._silent: set[int] = set()  # who will not report any more for this draft
        self._lost: set[int] = set()
        self._asking: dict[int, int] = {}  # who waits to be told where its part goes, with its pauses
        self._handlers: dict[type, Callable[[Any], list[RoundAction]]] = {
            Wished: self._wish,
            Due: self._due,
            AllPaused: self._all_paused,
            DraftOpened: self._opened,
            DraftAsked: self._asked,
            PartReported: self._reported,
            NothingMore: self._nothing_more,
            Lost: self._lose,
        }

    @property
    def closed(self) -> bool:
        """Whether no part of any checkpoint is waited for."""
        return self._draft is None and not self.opening

    @property
    def awaited(self) -> frozenset[int]:
        """Who is still to report its part of the draft."""
        draft = self._draft
        return (
            frozenset() if draft is None else draft.expected - draft.parts.keys() - self._silent - self._lost
        )

    def handle(self, event: RoundEvent) -> list[RoundAction]:
        """Take one event and return what is to be done, in this order.

        Raises:
            ProtocolError: a draft was opened that was not asked for.
        """
        return self._handlers[type(event)](event)

    def validate(self) -> None:
        """Check every invariant; tests call it after each event."""
        ahead = all(pauses > self._pauses for pauses in self._asking.values())
        for holds, what in (
            (self._draft is None or self.awaited, "a draft that nobody writes to is closed"),
            (self.opening or ahead, "who asks where its part goes is told when that is known"),
            (not (self._asking.keys() & self._lost), "the dead ask nothing"),
            (self._number is None or not self.opening, "no number is told before the draft is open"),
            (not self.recalled or self.end, "who is recalled leaves"),
        ):
            if not holds:
                raise AssertionError(f"broken invariant: {what}")

    def _wish(self, event: Wished) -> list[RoundAction]:
        self.end |= event.end
        if not event.end and (event.busy or not self.closed):
            return [SayLeftOut()]
        if self.wanted:
            return []
        self.wanted = True
        return [AskForPause()]

    def _due(self, event: Due) -> list[RoundAction]:
        self.wanted, self._last = True, event.last
        return []

    def _all_paused(self, event: AllPaused) -> list[RoundAction]:
        wanted, self.wanted = self.wanted, False
        self._pauses, self._number = event.pauses, None
        if not wanted:
            return self._answers()
        self.opening, self._savers = True, event.savers | {self.rank}
        self._silent |= event.workers
        return [CopyOwn(), *self._move_on()]

    def _opened(self, event: DraftOpened) -> list[RoundAction]:
        if not self._ordered:
            raise ProtocolError(f"draft {event.number} was opened, but none was asked for")
        self.opening = self._ordered = False
        self.recalled = event.recalled and not self.end and not self._last
        self.end |= self.recalled
        self._number, self._silent = event.number, set()
        if event.number is None:
            return self._answers()
        self._draft = _DraftState(event.number, self._savers)
        return [WriteOwn(), *self._answers()]

    def _asked(self, event: DraftAsked) -> list[RoundAction]:
        self._asking[event.rank] = event.pauses
        return self._answers()

    def _reported(self, event: PartReported) -> list[RoundAction]:
        draft, part = self._draft, event.part
        if draft is not None and part.number == draft.number:
            draft.parts[event.rank] = part
            draft.trouble = part.trouble or draft.trouble
        return self._move_on()

    def _nothing_more(self, event: NothingMore) -> list[RoundAction]:
        self._silent.add(event.rank)
        return self._move_on()

    def _lose(self, event: Lost) -> list[RoundAction]:
        self._lost.add(event.rank)
        self._asking.pop(event.rank, None)
        return self._move_on()

    def _move_on(self) -> list[RoundAction]:
        """Close the draft if nobody is waited for, and open the next if all pause for it."""
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
        ready = [rank for rank, pauses in sorted(self._asking.items()) if pauses <= self._pauses]
        answer = DraftAnswer(number=self._number, end=self.end, recalled=self.recalled)
        return [TellDraft(rank, answer) for rank in ready if self._asking.pop(rank) is not None]
