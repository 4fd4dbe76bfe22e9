"""Mail over MPI."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._deaths import Deaths
from nnlo_common.cluster.transport._world import MPI
from nnlo_common.protocol import Lost

__all__ = ["MPIMail"]

_LONGEST_PAUSE_S = 1e-3


class MPIMail:
    """One rank's letter box on a communicator that nobody else uses.

    Args:
        comm: the communicator; freed by `close`.
        survives_loss: whether the others go on when a rank dies.
    """

    def __init__(self, comm: MPI.Intracomm, *, survives_loss: bool = False) -> None:
        self._comm, self._deaths = comm, Deaths(comm) if survives_loss else None
        self._news: deque[Lost] = deque()
        self._leaving: deque[tuple[MPI.Request, npt.NDArray[np.uint8]]] = deque()

    def send(self, peer: int, text: str) -> None:
        """Send a text."""
        self._forget_sent()
        letter = np.frombuffer(text.encode(), np.uint8)
        with self._mourning():
            self._leaving.append((self._comm.Isend([letter, MPI.BYTE], peer), letter))

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next letter with its sender, or who has died; None if none came in time."""
        self._forget_sent()
        backoff, status = Backoff(_LONGEST_PAUSE_S), MPI.Status()
        while not self._news:
            with self._mourning():
                found = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if found is not None:
                    letter = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    found.Recv([letter, MPI.BYTE])
                    return status.Get_source(), letter.tobytes().decode()
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return None
            backoff.pause()
        return self._news.popleft()

    def close(self) -> None:
        """Let everything leave that was sent."""
        while self._leaving:
            request, _ = self._leaving.popleft()
            with self._mourning():
                request.Wait()
        with self._mourning():
            self._comm.Free()

    def _forget_sent(self) -> None:
        left = True
        while self._leaving and left:
            with self._mourning():  # who was to get it is dead: nothing more will come of it
                left = self._leaving[0][0].Test()
            if left:
                self._leaving.popleft()

    @contextlib.contextmanager
    def _mourning(self) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            if self._deaths is None:
                raise
            self._news.extend(map(Lost, self._deaths.news(error)))
            self._comm.Ack_failed()  # or MPI would not look for letters of anybody any more
