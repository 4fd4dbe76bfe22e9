"""Signals that ask a training to end: recorded at once, obeyed at the next batch boundary."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["EXIT_CODE", "Interrupts", "LeftTogether"]

#: Exit status of a training that has saved a checkpoint and is to be restarted: EX_TEMPFAIL of sysexits.h.
EXIT_CODE = 75
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class LeftTogether(SystemExit):
    """All ranks of a training have saved a checkpoint, and exit.

    Attributes:
        recalled: the search asked for it, to continue the training on more ranks; False after a signal.
    """

    def __init__(self, *, recalled: bool) -> None:
        super().__init__(EXIT_CODE)
        self.recalled = recalled


class Interrupts:
    """Records SIGTERM and SIGUSR1, which batch systems send before the time limit.

    The handler itself saves nothing: in the middle of a step the parameters are inconsistent.

    Attributes:
        came: whether one of the signals has arrived.

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
        if threading.current_thread() is threading.main_thread():  # Python sets handlers in no other thread
            for number in _SIGNALS:
                if signal.getsignal(number) is not _record:
                    _previous[number] = signal.signal(number, _record)
            _active.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _active:
            return
        _active.remove(self)
        if not _active and threading.current_thread() is threading.main_thread():
            _restore()


#: Entered and not yet left. Several may overlap: one that fails may be left long after the next is entered.
_active: list[Interrupts] = []
#: The handlers before the first of them.
_previous: dict[signal.Signals, Any] = {}


def _record(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
    for one in _active:
        one.came = True
    if (
        not _active
    ):  # the last was left by another thread, as garbage collection does, which may set no handler
        _restore()
        signal.raise_signal(number)


def _restore() -> None:
    for number, handler in _previous.items():
        with contextlib.suppress(TypeError, ValueError):  # set from C, or the interpreter shuts down
            signal.signal(number, handler)
    _previous.clear()
