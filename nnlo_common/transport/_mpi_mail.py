"""Mail over MPI."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from nnlo_common.transport._backoff import Backoff
from nnlo_common.transport._world import MPI

__all__ = ["MPIMail"]

_LONGEST_PAUSE_S = 1e-3


class MPIMail:
    """One rank's letter box on a communicator that nobody else uses.

    Args:
        comm: the communicator; freed by `close`.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        self._leaving: deque[tuple[MPI.Request, npt.NDArray[np.uint8]]] = deque()

    def send(self, peer: int, text: str) -> None:
        """Send a text."""
        self._forget_sent()
        letter = np.frombuffer(text.encode(), np.uint8)
        self._leaving.append((self._comm.Isend([letter, MPI.BYTE], peer), letter))

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | None:
        """Return the next letter with its sender; None if none came in time."""
        self._forget_sent()
        backoff, status = Backoff(_LONGEST_PAUSE_S), MPI.Status()
        while True:
            found = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if found is not None:
                letter = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                found.Recv([letter, MPI.BYTE])
                return status.Get_source(), letter.tobytes().decode()
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return None
            backoff.pause()

    def close(self) -> None:
        """Let everything leave that was sent."""
        while self._leaving:
            request, _ = self._leaving.popleft()
            request.Wait()
        self._comm.Free()

    def _forget_sent(self) -> None:
        while self._leaving and self._leaving[0][0].Test():
            self._leaving.popleft()
