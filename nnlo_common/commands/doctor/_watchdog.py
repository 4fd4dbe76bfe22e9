"""Watchdog: aborts a hanging check and names the step."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Watchdog"]


class Watchdog:
    """Calls `on_late` if a step takes too long.

    Args:
        limit_s: the longest a step may take.
        on_late: called with the name of the late step, in another thread.

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
        """Begin a step and end the one before."""
        self.stop()
        self._timer = threading.Timer(self._limit_s, self._on_late, [what])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """End the last step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
