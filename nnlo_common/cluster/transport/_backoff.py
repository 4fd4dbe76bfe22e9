"""Back-off for waits: poll at once at first, then ever less often, so that a waiting rank costs little."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["LONGEST_S", "Backoff"]

# A short message is answered within this time, so looking without a pause is worth the core...
_SPIN_S = 300e-6
# ...and afterwards pauses are a tenth of the time already waited: at most a tenth is lost on top of it,
_PAUSE_PER_WAITED = 0.1
_SHORTEST_PAUSE_S = 20e-6
# up to this, so that a message is seen within a millisecond even after hours.
LONGEST_S = 500e-6


class Backoff:
    """Pauses between looks; one object for one wait.

    Args:
        longest_s: the longest pause.
        clock: tells the time.
        sleep: pauses; says whether it was woken, and so something is about to come.

    Example:
        >>> backoff = Backoff(clock=lambda: 0.0)  # for which no time passes
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
        """Pause before the next look; say whether that is to be one of many in a row.

        Args:
            hurry: whether something is on its way that will not arrive unless we keep looking.
        """
        waited_s = self._clock() - self._quiet_s
        if waited_s < _SPIN_S or hurry():
            os.sched_yield()  # another rank may want this very core to answer us
            return True
        woken = self._sleep(min(max(waited_s * _PAUSE_PER_WAITED, _SHORTEST_PAUSE_S), self._longest_s))
        if woken:
            self._quiet_s = self._clock()
        return bool(woken)

    @property
    def waited_s(self) -> float:
        """How long the wait has taken so far."""
        return self._clock() - self._start_s
