"""Ranks of an MPI communicator: they gather texts, open endpoints, split into parts, and end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NoReturn

from nnlo_common.base._errors import StartupError
from nnlo_common.cluster._aborting import end_after_exit, end_notes_folder, engage, remember_exit
from nnlo_common.cluster._connecting import has_met_others, require_threads, start_limit_s
from nnlo_common.cluster.transport._datagrams import Datagrams, new_token
from nnlo_common.cluster.transport._deaths import Deaths, end_alone, limit_finalize
from nnlo_common.cluster.transport._endpoint import Endpoint, Link
from nnlo_common.cluster.transport._host_peers import HostPeers, ProcessAddress
from nnlo_common.cluster.transport._launcher_calls import answers_within, ask_to_kill
from nnlo_common.cluster.transport._launcher_watch import tell, watch_launcher
from nnlo_common.cluster.transport._mpi import MPIEndpoint
from nnlo_common.cluster.transport._mpi4py import MPI, World
from nnlo_common.cluster.transport._mpi_group import MPIGroup
from nnlo_common.cluster.transport._mpi_mail import MPIMail
from nnlo_common.cluster.transport._progress_thread import OverlappedEndpoint
from nnlo_common.cluster.transport._wakeup import Wakeup

__all__ = ["MPIWorld"]

_LOG = logging.getLogger(__name__)

# How long a launcher may take to end a job in which a rank has died.
_LAUNCHER_GRACE_S = 5.0
# How long it may take to say that it has nothing; a rank that ends has five seconds for all.
_LAUNCHER_ANSWERS_S = 2.0
# Living ranks meet within milliseconds, or within the end of a checkpoint's write; a dead one never comes.
_MEETING_LIMIT_S = 60.0


class _LauncherState:
    watched: ClassVar[bool] = False
    gone: ClassVar[bool] = False


class _FinalizeLimit:
    prepared: ClassVar[bool] = False
    has_dropped: ClassVar[bool] = False


class MPIWorld:
    """The ranks of one communicator.

    Args:
        world: the facts about it.

    Example:
        >>> world = MPIWorld(World())
        >>> world.gather_text("hello")
        ['hello']
    """

    own_process = True
    of_trial = recalled = False

    def __init__(self, world: World, *, watches: bool = True) -> None:
        has_met_others()
        self.facts, self._watches = world, watches
        self.rank, self.size, self.host = world.rank, world.size, world.host
        self.survives_loss = world.survives_loss()
        self._host_peers: HostPeers | None = None
        self._cast_off = False
        if self.survives_loss and watches and not _FinalizeLimit.prepared:
            # Registered first, so that atexit runs it last.
            _FinalizeLimit.prepared = True
            atexit.register(lambda: limit_finalize(world.comm, meet=not _FinalizeLimit.has_dropped))

    def gather_text(self, text: str, *, patient: bool = False) -> list[str]:
        """Give every rank the texts of all ranks (collective).

        Args:
            text: this rank's text.
            patient: another rank may come much later, e.g. one that writes files: never report it as missing.
        """
        begun = self._host_peers is not None  # later, ranks may wait for one that saves or validates
        limit_s = math.inf if begun else start_limit_s(os.environ)
        with self._all_needed():
            return self.facts.gather_text(text, limit_s, patient=patient)

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open an endpoint on a communicator of its own (collective)."""
        token = bytes.fromhex(self.gather_text(new_token().hex())[0])
        wakeup, ends = Wakeup(token), Datagrams(token)
        mine = ProcessAddress.own(self.host, ends.address, wakeup.address)
        peers = [
            ProcessAddress.of_text(text, f"the address of rank {rank}")
            for rank, text in enumerate(self.gather_text(mine.to_text()))
        ]
        wakeups = {
            rank: peer.wakeup for rank, peer in enumerate(peers) if peer.wakeup and peer.host == mine.host
        }
        self._host_peers = HostPeers(self.rank, peers, ends)
        if self._watches and not _LauncherState.watched:
            _LauncherState.watched = watch_launcher(self._report_launcher)
        if self._watches and not self.survives_loss:
            self._host_peers.watch(self._report_death)
        with self._all_needed():
            comm = self.facts.comm.Dup()
        endpoint = MPIEndpoint(comm, links, wakeup, wakeups)
        overlapped = not endpoint.reads_late and self._overlaps(links)
        return OverlappedEndpoint(endpoint) if overlapped else endpoint

    def engage(self) -> Callable[[], None]:
        """Abort the job if this rank fails or exits before the returned function is called."""
        disengage = engage(self)

        def leave() -> None:
            disengage()
            self._announce_end()

        return leave

    def drop(self, rank: int) -> bool:
        """Take a rank out of the job if the rest survive it; return whether they do.

        This rank kills one of its own host; the launcher is asked to kill one of another host, which it
        cannot do while that host is cut off.
        """
        if not self.survives_loss or self._host_peers is None:
            return False
        if not self._host_peers.kill(rank):
            ask_to_kill(self.facts.world_rank(rank))
            _FinalizeLimit.has_dropped = True
        return True

    def cast_off(self) -> None:
        """Note that the others have dropped this rank, so that its end does not end the job."""
        self._cast_off = True

    def at_end(
        self, call: Callable[[], object], in_middle: Callable[[], bool] = lambda: False
    ) -> Callable[[], None]:
        """Register `call` for the end of the program; its failure is reported like any other.

        Args:
            call: what to do.
            in_middle: whether an epoch is under way; if the program then calls `sys.exit` with a status other
                than 0, the job ends with this status instead.
        """
        exit_status, forget_exits = remember_exit(in_middle)

        def last() -> None:
            status = exit_status()
            if status is not None:
                end_after_exit(self, status)
            try:
                call()
            except Exception as error:  # atexit only prints it, and the other ranks would wait
                sys.excepthook(type(error), error, error.__traceback__)

        def forget() -> None:
            forget_exits()
            atexit.unregister(last)

        atexit.register(last)
        return forget

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Do nothing: without a search no rank waits outside of a training."""

    def mail(self) -> MPIMail:
        """Open this rank's mailbox (collective)."""
        return MPIMail(self.facts.comm.Dup(), survives_loss=self.survives_loss)

    def part(self, ranks: Sequence[int]) -> MPIWorld:
        """Return the world of these ranks, this one among them (collective over them).

        It does not watch for deaths: a rank that leaves one training there starts the next.
        """
        return MPIWorld(World(self._comm_of(ranks)), watches=False)

    def group(self, ranks: Sequence[int], *, naps: bool) -> MPIGroup:
        """Return the group of these ranks, this one among them, lead first (collective over them)."""
        return MPIGroup(self._comm_of(ranks), ranks, naps=naps, survives_loss=self.survives_loss)

    def revoke(self) -> None:
        """End every collective wait of these ranks with an error, because one of them is dead."""
        with contextlib.suppress(MPI.Exception):
            self.facts.comm.Revoke()

    def close(self) -> None:
        """Free the communicator of a part."""
        with contextlib.suppress(*[MPI.Exception] if self.survives_loss else []):  # revoked
            self.facts.comm.Free()

    def abort(self, code: int) -> NoReturn:
        """End all ranks now; a rank that was dropped, or is cut off from the launcher, ends alone.

        The order of a rank that is cut off would come late, when the others have long continued without it.
        """
        self._announce_end()
        if self._cast_off:
            end_alone()
        if self.survives_loss and not answers_within(_LAUNCHER_ANSWERS_S):
            who = f"nnlo: rank {self.rank} of {self.size} on {self.host}"
            os.write(2, f"{who} ends alone, because the launcher does not answer\n".encode())
            end_alone()
        self.facts.abort(code)

    def _comm_of(self, ranks: Sequence[int]) -> MPI.Intracomm:
        everyone = self.facts.comm.Get_group()
        group = everyone.Incl(ranks)
        with self._all_needed(), self._released_by_end():
            comm = self.facts.comm.Create_group(group)
        group.Free()
        everyone.Free()
        return comm

    def _announce_end(self) -> None:
        if self._host_peers is not None:
            self._host_peers.announce_end()

    def _report_death(self, rank: int) -> None:
        """Report the dead rank before the launcher ends this one; abort if the launcher does not."""
        if _LauncherState.gone:
            return  # without it all ranks die
        os.write(
            2,
            f"nnlo: rank {rank} of {self.size} on {self.host} has died (killed, crashed or out of memory), "
            "so the job ends. Rerun the same command to resume from the newest checkpoint, if there is one. "
            "Under Open MPI, mpiexec --with-ft ulfm lets a job survive a dead worker\n".encode(),
        )
        time.sleep(_LAUNCHER_GRACE_S)
        self.facts.abort(1)

    def _report_launcher(self) -> None:
        """Say that the launcher has gone; this process ends then."""
        _LauncherState.gone = True
        line = (
            f"nnlo: rank {self.rank} of {self.size} on {self.host} ends, because the launcher (mpiexec) has "
            "gone: somebody or something has killed it. Rerun the same command to resume from the newest "
            "checkpoint, if there is one\n"
        )
        tell(line, None if self.rank else end_notes_folder())

    @contextlib.contextmanager
    def _all_needed(self) -> Iterator[None]:
        """Raise `PeerLostError` where a collective call fails because a rank has died."""
        try:
            yield
        except MPI.Exception as error:
            if not self.survives_loss:
                raise
            raise Deaths(self.facts.comm).lost_error(error, "taking up their parts") from None

    @contextlib.contextmanager
    def _released_by_end(self) -> Iterator[None]:
        """End this rank if it waits too long in MPI for one that may be dead."""
        if not self.survives_loss:
            yield
            return

        def end() -> None:
            who = f"nnlo: rank {self.rank} of {self.size} on {self.host}"
            os.write(2, f"{who} ends, because a rank that was to train with it has died\n".encode())
            end_alone()

        timer = threading.Timer(_MEETING_LIMIT_S, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _overlaps(self, links: Sequence[Link]) -> bool:
        """Whether to start a progress thread: for a worker that need not wait for each reply."""
        if any(link.serving for link in links) or all(link.depth == 1 for link in links):
            return False
        try:
            # Our own calls share a lock, but the program may call MPI too.
            require_threads(self.facts, "MULTIPLE", why="exchanging while computing")
        except StartupError as error:
            _LOG.warning("messages will move only between steps: %s", error)
            return False
        return True
