"""The ranks of an MPI communicator: how they meet, open doors to each other, and end."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NoReturn

from nnlo_common.base._errors import StartupError
from nnlo_common.cluster._aborting import engage
from nnlo_common.cluster._connecting import require_threads
from nnlo_common.cluster.transport._deaths import Deaths, limit_farewell
from nnlo_common.cluster.transport._doorbell import Doorbell
from nnlo_common.cluster.transport._endpoint import Endpoint, Link
from nnlo_common.cluster.transport._mpi import MPIEndpoint
from nnlo_common.cluster.transport._mpi_mail import MPIMail
from nnlo_common.cluster.transport._neighbours import Card, Neighbours
from nnlo_common.cluster.transport._progress import OverlappedEndpoint
from nnlo_common.cluster.transport._world import MPI, World

__all__ = ["MPIWorld"]

_LOG = logging.getLogger(__name__)

# So long a launcher may take to end a job in which a rank has died.
_LAUNCHERS_TURN_S = 5.0
# Ranks that meet take milliseconds, or as long as a checkpoint's last bytes; one that is dead never comes.
_DEAD_S = 60.0


class _Farewell:
    prepared: ClassVar[bool] = False


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
    recalled = False

    def __init__(self, world: World, *, watches: bool = True) -> None:
        self.facts, self._watches = world, watches
        self.rank, self.size, self.host = world.rank, world.size, world.host
        self.survives_loss = world.survives_loss()
        self._neighbours: Neighbours | None = None
        if self.survives_loss and watches and not _Farewell.prepared:
            # Before anything that is to be done at the end of a program, so after it; all ranks meet once.
            _Farewell.prepared = True
            atexit.register(limit_farewell, world.comm)

    def gather_text(self, text: str) -> list[str]:
        """Give every rank the texts of all ranks (collective)."""
        with self._all_needed():
            return self.facts.gather_text(text)

    def open(self, links: Sequence[Link]) -> Endpoint:
        """Open this rank's door on a communicator of its own (collective)."""
        bell = Doorbell()
        cards = [Card.of_text(text) for text in self.gather_text(Card.own(self.host, bell.address).to_text())]
        bells = {rank: card.bell for rank, card in enumerate(cards) if card.bell and card.host == self.host}
        self._neighbours = Neighbours(self.rank, cards)
        if self._watches and not self.survives_loss:
            self._neighbours.watch(self._tell_death)
        with self._all_needed():
            comm = self.facts.comm.Dup()
        door = MPIEndpoint(comm, links, bell, bells)
        return OverlappedEndpoint(door) if not door.patient and self._overlaps(links) else door

    def engage(self) -> Callable[[], None]:
        """Make this rank's failure or early end everybody's, until the returned function is called."""
        disengage = engage(self)

        def leave() -> None:
            disengage()
            self._farewell()

        return leave

    def drop(self, rank: int) -> bool:
        """End a rank of this host, where its death is survived."""
        return self.survives_loss and self._neighbours is not None and self._neighbours.kill(rank)

    def at_end(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call this when the program ends; what fails then is reported like any other failure."""

        def last() -> None:
            try:
                call()
            except Exception as error:  # atexit would only print it, and the other ranks would wait
                sys.excepthook(type(error), error, error.__traceback__)

        atexit.register(last)
        return lambda: atexit.unregister(last)

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Do nothing: outside of a search nobody waits outside of a training."""

    def mail(self) -> MPIMail:
        """Open this rank's letter box (collective)."""
        return MPIMail(self.facts.comm.Dup(), survives_loss=self.survives_loss)

    def part(self, ranks: Sequence[int]) -> MPIWorld:
        """Return the world of these ranks, of which this one is (collective over them).

        It does not watch for deaths: who leaves a training there goes on to the next one.
        """
        everyone = self.facts.comm.Get_group()
        group = everyone.Incl(ranks)
        with self._all_needed(), self._released_by_end():
            comm = self.facts.comm.Create_group(group)
        group.Free()
        everyone.Free()
        return MPIWorld(World(comm), watches=False)

    def give_up(self) -> None:
        """Let nobody wait any more where all of these ranks are needed, as one of them is dead."""
        with contextlib.suppress(MPI.Exception):
            self.facts.comm.Revoke()

    def close(self) -> None:
        """Free the communicator of a part."""
        with contextlib.suppress(*[MPI.Exception] if self.survives_loss else []):  # given up
            self.facts.comm.Free()

    def abort(self, code: int) -> NoReturn:
        """End all ranks now."""
        self._farewell()
        self.facts.abort(code)

    def _farewell(self) -> None:
        if self._neighbours is not None:
            self._neighbours.farewell()

    def _tell_death(self, rank: int) -> None:
        """Say who has died, before the launcher ends this rank too; a launcher that does not is helped."""
        os.write(
            2,
            f"nnlo: rank {rank} of {self.size} on {self.host} has died (killed, crashed or out of memory), "
            "so the job ends. The same command goes on from the newest checkpoint, if there is one. "
            "Under Open MPI, mpiexec --with-ft ulfm lets the others go on without a dead worker\n".encode(),
        )
        time.sleep(_LAUNCHERS_TURN_S)
        self.facts.abort(1)

    @contextlib.contextmanager
    def _all_needed(self) -> Iterator[None]:
        """Say who has died, where MPI cannot go on without that rank."""
        try:
            yield
        except MPI.Exception as error:
            if not self.survives_loss:
                raise
            raise Deaths(self.facts.comm).refuse(error, "taking up their parts") from None

    @contextlib.contextmanager
    def _released_by_end(self) -> Iterator[None]:
        """End this rank where deaths are survived, should it wait in MPI for one that is dead."""
        if not self.survives_loss:
            yield
            return

        def end() -> None:
            who = f"nnlo: rank {self.rank} of {self.size} on {self.host}"
            os.write(2, f"{who} ends, as a rank has died that was to train with it\n".encode())
            os._exit(1)

        timer = threading.Timer(_DEAD_S, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _overlaps(self, links: Sequence[Link]) -> bool:
        """Whether a thread is to look after a door: that of a worker that need not wait for each reply."""
        if any(link.serving for link in links) or all(link.depth == 1 for link in links):
            return False
        try:
            # One lock keeps our own calls apart, but the program may make calls of its own.
            require_threads(self.facts, "MULTIPLE", why="exchanging while computing")
        except StartupError as error:
            _LOG.warning("messages will move only between steps: %s", error)
            return False
        return True
