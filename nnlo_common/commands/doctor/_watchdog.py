"""A check that hangs must still end, and say where."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Watchdog"]


class Watchdog:
    """Calls for help if one step takes too long.

    Args:
        limit_s: the longest a step may take.
        on_late: is told which step it was, in another thread.

    Example:
        >>> watchdog = Watchdog(60, print)
        >>> watchdog.step("asking every rank")
        >>> watchdog.stop()
    """

    def __init__(self, limit_s: float, on_late: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._on_late = on_late
        self._timer: threading.Timer | None = None

    def step(self, what: str) -> None:
        """Begin a step, which ends the one before."""
        self.stop()
        self._timer = threading.Timer(self._limit_s, self._on_late, [what])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """End the last step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
