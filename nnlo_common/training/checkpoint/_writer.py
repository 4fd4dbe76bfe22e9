"""Writer thread: runs one job at a time while the training continues."""

from __future__ import annotations

import mmap
import resource
import threading
import time
from collections.abc import Callable

from nnlo_common.base._spans import Spans, record, recorder, span

__all__ = ["Writer"]

_NAME = "nnlo-checkpoint"
# Python needs less than this, besides the stack, to begin a thread.
_BEGINNING_BYTES = 16 << 20


class Writer:
    """Runs one job at a time in a thread; `start` waits for the previous job.

    The thread is not a daemon, so that a program does not end before all is written. Without memory for a
    thread `start` runs the job itself.

    Example:
        >>> writer, done = Writer(), []
        >>> writer.start(lambda: done.append("first"))
        >>> writer.start(lambda: done.append("second"))
        >>> _ = writer.wait()
        >>> done, writer.busy
        (['first', 'second'], False)
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` after the previous one."""
        self.wait()
        thread = threading.Thread(target=self._do_beside, args=(job, recorder()), name=_NAME)
        try:
            _check_memory()
            thread.start()
        except (OSError, RuntimeError, MemoryError):  # no memory, or too many threads
            self._do(job)
        else:
            self._thread = thread

    def wait(self) -> float:
        """Wait for the job and return the seconds waited; re-raise the job's exception."""
        thread, self._thread = self._thread, None
        begun_s = time.monotonic()
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return 0.0 if thread is None else time.monotonic() - begun_s

    def _do_beside(self, job: Callable[[], object], spans: Spans | None) -> None:
        record(None if spans is None else spans.beside("checkpoint"))
        self._do(job)

    def _do(self, job: Callable[[], object]) -> None:
        try:
            with span("checkpoint", "writes"):
                job()
        except BaseException as error:  # `wait` raises it
            self._error = error


def _check_memory() -> None:
    """Raise an OSError if there is no memory for a thread.

    Python waits for ever for a thread that fails before its first line.
    """
    stack = threading.stack_size() or resource.getrlimit(resource.RLIMIT_STACK)[0]
    size = _BEGINNING_BYTES + (0 if stack == resource.RLIM_INFINITY else stack)
    mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()


def wait_for_all() -> None:
    """Wait for the writes of aborted trainings in this process."""
    for thread in threading.enumerate():
        if thread.name == _NAME and thread.is_alive():  # joining a thread that is just starting would fail
            thread.join()
