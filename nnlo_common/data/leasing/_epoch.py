"""Record of one epoch in the ledger of leases: the status of each position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnlo_common.base._state_tree import State, require
from nnlo_common.data.leasing._ranges import Range, Ranges

__all__ = ["EpochRecord"]


class EpochRecord:
    """The positions of one epoch that no worker holds.

    Attributes:
        free: available to workers that ask about this epoch.
        owed: lost with a dead worker; available to workers that ask about this epoch or a later one.
        used: reported as used.

    Example:
        >>> record = EpochRecord(10)
        >>> record.take(4, late=False), record.take(4, late=True), list(record.free)
        ((0, 4), None, [(4, 10)])
    """

    __slots__ = ("free", "owed", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free, self.owed, self.used = Ranges([(0, size)]), Ranges(), Ranges()

    @property
    def complete(self) -> bool:
        """Whether every position was used."""
        return self.used.total == self.size

    def left(self, *, late: bool) -> int:
        """Return the number of positions available to a worker in this epoch, or in a later one (`late`)."""
        return self.owed.total + (0 if late else self.free.total)

    def take(self, most: int, *, late: bool) -> Range | None:
        """Remove and return up to `most` positions in a row; owed ones first, as they have waited longest."""
        part = self.owed.take(most)
        return self.free.take(most) if part is None and not late else part

    def unused(self, held: Iterable[Range] = ()) -> list[Range]:
        """Return all unused positions, including those that workers hold (`held`)."""
        return list(Ranges(sorted([*self.free, *self.owed, *held])))

    def validate(self, held: Iterable[Range]) -> None:
        """Check that each position is exactly one of free, owed, used or held."""
        parts = sorted([*self.free, *self.owed, *self.used, *held])
        stops = [0, *(stop for _, stop in parts)]
        if [start for start, _ in parts] + [self.size] != stops:
            raise AssertionError(f"broken invariant: {parts} have each of {self.size} positions once")

    def state(self) -> State:
        """Return the status of each position."""
        return {name: [list(part) for part in getattr(self, name)] for name in ("free", "owed", "used")}

    @classmethod
    def of(cls, size: int, owner: str, state: Mapping[str, Any]) -> EpochRecord:
        """Return the object that returned `state`."""
        require(owner, state, free=[[int]], owed=[[int]], used=[[int]])
        record = cls(size)
        record.free, record.owed, record.used = (Ranges(state[name]) for name in ("free", "owed", "used"))
        return record
