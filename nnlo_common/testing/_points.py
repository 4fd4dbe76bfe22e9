"""Named points of programs on ranks as threads, at which a rank dies or waits."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TypeAlias

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, NNLOError

__all__ = ["InjectedFault", "Points"]

_Point: TypeAlias = tuple[int, str, int]  # rank, name, occurrence


class InjectedFault(NNLOError):
    """The death of a rank by `MemoryCluster.fail`; the other ranks see the rank as lost."""


class Points:
    """The faults and holds of `size` ranks, and the points reached so far.

    Example:
        >>> points = Points(2)
        >>> points.fail(1, "half way")
        >>> points.reach(1, "start")
        >>> print(points.missed())  # doctest: +NORMALIZE_WHITESPACE
        rank 1 was to die at 'half way', occurrence 1, but did not reach it; it reached 'start' (1x)
        name a point that is reached, or pass may_miss=True
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._faults: set[_Point] = set()
        self._gates: dict[_Point, threading.Event] = {}
        self._needed: dict[_Point, str] = {}  # required points and their purpose
        self._reached: Counter[tuple[int, str]] = Counter()
        self._changing = threading.Lock()

    def fail(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> None:
        """Let `rank` die at a point."""
        self._faults.add(self._asked(rank, point, occurrence, None if may_miss else "die"))

    def hold(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> threading.Event:
        """Let `rank` wait at a point."""
        asked = self._asked(rank, point, occurrence, None if may_miss else "wait")
        return self._gates.setdefault(asked, threading.Event())

    def _asked(self, rank: int, point: str, occurrence: int, purpose: str | None) -> _Point:
        if whole_number("rank", rank, 0) >= self.size:
            raise ConfigurationError(f"rank={rank}: the cluster has the ranks 0 to {self.size - 1}")
        asked = (rank, point, whole_number("occurrence", occurrence, 1))
        if purpose is not None:
            self._needed[asked] = purpose
        return asked

    def begin(self) -> None:
        """Reset the counts; keep faults and holds."""
        self._reached = Counter()

    def reach(self, rank: int, point: str) -> None:
        """Count this occurrence; die or wait if `fail` or `hold` chose it."""
        with self._changing:
            self._reached[rank, point] += 1
            count = self._reached[rank, point]
        if (rank, point, count) in self._faults:
            raise InjectedFault(f"rank {rank} dies at {point!r}, occurrence {count}")
        if gate := self._gates.get((rank, point, count)):
            gate.wait()

    def open_gates(self) -> None:
        """Free all held ranks."""
        for gate in self._gates.values():
            gate.set()

    def missed(self) -> str:
        """Describe the required points that were not reached; empty if none."""
        with self._changing:
            reached = Counter(self._reached)
        lines = []
        for (rank, point, occurrence), purpose in self._needed.items():
            if reached[rank, point] < occurrence:
                seen = [f"{name!r} ({count}x)" for (other, name), count in reached.items() if other == rank]
                lines.append(
                    f"rank {rank} was to {purpose} at {point!r}, occurrence {occurrence}, but did not reach "
                    f"it; it reached {', '.join(seen) or 'no point'}"
                )
        return "\n".join([*lines, "name a point that is reached, or pass may_miss=True"]) if lines else ""
