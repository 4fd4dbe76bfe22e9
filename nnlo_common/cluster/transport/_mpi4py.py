"""The MPI library as this process sees it; the only module that imports mpi4py.

Importing it initialises MPI (mpi4py does so), so `nnlo_common.cluster._connecting.connect` decides when to
import it. Other modules take `MPI` from here.

mpi4py requests MPI_THREAD_MULTIPLE. A program that sets `mpi4py.rc` otherwise keeps its choice;
`nnlo_common.cluster._connecting.require_threads` refuses it where it is too low.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import socket
from collections.abc import Mapping
from typing import Any, Literal, NoReturn, TypeAlias

import numpy as np
from mpi4py import MPI

from nnlo_common.base._errors import StartupError
from nnlo_common.cluster._aborting import end_within, silence
from nnlo_common.cluster._start_watch import ALL_RANKS, LIMIT, REPORT_AFTER_S, listed, sentence, waiting_for
from nnlo_common.cluster.transport._backoff import Backoff

__all__ = ["MPI", "RollCall", "ThreadLevel", "World", "cuda_aware", "one_line", "symbol"]

# -- facts about an MPI library as readable text; pure, so that tests can pass in any library's --------


def one_line(version: str) -> str:
    """Return name and version from the many lines of `MPI_Get_library_version`."""
    first = " ".join(version.strip("\0 \n").split("\n")[0].split())
    return first.split(", package:")[0].rstrip(",").replace("MPICH Version: ", "MPICH ")


def cuda_aware(library: str, env: Mapping[str, str], query: bool | None) -> bool | None:
    """Return the library's own answer, or for Cray's library the environment variable that decides."""
    if "CRAY" in library.upper():
        switch = env.get("MPICH_GPU_SUPPORT_ENABLED")
        return query if switch is None else switch == "1"
    return query


# -- roll call: finds which ranks are missing where a collective call takes long -----------------------
# A collective call does not say for whom it waits. So after a few seconds each waiting rank sends its
# presence to the first ranks, and the lowest of these that waits knows the others. The messages use the
# caller's communicator and a tag that programs do not use; where all ranks come in time, none is sent.

_AFTER_S = 5.0
# More than one, as the lowest may be missing.
_CALLERS = 3
# Programs count their tags from 0.
_BELOW_LARGEST_TAG = 5021


class RollCall:
    """Collects the ranks that wait in one collective call.

    Args:
        comm: the communicator of the call.
        library: the module `MPI`.
        limit_s: how long the call may take.
    """

    def __init__(self, comm: Any, library: Any, limit_s: float) -> None:
        self._comm, self._library, self._rank = comm, library, comm.Get_rank()
        self._after_s = min(_AFTER_S, limit_s / 2)
        # Equal on all ranks, which make the same calls; so a message of an earlier call is known as such.
        calls = _calls(library)
        self._number = (comm.Get_attr(calls) or 0) + 1
        comm.Set_attr(calls, self._number)
        self._others = set(range(comm.Get_size())) - {self._rank}
        self._absent = set(self._others)
        self._called = False

    def missing(self, waited_s: float) -> set[int]:
        """Return the ranks that do not wait; empty on a rank that leaves the report to another, or too early.

        Args:
            waited_s: how long this rank has waited.
        """
        if waited_s < self._after_s:
            return set()
        MPI = self._library
        tag = int(self._comm.Get_attr(MPI.TAG_UB) or _BELOW_LARGEST_TAG) - _BELOW_LARGEST_TAG
        callers = set(range(_CALLERS)) & self._others
        if not self._called:
            self._called = True
            for caller in callers:
                self._comm.Isend(np.array([self._number]), caller, tag).Free()  # small: it is copied at once
        if self._rank >= _CALLERS:
            return set()
        status, number = MPI.Status(), np.empty(1, np.int64)
        while self._comm.Iprobe(MPI.ANY_SOURCE, tag, status):
            self._comm.Recv(number, status.Get_source(), tag)
            if number[0] == self._number:
                self._absent.discard(status.Get_source())
        return set() if min(callers - self._absent, default=self._rank) < self._rank else set(self._absent)


@functools.cache
def _calls(library: Any) -> int:
    """Return the key under which a communicator keeps its number of calls."""
    key: int = library.Comm.Create_keyval()
    return key


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
