"""Deaths of ranks as MPI's failure mitigation (ULFM) reports them, each returned once.

Under `mpiexec --with-ft ulfm` the other ranks survive a death. Their requests with the dead rank fail, and
the communicator then names it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._limited_formats import content_of, malformed, message_of, table_of
from nnlo_common.cluster.transport._backoff import Backoff
from nnlo_common.cluster.transport._datagrams import Datagrams
from nnlo_common.cluster.transport._mpi4py import MPI, World

__all__ = [
    "Deaths",
    "HostPeers",
    "ProcessAddress",
    "end_alone",
    "gathered_from_living",
    "limit_finalize",
]

# -- processes of the ranks on this host: kill one, or watch for the death of one ----------------------
# When a rank dies the launcher ends the job, which leaves no time to ask MPI which rank it was. A thread
# that waits on pidfds learns it at once, mostly before the launcher ends its own process.

_RANK_BYTES = 4
# What a rank sends itself at its end, in place of a rank's number.
_OVER = b"\xff" * _RANK_BYTES
# How long a rank that ends waits for a watcher that reads nothing.
_FAREWELL_S = 1.0
# More than the kernel holds, so that nothing sent before a death is left unread.
_ALL = 10_000


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """How the ranks of one host reach a process.

    Attributes:
        host: the host name.
        space: the PID namespace; empty where unknown.
        pid: the process id in that namespace.
        address: the socket that receives announced ends; empty where there is none.
        wakeup: the address of its wake-up socket; empty where there is none.
    """

    host: str
    space: str
    pid: int
    address: str
    wakeup: str = ""

    @classmethod
    def own(cls, host: str, address: str = "", wakeup: str = "") -> Self:
        """Return the address of this process."""
        try:
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # another operating system
            space = ""
        return cls(host, space, os.getpid(), address, wakeup)

    def to_text(self) -> str:
        """Encode as JSON."""
        return json.dumps(content_of(self))

    @classmethod
    def of_text(cls, text: str, whose: str) -> Self:
        """Decode what `to_text` returned.

        Args:
            text: the JSON.
            whose: names it in errors.

        Raises:
            ProtocolError: it is not an address of a process.
        """
        address = message_of((cls,), table_of(text, (), whose), whose)
        if address.pid <= 0:  # a signal to it would reach many processes
            raise malformed(whose, ValueError(f"{address.pid} is not the id of a process"))
        return address


class HostPeers:
    """The ranks whose processes this one can see: same host, same PID namespace.

    Args:
        rank: the rank of this process.
        addresses: the addresses of all ranks.
        datagrams: this rank's socket for announced ends, whose address is among them.
    """

    def __init__(self, rank: int, addresses: Sequence[ProcessAddress], datagrams: Datagrams) -> None:
        mine = addresses[rank]
        self._rank, self._datagrams = rank, datagrams
        near = {r: one for r, one in enumerate(addresses) if mine.space and one.host == mine.host}
        self._near = {r: one for r, one in near.items() if one.space == mine.space}
        # Two are enough: the second reports the death of the first.
        self._watchers = sorted(self._near)[:2]

    def kill(self, rank: int) -> bool:
        """Kill the process of a rank; return False where this process cannot see it."""
        if rank not in self._near or rank == self._rank:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._near[rank].pid, signal.SIGKILL)
        return True

    def watch(self, report: Callable[[int], object]) -> None:
        """On a watcher rank, start a thread that reports the first rank that dies unannounced."""
        if self._rank not in self._watchers or sys.platform != "linux":
            return
        first = self._watchers[0]
        watched = set(self._near) - {self._rank} if self._rank == first else {first}
        descriptors = {}
        for rank in watched:
            with contextlib.suppress(OSError):  # gone already, or an old kernel
                descriptors[os.pidfd_open(self._near[rank].pid)] = rank
        args = (self._datagrams, descriptors, report)
        thread = threading.Thread(target=_watch_host_peers, args=args, name="nnlo-host-peers", daemon=True)
        thread.start()
        atexit.register(self._end_watch, thread)

    def _end_watch(self, thread: threading.Thread) -> None:
        """End the watch before Python ends, which can crash where a thread still runs then."""
        if thread.is_alive():
            self._datagrams.send(self._near[self._rank].address, _OVER, patience_s=_FAREWELL_S)
            thread.join(_FAREWELL_S)

    def announce_end(self) -> None:
        """Tell the watchers that this rank ends normally or has reported its own failure."""
        for watcher in self._watchers:
            if self._near[watcher].address:
                rank = self._rank.to_bytes(_RANK_BYTES, "big")
                self._datagrams.send(self._near[watcher].address, rank, patience_s=_FAREWELL_S)


def _watch_host_peers(
    datagrams: Datagrams, descriptors: Mapping[int, int], report: Callable[[int], object]
) -> None:
    poll = select.poll()
    ended: set[int] = set()
    for descriptor in (datagrams.fileno(), *descriptors):
        poll.register(descriptor, select.POLLIN)
    gone: list[int] = []
    while not gone and not ended.issuperset(descriptors.values()):
        time.sleep(datagrams.deaf_s)
        ready = [descriptor for descriptor, _ in poll.poll()]
        heard = datagrams.received(_ALL)
        if _OVER in heard:
            break
        ended |= {int.from_bytes(rank, "big") for rank in heard}
        for descriptor in set(ready) & descriptors.keys():
            poll.unregister(descriptor)
            if descriptors[descriptor] not in ended:
                gone.append(descriptors[descriptor])
    for descriptor in descriptors:
        os.close(descriptor)
    if gone:
        report(min(gone))


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

    def all_dead(self) -> list[int]:
        """Return all dead ranks, known or not."""
        failed, own = self._comm.Get_failed(), self._comm.Get_group()
        return [*MPI.Group.Translate_ranks(failed, list(range(failed.Get_size())), own)]

    def new(self, error: MPI.Exception) -> list[int]:
        """Return the dead ranks not known before `error`.

        Raises:
            MPI.Exception: `error` itself, if no rank has died.
        """
        dead = set(self.all_dead())
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


def gathered_from_living(comm: MPI.Intracomm, text: str) -> list[str | None]:
    """Give every living rank the texts of all of them, None for dead ones (collective over the living).

    Deaths meanwhile are survived: the ranks agree whether all have all texts, and begin again if not.
    """
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    while True:
        living = MPI.Intracomm(comm.Shrink())
        living.Set_errhandler(MPI.ERRORS_RETURN)
        texts: list[str] = []
        with contextlib.suppress(MPI.Exception):  # one more has died
            texts = World(living).gather_text(text, patient=True)
        if not texts:
            living.Revoke()  # others may wait in it
        with contextlib.suppress(MPI.Exception):
            if living.Agree(int(bool(texts))):
                group = living.Get_group()
                ranks = MPI.Group.Translate_ranks(group, list(range(len(texts))), comm.Get_group())
                told = dict(zip(ranks, texts, strict=True))
                return [told.get(rank) for rank in range(comm.Get_size())]


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
