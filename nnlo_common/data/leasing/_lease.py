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
        epoch: whose order they are positions of. It may be earlier than the one that was asked about:
            then a worker died with them.
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
        """How many positions they are."""
        return self.stop - self.start


class Unanswered(enum.Enum):
    """The answer that is none yet."""

    WAIT = "nothing is free, but somebody else still holds what would come back if it died"


WAIT: Final = Unanswered.WAIT
