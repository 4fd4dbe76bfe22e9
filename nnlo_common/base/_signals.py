"""Signals that ask a training to end: they are noted, and heeded at the next batch boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["EXIT_CODE", "Interrupts", "LeftTogether"]

#: The exit status of a training that has saved and wants to be started again: EX_TEMPFAIL of sysexits.h.
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class LeftTogether(SystemExit):
    """All ranks of a training have saved, and leave.

    Attributes:
        recalled: for a search, so that more ranks can go on with it; not at a signal.
    """

    def __init__(self, *, recalled: bool) -> None:
        super().__init__(EXIT_CODE)
        self.recalled = recalled


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

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
            if not _noting:
                _before.update({number: signal.signal(number, _note) for number in _SIGNALS})
            _noting.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _noting:
            return
        _noting.remove(self)
        if not _noting:
            for number, handler in _before.items():
                with contextlib.suppress(TypeError, ValueError):  # set from C, or at the interpreter's end
                    signal.signal(number, handler)
            _before.clear()


#: Those between their begin and end: who fails may end long after another has begun.
_noting: list[Interrupts] = []
#: What the signals did before the first of them.
_before: dict[signal.Signals, Any] = {}


def _note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
    for one in _noting:
        one.came = True
