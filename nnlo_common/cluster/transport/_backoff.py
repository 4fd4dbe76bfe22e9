"""Back-off between polls: none at first, then growing pauses, so that a waiting rank costs little CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["LONGEST_S", "Backoff"]

# A short message is answered within this time, so polling without a pause is worth the core.
_SPIN_S = 300e-6
# Afterwards a pause is a tenth of the time waited so far, so a message is seen at most a tenth later,
_PAUSE_PER_WAITED = 0.1
_SHORTEST_PAUSE_S = 20e-6
# and never longer than this, so that it is seen within a millisecond even after hours.
LONGEST_S = 500e-6


class Backoff:
    """Pauses between the polls of one wait.

    Args:
        longest_s: the longest pause.
        clock: returns the time in seconds.
        sleep: pauses; returns True if another rank woke it, because a message is about to arrive.

    Example:
        >>> backoff = Backoff(clock=lambda: 0.0)  # no time passes
        >>> backoff.pause()  # returns at once: the wait has only begun
        True
    """

    __slots__ = ("_clock", "_longest_s", "_quiet_s", "_sleep", "_start_s")

    def __init__(
        self,
        longest_s: float = LONGEST_S,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], bool | None] = time.sleep,
    ) -> None:
        self._longest_s, self._clock, self._sleep = longest_s, clock, sleep
        self._start_s = self._quiet_s = clock()

    def pause(self, hurry: Callable[[], bool] = lambda: False) -> bool:
        """Pause before the next poll; return whether to poll many times in a row.

        Args:
            hurry: whether a message is moving that needs our polls to arrive.
        """
        waited_s = self._clock() - self._quiet_s
        if waited_s < _SPIN_S or hurry():
            os.sched_yield()  # the answering rank may need this core
            return True
        woken = self._sleep(min(max(waited_s * _PAUSE_PER_WAITED, _SHORTEST_PAUSE_S), self._longest_s))
        if woken:
            self._quiet_s = self._clock()
        return bool(woken)

    @property
    def waited_s(self) -> float:
        """How long the wait has taken so far."""
        return self._clock() - self._start_s
