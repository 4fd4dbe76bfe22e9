"""Ranks of an MPI communicator: they gather texts, open endpoints, split into parts, and end."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, StartupError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.cluster._aborting import end_after_exit, end_notes_folder, engage, remember_exit
from nnlo_common.cluster._connecting import has_met_others, require_threads, start_limit_s
from nnlo_common.cluster._hosts import gathered_places
from nnlo_common.cluster.transport._backoff import Backoff, Wakeup
from nnlo_common.cluster.transport._datagrams import Datagrams, new_token
from nnlo_common.cluster.transport._deaths import (
    Deaths,
    HostPeers,
    ProcessAddress,
    end_alone,
    gathered_from_living,
    limit_finalize,
)
from nnlo_common.cluster.transport._endpoint import Endpoint, Link, MemberLostError, Numbers
from nnlo_common.cluster.transport._launcher_watch import tell, watch_launcher
from nnlo_common.cluster.transport._mpi import MPIEndpoint
from nnlo_common.cluster.transport._mpi4py import MPI, World, symbol
from nnlo_common.cluster.transport._progress_thread import OverlappedEndpoint
from nnlo_common.protocol import Lost

__all__ = ["MPIGroup", "MPIMail", "MPIWorld", "answers_within", "ask_to_kill"]

# -- mail over MPI -------------------------------------------------------------------------------------

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


# -- calls to the launcher that MPI lacks: kill a rank of another host, see whether the launcher answers --
# mpiexec of Open MPI has a daemon on each host, which the ranks reach by PMIx. A daemon that is cut off
# gets an order when the network is back.

# Of pmix_common.h, the same in PMIx 3 to 6.
_NAMESPACE_BYTES, _KEY_BYTES = 256, 512
_KILL = b"pmix.jctrl.kill"
_BOOL = 1
_VALUE_BYTES = 4096  # more than any value has

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_int, *[ctypes.c_void_p] * 5)


class _Process(ctypes.Structure):
    """The pmix_proc_t of a rank."""

    _fields_ = (("namespace", ctypes.c_char * _NAMESPACE_BYTES), ("rank", ctypes.c_uint32))


class _Published(ctypes.Structure):
    """The pmix_pdata_t of a published value."""

    _fields_ = (
        ("process", _Process),
        ("key", ctypes.c_char * _KEY_BYTES),
        ("value", ctypes.c_char * _VALUE_BYTES),
    )


# Takes the launcher's answer, which is not needed: MPI reports the death.
_ignore = _Callback(lambda *_: None)
# What the launcher's library may still read.
_KEPT: list[Any] = []


def ask_to_kill(rank: int) -> None:
    """Ask the launcher to kill a rank; do nothing where it has no PMIx.

    Args:
        rank: its number among all processes of the job.
    """
    order, load = symbol("PMIx_Job_control_nb"), symbol("PMIx_Info_load")
    namespace = os.environ.get("PMIX_NAMESPACE", "").encode()
    if order is None or load is None or not namespace:
        return
    process, directive = _Process(namespace, rank), ctypes.create_string_buffer(_VALUE_BYTES)
    _KEPT.append((process, directive))
    if load(directive, _KILL, None, ctypes.c_uint16(_BOOL)) == 0:
        one = ctypes.c_size_t(1)
        order(ctypes.byref(process), one, directive, one, _ignore, None)


def answers_within(limit_s: float) -> bool:
    """Return whether the launcher answers in time; True where it has no PMIx.

    Its first process has to answer, which this host may be cut off from.

    Args:
        limit_s: how long to wait.
    """
    look_up = symbol("PMIx_Lookup")
    if look_up is None or "PMIX_NAMESPACE" not in os.environ:
        return True
    wanted = _Published(key=b"nnlo.nothing")  # nobody publishes it, which the launcher says at once
    _KEPT.append(wanted)
    one, none = ctypes.c_size_t(1), ctypes.c_size_t(0)
    asking = threading.Thread(target=look_up, args=(ctypes.byref(wanted), one, None, none), daemon=True)
    asking.start()
    asking.join(limit_s)
    return not asking.is_alive()


# -- group of MPI ranks, on a communicator of its own --------------------------------------------------

# One call for a long vector takes three to four times as long as calls for pieces that fit the cache.
_PIECE = 1 << 18


class MPIGroup:
    """The ranks of one logical worker.

    Args:
        comm: their communicator, lead first; freed by `close`.
        ranks: their numbers in the training.
        naps: the host has fewer cores than ranks, so a waiting rank must leave its core to others.
        survives_loss: other ranks survive the death of one of this group.
        lasting: so do those of this group.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        *,
        naps: bool,
        survives_loss: bool,
        lasting: bool = False,
    ) -> None:
        self._comm, self._naps = comm, naps
        self.index, self.ranks = comm.Get_rank(), tuple(ranks)
        self._survives_loss, self._lasting = survives_loss, lasting and survives_loss
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
        for start in range(0, vector.size, _PIECE):
            piece = vector[start : start + _PIECE]
            self._together(self._comm.Allreduce, self._comm.Iallreduce, MPI.IN_PLACE, piece)

    def deal(self, rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Give each rank its row; return the rows that all have for this one, by rank."""
        found = np.empty_like(rows)
        self._together(self._comm.Alltoall, self._comm.Ialltoall, rows, found)
        return found

    def show(self, row: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16]:
        """Return the rows of all ranks, equally long."""
        found = np.empty((len(self.ranks), row.size), row.dtype)
        self._together(self._comm.Allgather, self._comm.Iallgather, row, found)
        return found

    def broadcast(self, data: npt.NDArray[np.uint8]) -> _MPIBroadcast:
        """Begin to copy the lead's bytes into those of the others."""
        with self._leaving_together():
            return _MPIBroadcast(self, self._comm.Ibcast([data, MPI.BYTE]))

    def barrier(self) -> None:
        """Return once all ranks have called it."""
        self._together(self._comm.Barrier, self._comm.Ibarrier)

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

    def without_dead(self) -> MPIGroup:
        """Return the group of the ranks that live (collective over them)."""
        with contextlib.suppress(MPI.Exception):
            self._comm.Revoke()  # frees the others
        living = MPI.Intracomm(self._comm.Shrink())
        everyone, left = self._comm.Get_group(), living.Get_group()
        places = MPI.Group.Translate_ranks(left, list(range(left.Get_size())), everyone)
        ranks = [self.ranks[index] for index in places]
        return MPIGroup(living, ranks, naps=self._naps, survives_loss=True, lasting=True)

    def close(self) -> None:
        """Free the communicator."""
        with contextlib.suppress(*[MPI.Exception] if self._survives_loss else []):
            self._comm.Free()

    def _together(
        self, wait: Callable[..., object], begin: Callable[..., MPI.Request], *arguments: Any
    ) -> None:
        """Make a collective call: in one go, or so that a waiting rank leaves its core to others."""
        with self._leaving_together():
            if self._naps:
                _finish(begin(*arguments))
            else:
                wait(*arguments)

    @contextlib.contextmanager
    def _leaving_together(self) -> Iterator[None]:
        """End this rank if another of its group has died, unless the group lasts: it dies as one worker."""
        try:
            yield
        except MPI.Exception as error:
            if not self._survives_loss:
                raise
            self._note_death(error)

    def _note_death(self, error: MPI.Exception) -> NoReturn:
        try:
            dead = [self.ranks[index] for index in Deaths(self._comm).new(error)]
        except MPI.Exception:  # another rank of the group has noticed the death first, and revoked
            dead = []
        if self._lasting:
            raise MemberLostError(dead[0] if dead else -1, "has died in a sum of its group") from None
        with contextlib.suppress(MPI.Exception):
            self._comm.Revoke()  # frees the others
        self.end(dead[0] if dead else -1)

    def end(self, dead: int) -> NoReturn:
        """End this rank, because another of its group has died."""
        who = f"rank {dead}" if dead >= 0 else "a rank"
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

    def gather_from_living(self, text: str) -> list[str | None]:
        """Give every rank the texts of all ranks that live, None for the others (collective over them)."""
        if not self.survives_loss:
            return [*self.gather_text(text, patient=True)]
        return gathered_from_living(self.facts.comm, text)

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
        naps = gathered_places(self.gather_text)[self.rank].crowded
        endpoint = MPIEndpoint(comm, links, wakeup, wakeups, naps=naps)
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
        cannot do while that host is cut off. Where it does not answer, this rank's host may be the one that
        is cut off, and its order would come when the others have long continued without it.
        """
        if not self.survives_loss or self._host_peers is None:
            return False
        if self._host_peers.kill(rank):
            return True
        if not answers_within(_LAUNCHER_ANSWERS_S):
            return False
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

    def group(self, ranks: Sequence[int], *, naps: bool, lasting: bool = False) -> MPIGroup:
        """Return the group of these ranks, this one among them, lead first (collective over them)."""
        lasts = self.survives_loss
        return MPIGroup(self._comm_of(ranks), ranks, naps=naps, survives_loss=lasts, lasting=lasting)

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
        if self.survives_loss and self._end_others():
            sys.stdout.flush()
            os._exit(code)
        self.facts.abort(code)

    def _end_others(self) -> bool:
        """End the other ranks if one has died, and return whether one has.

        After a death MPI_Abort of Open MPI 5 may end only the rank that calls it, or with exit status 0.
        """
        dead = set[int]()
        with contextlib.suppress(MPI.Exception):
            dead = set(Deaths(self.facts.comm).all_dead())
        for rank in set(range(self.size)) - dead - {self.rank} if dead else ():
            if self._host_peers is None or not self._host_peers.kill(rank):
                ask_to_kill(self.facts.world_rank(rank))
        return bool(dead)

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
        """Whether to start a progress thread: for a worker that computes while messages move."""
        if any(link.serving for link in links) or all(link.depth == 1 and not link.ahead for link in links):
            return False
        try:
            # Our own calls share a lock, but the program may call MPI too.
            require_threads(self.facts, "MULTIPLE", why="exchanging while computing")
        except StartupError as error:
            _LOG.warning("messages will move only between steps: %s", error)
            return False
        return True
