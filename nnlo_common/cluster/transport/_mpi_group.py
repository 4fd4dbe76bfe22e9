"""Group of MPI ranks, on a communicator of its own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._deaths import Deaths, end_alone
from nnlo_common.cluster.transport._group import Numbers
from nnlo_common.cluster.transport._mpi4py import MPI

__all__ = ["MPIGroup"]

# One call for a long vector takes three to four times as long as calls for pieces that fit the cache.
_PIECE = 1 << 18


class MPIGroup:
    """The ranks of one logical worker.

    Args:
        comm: their communicator, lead first; freed by `close`.
        ranks: their numbers in the training.
        naps: the host has fewer cores than ranks, so a waiting rank must leave its core to others.
        survives_loss: other groups survive the death of a rank of this one.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: Sequence[int], *, naps: bool, survives_loss: bool) -> None:
        self._comm, self._naps = comm, naps
        self.index, self.ranks = comm.Get_rank(), tuple(ranks)
        self._survives_loss = survives_loss
        if survives_loss:
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises the returned errors

    def gather(self, numbers: Numbers) -> Numbers:
        """Return the numbers of all ranks, a row for each."""
        everyone: Numbers = np.empty((len(self.ranks), numbers.size))
        with self._leaving_together():
            _finish(self._comm.Iallgather(numbers, everyone))
        return everyone

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, by index."""
        counts = self.gather(np.array([len(data)], np.float64))[:, 0].astype(np.int64)
        everyone = np.empty(int(counts.sum()), np.uint8)
        with self._leaving_together():
            _finish(self._comm.Iallgatherv(np.frombuffer(data, np.uint8), [everyone, counts]))
        return [part.tobytes() for part in np.split(everyone, np.cumsum(counts)[:-1])]

    def add_up(self, vector: Vector) -> None:
        """Replace the vector by the sum over all ranks."""
        with self._leaving_together():
            for start in range(0, vector.size, _PIECE):
                piece = vector[start : start + _PIECE]
                if self._naps:
                    _finish(self._comm.Iallreduce(MPI.IN_PLACE, piece))
                else:
                    self._comm.Allreduce(MPI.IN_PLACE, piece)

    def broadcast(self, data: npt.NDArray[np.uint8]) -> _MPIBroadcast:
        """Begin to copy the lead's bytes into those of the others."""
        with self._leaving_together():
            return _MPIBroadcast(self, self._comm.Ibcast([data, MPI.BYTE]))

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        with self._leaving_together():
            if self._naps:
                _finish(self._comm.Ibarrier())
            else:
                self._comm.Barrier()

    def twin(self) -> MPIGroup:
        """Return another group of the same ranks, which another thread may use."""
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ConfigurationError(
                "sums made by a thread while a backward pass runs need the MPI thread level MULTIPLE, and "
                "this library grants less; use all_reduce='mpi', or do not lower mpi4py.rc.thread_level"
            )
        with self._leaving_together():
            comm = self._comm.Dup()
        return MPIGroup(comm, self.ranks, naps=self._naps, survives_loss=self._survives_loss)

    def communicator(self) -> MPI.Intracomm:
        """Return the communicator of these ranks."""
        return self._comm

    def close(self) -> None:
        """Free the communicator."""
        with contextlib.suppress(*[MPI.Exception] if self._survives_loss else []):
            self._comm.Free()

    @contextlib.contextmanager
    def _leaving_together(self) -> Iterator[None]:
        """End this rank if another of its group has died: the group is one worker, and dies as one."""
        try:
            yield
        except MPI.Exception as error:
            if not self._survives_loss:
                raise
            self._end(error)

    def _end(self, error: MPI.Exception) -> NoReturn:
        try:
            dead = [self.ranks[index] for index in Deaths(self._comm).new(error)]
        except MPI.Exception:  # another rank of the group has noticed the death first, and revoked
            dead = []
        with contextlib.suppress(MPI.Exception):
            self._comm.Revoke()  # frees the others
        who = f"rank {dead[0]}" if dead else "a rank"
        text = f"nnlo: rank {self.ranks[self.index]} ends, because {who} of its group has died\n"
        os.write(2, text.encode())
        sys.stdout.flush()
        end_alone()


class _MPIBroadcast:
    """A broadcast under way."""

    def __init__(self, group: MPIGroup, request: MPI.Request) -> None:
        self._group, self._request = group, request

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is complete here; False after `timeout_s`."""
        with self._group._leaving_together():
            return _finish(self._request, timeout_s)


def _finish(request: MPI.Request, timeout_s: float | None = None) -> bool:
    """Wait without burning the core; False after `timeout_s`."""
    backoff = Backoff()
    while not request.Test():
        if timeout_s is not None and backoff.waited_s >= timeout_s:
            return False
        backoff.pause()
    return True
