"""Lease: the answer to a worker that asks for positions of an epoch."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

__all__ = ["WAIT", "Lease", "Unanswered"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The positions [start, stop) of an epoch, for one worker alone.

    Attributes:
        epoch: the epoch of the positions. It may be earlier than the one the worker asked about: then
            another worker died with them.
        start: the first position.
        stop: the one after the last.

    Example:
        >>> lease = Lease(epoch=0, start=6, stop=9)
        >>> lease.size, "abcdefghij"[lease.start : lease.stop]
        (3, 'ghi')
    """

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of positions."""
        return self.stop - self.start


class Unanswered(enum.Enum):
    """An answer that comes later, see `Leases.answers`."""

    WAIT = "nothing is free, but another worker holds positions that come back if it dies"


WAIT: Final = Unanswered.WAIT
