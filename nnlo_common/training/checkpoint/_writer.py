"""Writing beside the training: one thing at a time, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Writer"]

_NAME = "nnlo-checkpoint"


class Writer:
    """Does one thing at a time in a thread; who has another waits for it.

    The thread is no daemon, so that a program does not end before all is written.

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
        """Whether it has not done what it was given."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Have `job` done, after what was given before."""
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(job,), name=_NAME)
        self._thread.start()

    def wait(self) -> float:
        """Wait until all is done, and return for how many seconds; raise what the job has raised."""
        thread, self._thread = self._thread, None
        if thread is None:
            return 0.0
        begun_s = time.monotonic()
        thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return time.monotonic() - begun_s

    def _do(self, job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:  # whoever waits raises it
            self._error = error


def wait_for_all() -> None:
    """Wait for what trainings of this process that were broken off still write."""
    for thread in threading.enumerate():
        if thread.name == _NAME and thread.is_alive():  # not one that is just being started
            thread.join()
