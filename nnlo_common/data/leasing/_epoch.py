"""One epoch in the ledger of leases: where each of its positions is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from nnlo_common.base._state_tree import State, require
from nnlo_common.data.leasing._ranges import Range, Ranges

__all__ = ["Page"]


class Page:
    """The positions of one epoch that nobody holds.

    Attributes:
        free: may be taken by whoever asks about this epoch.
        owed: a worker died with them; may be taken by whoever asks about this epoch or a later one.
        used: were reported as used.

    Example:
        >>> page = Page(10)
        >>> page.take(4, late=False), page.take(4, late=True), list(page.free)
        ((0, 4), None, [(4, 10)])
    """

    __slots__ = ("free", "owed", "size", "used")

    def __init__(self, size: int) -> None:
        self.size = size
        self.free, self.owed, self.used = Ranges([(0, size)]), Ranges(), Ranges()

    @property
    def complete(self) -> bool:
        """Whether each position was used."""
        return self.used.total == self.size

    def left(self, *, late: bool) -> int:
        """Return how many positions may be taken by a worker in this epoch, or in a later one (`late`)."""
        return self.owed.total + (0 if late else self.free.total)

    def take(self, most: int, *, late: bool) -> Range | None:
        """Hand out up to `most` positions in a row; what is owed comes first, as it has waited longest."""
        part = self.owed.take(most)
        return self.free.take(most) if part is None and not late else part

    def unused(self, held: Iterable[Range] = ()) -> list[Range]:
        """Return all positions that are not used, those that are `held` among them."""
        return list(Ranges(sorted([*self.free, *self.owed, *held])))

    def validate(self, held: Iterable[Range]) -> None:
        """Check that each position is exactly one of free, owed, used and held."""
        parts = sorted([*self.free, *self.owed, *self.used, *held])
        stops = [0, *(stop for _, stop in parts)]
        if [start for start, _ in parts] + [self.size] != stops:
            raise AssertionError(f"broken invariant: {parts} has each of {self.size} positions once")

    def state(self) -> State:
        """Return where each position is."""
        return {name: [list(part) for part in getattr(self, name)] for name in ("free", "owed", "used")}

    @classmethod
    def of(cls, size: int, owner: str, state: Mapping[str, Any]) -> Page:
        """Return the page that gave `state`."""
        require(owner, state, free=[[int]], owed=[[int]], used=[[int]])
        page = cls(size)
        page.free, page.owed, page.used = (Ranges(state[name]) for name in ("free", "owed", "used"))
        return page
