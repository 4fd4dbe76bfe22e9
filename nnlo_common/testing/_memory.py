"""Threads as ranks: whole programs in one process, with failures at points you name."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._flat_vector import Frame
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.protocol import Event, Lost, Message, Received, decode, encode
from nnlo_common.testing._points import InjectedFault, Points

__all__ = ["InjectedFault", "MemoryCluster", "MemoryWorld"]

_NOBODY = -1  # no rank's number: for what is told to all ranks


@dataclass(frozen=True, slots=True)
class _Letter:
    """Event: mail from another rank."""

    rank: int
    text: str


@dataclass(frozen=True, slots=True)
class _Broken:
    """Event: another rank ended with an error, so the whole run ends."""

    rank: int
    error: BaseException


class MemoryCluster:
    """Runs one program on several ranks, each in a thread of this process.

    Every message a rank sends or receives passes a point named after it, e.g. "send EXCHANGE" or
    "receive CENTER"; programs can name points of their own with `MemoryWorld.reach`. A point that `fail` or
    `hold` asked for has to be reached, so that a misspelt one does not let a test pass.

    Args:
        size: how many ranks, at least 1.

    Example:
        >>> with MemoryCluster(2) as cluster:
        ...     cluster.run(lambda world: world.gather_text(f"hello from {world.rank}")[0])
        ['hello from 0', 'hello from 0']
    """

    def __init__(self, size: int) -> None:
        self.size = whole_number("size", size, 1)
        self.points = Points(self.size)
        self._changed = threading.Condition()
        self._forget()

    def _forget(self) -> None:
        """Begin anew; what was asked of `fail` and `hold` stays."""
        self._texts: list[list[str]] = [[] for _ in range(self.size)]
        self._mail: dict[tuple[int, Hashable], queue.SimpleQueue[Event | _Letter | _Broken]] = {}
        self._ended: dict[int, Lost | _Broken | None] = {}  # by rank; None: in good order
        self.points.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.points.open_gates()

    def fail(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> None:
        """Let `rank` die when it reaches `point` for the given time; the others then see it as lost.

        Args:
            rank: who dies.
            point: where.
            occurrence: 1: when the point is reached for the first time.
            may_miss: a run in which the point is not reached is all right; else `run` raises an error.
        """
        self.points.fail(rank, point, occurrence, may_miss=may_miss)

    def hold(self, rank: int, point: str, occurrence: int = 1, *, may_miss: bool = False) -> threading.Event:
        """Let `rank` wait at `point` until the returned event is set, or another rank fails.

        The arguments are those of `fail`.
        """
        return self.points.hold(rank, point, occurrence, may_miss=may_miss)

    def run(self, program: Callable[[MemoryWorld], Any], timeout_s: float = 60.0) -> list[Any]:
        """Run `program` on every rank and return what each returned (an `InjectedFault` if it died).

        Raises:
            ConfigurationError: a point of `fail` or `hold` was missed; the message names those reached.
                A run that fails otherwise has this as a note.
            PeerLostError: ranks have not ended in time; the message names them and where they were last.
            BaseException: what the first rank that failed raised, with a note that names the rank.
        """
        self._forget()
        results: list[Any] = [None] * self.size
        worlds = [MemoryWorld(self, rank) for rank in range(self.size)]
        threads = [
            threading.Thread(target=self._run_rank, args=(program, world, results), daemon=True)
            for world in worlds
        ]
        for thread in threads:
            thread.start()
        self._join(threads, worlds, timeout_s)
        failures = [result for result in results if isinstance(result, BaseException)]
        errors = [failure for failure in failures if not isinstance(failure, InjectedFault)]
        missed = self.points.missed()
        if errors:
            raise _noted(min(errors, key=lambda error: isinstance(error, PeerLostError)), missed)
        if missed:
            raise ConfigurationError(missed)
        return results

    def _join(self, threads: list[threading.Thread], worlds: list[MemoryWorld], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        late = [world for world, thread in zip(worlds, threads, strict=True) if thread.is_alive()]
        if not late:
            return
        where = ", ".join(f"rank {world.rank} last at {world.last!r}" for world in late)
        error = PeerLostError(late[0].rank, f"has not ended after {timeout_s} s: {where}")
        broken = next((event for event in self._ended.values() if isinstance(event, _Broken)), None)
        self._end(_NOBODY, _Broken(late[0].rank, error))  # whoever waits need not wait any longer
        for thread in threads:
            thread.join(1.0)
        raise _noted(error, self.points.missed()) from (None if broken is None else broken.error)

    def _run_rank(
        self, program: Callable[[MemoryWorld], Any], world: MemoryWorld, results: list[Any]
    ) -> None:
        end: Lost | _Broken | None = None
        try:
            results[world.rank] = program(world)
        except InjectedFault as fault:
            results[world.rank] = fault
            end = Lost(world.rank)
        except BaseException as error:  # it is raised again, by run
            error.add_note(f"on rank {world.rank} of {self.size}, last at {world.last!r}")
            results[world.rank] = error
            end = _Broken(world.rank, error)
        self._end(world.rank, end)

    def _end(self, rank: int, event: Lost | _Broken | None) -> None:
        with self._changed:
            self._ended[rank] = event
            for (other, _), mail in self._mail.items():
                if other != rank and event is not None:
                    mail.put(event)
            self._changed.notify_all()
        if isinstance(event, _Broken):
            self.points.open_gates()

    def mail(self, rank: int, door: Hashable) -> queue.SimpleQueue[Event | _Letter | _Broken]:
        """Return the letter box behind the given door of a rank; it begins with who has died before."""
        with self._changed:
            if (rank, door) not in self._mail:
                self._mail[rank, door] = queue.SimpleQueue()
                for other, event in self._ended.items():
                    if other != rank and event is not None:
                        self._mail[rank, door].put(event)
            return self._mail[rank, door]

    def gather(self, rank: int, text: str) -> list[str]:
        """Collect a text from every rank."""
        with self._changed:
            self._texts[rank].append(text)
            self._changed.notify_all()
            turn = len(self._texts[rank])
            while behind := [other for other, texts in enumerate(self._texts) if len(texts) < turn]:
                for other, event in self._ended.items():
                    if other in behind or isinstance(event, _Broken):
                        raise PeerLostError(other, f"ended while rank {rank} waited in gather_text")
                self._changed.wait()
            return [texts[turn - 1] for texts in self._texts]


def _noted(error: BaseException, note: str) -> BaseException:
    if note:
        error.add_note(note)
    return error


class MemoryWorld:
    """What a program on one rank of a `MemoryCluster` sees; stands in for the ranks of MPI.

    Attributes:
        last: the point this rank reached last.

    Example:
        >>> def program(world):
        ...     world.reach("half way")
        ...     return world.rank, world.last
        >>> with MemoryCluster(2) as cluster:
        ...     cluster.fail(1, "half way")
        ...     cluster.run(program)
        [(0, 'half way'), InjectedFault("rank 1 dies at 'half way', occurrence 1")]
    """

    # Settings of the process, such as the number of compute threads, are not a rank's to change.
    own_process = False
    survives_loss = True
    recalled = False

    def __init__(self, cluster: MemoryCluster, rank: int) -> None:
        self._cluster = cluster
        self.rank, self.size, self.host = rank, cluster.size, "memory"
        self.last = "start"
        self._doors = 0
        self._engaged = False

    def reach(self, point: str) -> None:
        """Name a point of the program; `MemoryCluster.fail` and `hold` act on it."""
        self.last = point
        self._cluster.points.reach(self.rank, point)

    def gather_text(self, text: str) -> list[str]:
        """Give every rank the texts of all ranks (collective)."""
        self.reach("gather")
        return self._cluster.gather(self.rank, text)

    def open(self, links: Sequence[Link]) -> MemoryEndpoint:
        """Open this rank's next door (collective)."""
        self._doors += 1
        return MemoryEndpoint(self._cluster, self, links, self._doors)

    def engage(self) -> Callable[[], None]:
        """Refuse a second training at once; a failure ends the run by the cluster's own means."""
        if self._engaged:
            raise ConfigurationError(f"rank {self.rank}: a training is open already; finish it first")
        self._engaged = True
        return self._disengage

    def _disengage(self) -> None:
        self._engaged = False

    def at_end(self, call: Callable[[], object]) -> Callable[[], None]:  # noqa: ARG002
        """Do nothing: the end of a program in a thread is not the end of the process."""
        return lambda: None

    def at_meeting(self, call: Callable[[], object]) -> None:
        """Do nothing: outside of a search nobody waits outside of a training."""

    def mail(self) -> MemoryMail:
        """Open this rank's letter box (collective)."""
        self._doors += 1
        return MemoryMail(self._cluster, self, self._doors)

    def part(self, ranks: Sequence[int]) -> MemoryPart:
        """Return the world of these ranks, of which this one is."""
        return MemoryPart(self._cluster, self, ranks)

    def drop(self, rank: int) -> bool:  # noqa: ARG002
        """Refuse: nobody can end a thread."""
        return False

    def abort(self, code: int) -> NoReturn:
        """End this rank, and with it the run."""
        raise SystemExit(code)


class MemoryPart(MemoryWorld):
    """Some ranks of a cluster, numbered anew; only doors are opened here."""

    def __init__(self, cluster: MemoryCluster, world: MemoryWorld, ranks: Sequence[int]) -> None:
        super().__init__(cluster, world.rank)
        self.rank, self.size = ranks.index(world.rank), len(ranks)
        self._world, self._ranks = world, tuple(ranks)

    def reach(self, point: str) -> None:
        """Name a point of the program."""
        self._world.reach(point)

    def open(self, links: Sequence[Link]) -> MemoryEndpoint:
        """Open this rank's next door (collective)."""
        self._doors += 1
        door = (self._ranks, self._doors)
        return MemoryEndpoint(self._cluster, self._world, links, door, self._ranks)

    def revoke(self) -> None:
        """Nobody waits here: a door opens for each rank by itself."""

    def close(self) -> None:
        """Nothing was taken."""


class MemoryMail:
    """One rank's letter box."""

    def __init__(self, cluster: MemoryCluster, world: MemoryWorld, door: Hashable) -> None:
        self._cluster, self._rank, self._door = cluster, world.rank, door
        self._box = cluster.mail(world.rank, door)
        self._broken: _Broken | None = None

    def send(self, peer: int, text: str) -> None:
        """Put a text into the peer's letter box."""
        self._cluster.mail(peer, self._door).put(_Letter(self._rank, text))

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next letter with its sender, or who has died; None if none came in time."""
        try:
            event = self._broken or self._box.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _Letter):
            return event.rank, event.text
        if isinstance(event, Lost):
            return event
        assert isinstance(event, _Broken)
        self._broken = event  # for whoever asks next, too
        raise PeerLostError(event.rank, f"failed: {event.error!r}") from event.error

    def close(self) -> None:
        """Nothing is under way that would have to leave."""


class MemoryEndpoint:
    """One rank's door; a message is copied into memory of its own when it is sent."""

    def __init__(
        self,
        cluster: MemoryCluster,
        world: MemoryWorld,
        links: Sequence[Link],
        door: Hashable,
        ranks: Sequence[int] | None = None,
    ) -> None:
        self._cluster, self._world, self._door = cluster, world, door
        self._ranks = range(cluster.size) if ranks is None else ranks  # by the numbers that links have
        self._sizes = {(link.peer, link.shard): link.size for link in links}
        self._mail = cluster.mail(world.rank, door)

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:  # noqa: ARG002
        """Put a copy of the message into the peer's letter box."""
        self._world.reach(f"send {message.kind.name}")
        letter = Frame(self._sizes[peer, message.shard])
        if message.vector is not None:
            np.copyto(letter.vector[: message.vector.size], message.vector)
        received = Received(decode(letter, encode(message, letter)), letter)
        self._cluster.mail(self._ranks[peer], self._door).put(received)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if none came within `timeout_s`."""
        try:
            event = self._mail.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _Broken):
            raise PeerLostError(event.rank, f"failed: {event.error!r}") from event.error
        assert not isinstance(event, _Letter)  # those have a door of their own
        if isinstance(event, Lost):
            # Everybody's death is told at every door.
            near = event.rank in self._ranks
            return Lost(self._ranks.index(event.rank)) if near else self.receive(timeout_s)
        if isinstance(event, Received):
            self._world.reach(f"receive {event.message.kind.name}")
        return event

    def release(self, peer: int, frame: Frame) -> None:
        """Forget the letter."""

    def flush(self) -> None:
        """Everything has left when it is sent."""

    def close(self) -> None:
        """Nothing is under way that would have to leave."""
