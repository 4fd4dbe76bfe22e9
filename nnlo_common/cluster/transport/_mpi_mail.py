"""Mail over MPI."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._deaths import Deaths
from nnlo_common.cluster.transport._mpi4py import MPI
from nnlo_common.protocol import Lost

__all__ = ["MPIMail"]

_LONGEST_PAUSE_S = 1e-3


class MPIMail:
    """One rank's mailbox, on a communicator of its own.

    Args:
        comm: the communicator; freed by `close`.
        survives_loss: whether the other ranks survive the death of one.
    """

    def __init__(self, comm: MPI.Intracomm, *, survives_loss: bool = False) -> None:
        self._comm, self._deaths = comm, Deaths(comm) if survives_loss else None
        self._lost: deque[Lost] = deque()
        self._leaving: deque[tuple[MPI.Request, npt.NDArray[np.uint8]]] = deque()

    def send(self, peer: int, text: str) -> None:
        """Send a text."""
        self._drop_sent()
        data = np.frombuffer(text.encode(), np.uint8)
        with self._noting_deaths():
            self._leaving.append((self._comm.Isend([data, MPI.BYTE], peer), data))

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next sender and text, or a death; None after `timeout_s`."""
        self._drop_sent()
        backoff, status = Backoff(_LONGEST_PAUSE_S), MPI.Status()
        while not self._lost:
            with self._noting_deaths():
                found = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
                if found is not None:
                    data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    found.Recv([data, MPI.BYTE])
                    return status.Get_source(), data.tobytes().decode()
            if timeout_s is not None and backoff.waited_s >= timeout_s:
                return None
            backoff.pause()
        return self._lost.popleft()

    def close(self) -> None:
        """Complete all sends."""
        while self._leaving:
            request, _ = self._leaving.popleft()
            with self._noting_deaths():
                request.Wait()
        with self._noting_deaths():
            self._comm.Free()

    def _drop_sent(self) -> None:
        left = True
        while self._leaving and left:
            with self._noting_deaths():  # the receiver is dead: drop the send
                left = self._leaving[0][0].Test()
            if left:
                self._leaving.popleft()

    @contextlib.contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except MPI.Exception as error:
            if self._deaths is None:
                raise
            self._lost.extend(map(Lost, self._deaths.new(error)))
            self._comm.Ack_failed()  # or MPI would refuse probes of any source
