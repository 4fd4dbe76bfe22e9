"""Signals that ask a training to end: they are noted, and heeded at the next batch boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["EXIT_CODE", "Interrupts"]

#: The exit status of a training that has saved and wants to be started again: EX_TEMPFAIL of sysexits.h.
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Interrupts:
    """Notes SIGTERM and SIGUSR1, which batch systems send before the time is up.

    Nothing is saved in the handler itself: amid a step the numbers are of two minds.

    Attributes:
        came: whether one of the signals has come.

    Example:
        >>> import os
        >>> with Interrupts() as interrupts:
        ...     os.kill(os.getpid(), signal.SIGUSR1)
        ...     interrupts.came
        True
    """

    def __init__(self) -> None:
        self.came = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            with contextlib.suppress(TypeError, ValueError):  # set from C, or at the end of the interpreter
                signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - Python's signature
        self.came = True
