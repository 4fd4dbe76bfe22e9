"""Differences between the clocks of hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nnlo_common.base._errors import ProtocolError

__all__ = ["ClockOffset", "clock_offset", "gathered_offset"]

#: At least so many rounds; more on busy hosts, until all ranks know their clocks as well as this.
_ROUNDS, _MOST_ROUNDS, _GOOD_S = 8, 100, 2.5e-4


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Difference between this host's clock and that of the first rank.

    Attributes:
        ahead_s: how far this clock is ahead.
        error_s: the most by which that may be wrong.
    """

    ahead_s: float = 0.0
    error_s: float = 0.0


def clock_offset(readings: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Estimate how far another clock is ahead, and the error of the estimate.

    The other clock was read between sending and receiving, so the quickest round trip is the most accurate.

    Args:
        readings: own clock when asking, the other clock, own clock when the answer arrived.

    Example:
        >>> clock_offset([(0.0, 8.0, 4.0), (10.0, 16.0, 12.0)])
        (5.0, 1.0)
    """
    asked, other, answered = min(readings, key=lambda reading: reading[2] - reading[0])
    return other - (asked + answered) / 2, (answered - asked) / 2


def gathered_offset(
    gather: Callable[[str], list[str]], rank: int, clock: Callable[[], float] = time.time
) -> ClockOffset:
    """Measure how far this rank's clock is ahead of the first rank's (collective).

    Nobody leaves a gather before all have entered it. So this rank has left after the first has entered, and
    the first has left after this one has entered: two bounds in each round, and the closest ones count. Where
    hosts are busy, ranks leave late, and there are more rounds.

    Args:
        gather: gives every rank the texts of all ranks.
        rank: this rank's number.
        clock: returns the time in seconds.

    Example:
        >>> gathered_offset(lambda text: [text], 0)
        ClockOffset(ahead_s=0.0, error_s=0.0)
    """
    lowest, highest = float("-inf"), float("inf")
    entered_s = left_s = 0.0
    for turn in range(_MOST_ROUNDS + 1):
        before_s, entered_s = entered_s, clock()
        error_s = abs(highest - lowest) / 2 if rank else 0.0
        texts = gather(f"{entered_s!r} {left_s!r} {error_s!r}")
        first_entered_s, first_left_s, _ = _read(0, texts[0])
        left_s = clock()
        highest = min(highest, left_s - first_entered_s)
        if turn:  # the first rank says when it has left the last round
            lowest = max(lowest, before_s - first_left_s)
        # All ranks read the same, so all end with the same round.
        if turn >= _ROUNDS and all(_read(*one)[2] <= _GOOD_S for one in enumerate(texts)):
            break
    if rank == 0:
        return ClockOffset()
    return ClockOffset((lowest + highest) / 2, abs(highest - lowest) / 2)


def _read(rank: int, text: str) -> tuple[float, float, float]:
    try:
        entered_s, left_s, error_s = map(float, text.split())
    except ValueError:
        raise ProtocolError(
            f"rank {rank} sent {text[:60]!r} in place of its clock; run the same nnlo on all ranks"
        ) from None
    return entered_s, left_s, error_s
