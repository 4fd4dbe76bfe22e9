"""The MPI library as this process sees it; the only module that imports mpi4py.

Importing it initialises MPI (mpi4py does so), so `nnlo_common.cluster._connecting.connect` decides when to
import it. Other modules take `MPI` from here.

mpi4py requests MPI_THREAD_MULTIPLE. A program that sets `mpi4py.rc` otherwise keeps its choice;
`nnlo_common.cluster._connecting.require_threads` refuses it where it is too low.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import socket
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
from mpi4py import MPI

from nnlo_common.base._errors import StartupError
from nnlo_common.cluster._aborting import end_within, silence
from nnlo_common.cluster._start_watch import ALL_RANKS, LIMIT, REPORT_AFTER_S, listed, sentence, waiting_for
from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._library import cuda_aware, one_line
from nnlo_common.cluster.transport._roll_call import RollCall

__all__ = ["MPI", "ThreadLevel", "World", "symbol"]

_LOG = logging.getLogger(__name__)

ThreadLevel: TypeAlias = Literal["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]


class World:
    """Facts about one communicator, its MPI library and this process's place in it.

    Args:
        comm: the communicator of the job; None means `MPI.COMM_WORLD`. It is not duplicated here:
            duplicate it before you send messages.

    Example:
        >>> world = World()
        >>> world.size
        1
    """

    def __init__(self, comm: MPI.Intracomm | None = None) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm

    @property
    def rank(self) -> int:
        """The number of this process in the communicator, from 0."""
        return self.comm.Get_rank()

    @property
    def size(self) -> int:
        """The number of processes in the communicator."""
        return self.comm.Get_size()

    @property
    def host(self) -> str:
        """The name of the machine this process runs on."""
        return socket.gethostname()

    @property
    def library(self) -> str:
        """The MPI library in one line, e.g. `Open MPI v5.0.11` or `MPICH 5.0.2`."""
        return one_line(MPI.Get_library_version())

    @property
    def thread_level(self) -> ThreadLevel:
        """The thread level that the library granted: which threads may call MPI."""
        return _THREAD_LEVELS[MPI.Query_thread()]

    def world_rank(self, rank: int) -> int:
        """Return the number of a rank of this communicator among all processes of the job."""
        own, every = self.comm.Get_group(), MPI.COMM_WORLD.Get_group()
        (number,) = MPI.Group.Translate_ranks(own, [rank], every)
        return number

    def ulfm_built(self) -> bool:
        """Whether the library has User-Level Failure Mitigation built in, enabled or not."""
        return any(symbol(name) is not None for name in ("MPIX_Comm_is_revoked", "MPI_Comm_is_revoked"))

    def has_ulfm(self) -> bool:
        """Whether failure mitigation is enabled in this run, so that a dead rank need not end the job.

        Open MPI disables it by default; `mpiexec --with-ft ulfm` enables it.
        """
        if not self.ulfm_built():
            return False
        flag = _open_mpi_flag("ompi_ftmpi_enabled")
        return True if flag is None else flag

    def survives_loss(self) -> bool:
        """Whether other ranks survive a death: only under Open MPI's `mpiexec --with-ft ulfm`.

        MPICH has the calls, but its launcher ends the job.
        """
        return _open_mpi_flag("ompi_ftmpi_enabled") is True

    def cuda_aware(self) -> bool | None:
        """Whether the library accepts addresses of GPU memory; None if it does not say."""
        return cuda_aware(self.library, os.environ, _query("MPIX_Query_cuda_support"))

    def gather_text(self, text: str, limit_s: float = math.inf, *, patient: bool = False) -> list[str]:
        """Give every rank the texts of all ranks, in the order of the ranks (collective).

        Args:
            text: this rank's text, of any length.
            limit_s: how long to wait for the others.
            patient: do not report who is missing.

        Returns:
            One text per rank, the same list everywhere.

        Raises:
            StartupError: others have not come in time.
        """
        mine = np.frombuffer(text.encode(), dtype=np.uint8)
        counts = np.empty(self.size, dtype=np.int64)
        self._wait(self.comm.Iallgather(np.array([mine.size], dtype=np.int64), counts), limit_s, patient)
        everyone = np.empty(int(counts.sum()), dtype=np.uint8)
        self._wait(self.comm.Iallgatherv(mine, [everyone, counts]), limit_s, patient)
        return [part.tobytes().decode() for part in np.split(everyone, np.cumsum(counts)[:-1])]

    def _wait(self, request: MPI.Request, limit_s: float, patient: bool) -> None:
        """Wait without burning the core or blocking Ctrl-C; name the missing ranks if it takes long."""
        backoff, roll_call = Backoff(), RollCall(self.comm, MPI, limit_s)
        report_after_s = math.inf if patient else min(REPORT_AFTER_S, limit_s)
        while not request.Test():
            backoff.pause()
            waited_s = backoff.waited_s
            missing = roll_call.missing(waited_s)
            if missing and waited_s > report_after_s:
                names = sentence(missing, "has not come", "have not come")
                text = waiting_for(report_after_s, names, limit_s)
                _LOG.warning("nnlo: rank %d of %d on %s %s", self.rank, self.size, self.host, text)
                report_after_s *= 10
            if waited_s > limit_s:
                names = f": {listed(missing)} did not come" if missing else ""
                error = StartupError(
                    f"the other ranks have not come within {limit_s:.0f} s{names}. {ALL_RANKS}, or set "
                    f"{LIMIT} to a longer time if they come later"
                )
                error.collective = True
                raise error

    def abort(self, code: int) -> NoReturn:
        """End every process of the job now, also those outside this communicator."""
        end_within()  # a launcher that misses the abort notices the dead processes
        silence()  # MPICH's line beside the report, which has been printed
        MPI.COMM_WORLD.Abort(code)
        raise SystemExit(code)  # some libraries return before the launcher's signal arrives


_THREAD_LEVELS: dict[int, ThreadLevel] = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def _libraries() -> list[ctypes.CDLL]:
    # mpi4py's extension is linked with the MPI library; builds that load it at run time need the second
    # handle.
    return [ctypes.CDLL(MPI.__file__), ctypes.CDLL(None)]


def symbol(name: str) -> Any:
    """Return a function of the MPI library, or of a library that it is built on; None if there is none."""
    for library in _libraries():
        if hasattr(library, name):
            return getattr(library, name)
    return None


def _query(name: str) -> bool | None:
    function = symbol(name)
    return None if function is None else bool(function())


def _open_mpi_flag(name: str) -> bool | None:
    for library in _libraries():
        try:
            return ctypes.c_bool.in_dll(library, name).value
        except ValueError:
            continue
    return None
