"""Sets of whole numbers as ranges: the free, used or owed positions of an epoch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

__all__ = ["Range", "Ranges"]

Range: TypeAlias = tuple[int, int]


class Ranges:
    """A set of whole numbers, held as sorted ranges [start, stop) that neither touch nor overlap.

    Attributes:
        total: the number of elements.

    Example:
        >>> ranges = Ranges([(0, 3), (5, 9)])
        >>> ranges.add(3, 5)
        >>> list(ranges), ranges.take(4), list(ranges)
        ([(0, 9)], (0, 4), [(4, 9)])
    """

    __slots__ = ("_ranges", "total")

    def __init__(self, ranges: Iterable[Sequence[int]] = ()) -> None:
        self._ranges: list[Range] = []
        self.total = 0
        for start, stop in ranges:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Range]:
        return iter(self._ranges)

    def __contains__(self, number: int) -> bool:
        return any(start <= number < stop for start, stop in self._ranges)

    def add(self, start: int, stop: int) -> None:
        """Add the numbers from `start` up to `stop`; an empty range changes nothing.

        Raises:
            ValueError: the range runs backwards, or a number is in already.
        """
        if start == stop:
            return
        at = bisect_left(self._ranges, (start, stop))
        before, after = self._ranges[max(at - 1, 0) : at], self._ranges[at : at + 1]
        if start > stop or (before and before[0][1] > start) or (after and after[0][0] < stop):
            raise ValueError(
                f"[{start}, {stop}) runs backwards or is in already, at least partly: {self._ranges}"
            )
        self.total += stop - start
        first, last = at, at
        if before and before[0][1] == start:
            first, start = at - 1, before[0][0]
        if after and after[0][0] == stop:
            last, stop = at + 1, after[0][1]
        self._ranges[first:last] = [(start, stop)]

    def take(self, most: int) -> Range | None:
        """Remove up to `most` numbers from the first range, and return them as a range."""
        if not self._ranges:
            return None
        start, end = self._ranges[0]
        stop = min(start + most, end)
        self._ranges[:1] = [(stop, end)] if stop < end else []
        self.total -= stop - start
        return start, stop
