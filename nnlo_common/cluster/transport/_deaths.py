"""Deaths of ranks as MPI's failure mitigation reports them, each passed on once.

`mpiexec --with-ft ulfm` leaves the others alone when a rank dies. Whatever they have under way with
it ends with an error; who it is then says the communicator.
"""

from __future__ import annotations

import contextlib
import signal

from nnlo_common.base._errors import PeerLostError
from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._world import MPI

__all__ = ["Deaths", "limit_farewell"]

# When a rank has died, or dies meanwhile, MPI_Finalize of Open MPI 5.0 sometimes never returns.
_FAREWELL_S = 5.0


class Deaths:
    """The dead ranks of one communicator, as far as this rank knows.

    Args:
        comm: the communicator; its errors become exceptions.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # which mpi4py turns into exceptions
        self.known: set[int] = set()

    def news(self, error: MPI.Exception) -> list[int]:
        """Return the ranks whose death is behind `error` and was not known.

        Raises:
            MPI.Exception: nobody has died, so it is an error of another kind.
        """
        failed, own = self._comm.Get_failed(), self._comm.Get_group()
        dead = set(MPI.Group.Translate_ranks(failed, list(range(failed.Get_size())), own))
        if not dead:
            raise error
        fresh = sorted(dead - self.known)
        self.known |= dead
        return fresh

    def refuse(self, error: MPI.Exception, doing: str) -> PeerLostError:
        """Return what to raise where all ranks are needed, and `error` came instead."""
        rank = min(self.news(error), default=min(self.known, default=0))
        return PeerLostError(
            rank, f"has died while all ranks were {doing}, which needs all of them; start the job again"
        )


def limit_farewell(comm: MPI.Intracomm) -> None:
    """At the end of a program, where ranks may be lost: let the end of MPI take no longer than it may.

    All wait for each other here, where a death is noticed, so that they come to the end of MPI together.
    Nothing of Python runs by then, so the operating system has to end the process.
    """
    if MPI.Is_finalized():
        return
    with contextlib.suppress(MPI.Exception):  # somebody has died
        everyone, backoff = comm.Ibarrier(), Backoff()
        while not everyone.Test() and not comm.Get_failed().Get_size():
            backoff.pause()
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.setitimer(signal.ITIMER_REAL, _FAREWELL_S)
