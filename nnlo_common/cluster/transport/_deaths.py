"""Deaths of ranks as MPI's failure mitigation (ULFM) reports them, each returned once.

Under `mpiexec --with-ft ulfm` the other ranks survive a death. Their requests with the dead rank fail, and
the communicator then names it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import NoReturn

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._mpi4py import MPI

__all__ = ["Deaths", "end_alone", "limit_finalize"]

# After a death, MPI_Finalize of Open MPI 5.0 sometimes never returns.
_FINALIZE_LIMIT_S = 5.0


class Deaths:
    """The dead ranks that this rank knows of, on one communicator.

    Args:
        comm: the communicator; from now on its errors are raised as exceptions.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises the returned errors
        self.known: set[int] = set()

    def new(self, error: MPI.Exception) -> list[int]:
        """Return the dead ranks not known before `error`.

        Raises:
            MPI.Exception: `error` itself, if no rank has died.
        """
        failed, own = self._comm.Get_failed(), self._comm.Get_group()
        dead = set(MPI.Group.Translate_ranks(failed, list(range(failed.Get_size())), own))
        if not dead:
            raise error
        fresh = sorted(dead - self.known)
        self.known |= dead
        return fresh

    def lost_error(self, error: MPI.Exception, doing: str) -> PeerLostError:
        """Return the error to raise where `error` ended an operation that needs all ranks."""
        rank = min(self.new(error), default=min(self.known, default=0))
        return PeerLostError(
            rank, f"has died while all ranks were {doing}, which needs all of them; start the job again"
        )


def limit_finalize(comm: MPI.Intracomm, *, meet: bool) -> None:
    """Limit the time of MPI_Finalize at the end of a program that tolerates deaths.

    The ranks first meet here, where a death is noticed, so that they enter MPI_Finalize together. No Python
    runs inside it, so a timer of the operating system ends the process.

    Args:
        comm: all ranks.
        meet: False where this rank has dropped one that may never come; its end then frees the others.
    """
    if MPI.Is_finalized():
        return
    with contextlib.suppress(MPI.Exception):  # a rank has died
        everyone, backoff = comm.Ibarrier() if meet else MPI.REQUEST_NULL, Backoff()
        while not everyone.Test() and not comm.Get_failed().Get_size():
            backoff.pause()
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, _FINALIZE_LIMIT_S)


def end_alone() -> NoReturn:
    """End this process as a death that the others survive.

    An exit, even with a status, is no death to Open MPI: others would wait, or its status become the job's.
    """
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)  # not reached
