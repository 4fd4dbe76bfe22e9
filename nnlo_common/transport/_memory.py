"""Threads as ranks: whole programs in one process, with failures at points you name."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import numpy as np

from nnlo_common._errors import NNLOError, PeerLostError
from nnlo_common._flat import FlatVector, Frame
from nnlo_common.protocol import Event, Lost, Message, Received, decode, encode
from nnlo_common.transport._endpoint import Link

__all__ = ["InjectedFault", "MemoryCluster", "MemoryWorld"]


class InjectedFault(NNLOError):
    """The death that `MemoryCluster.fail` asked for; the other ranks see the rank as lost."""


@dataclass(frozen=True, slots=True)
class _Broken:
    """Event: another rank ended with an error, so the whole run ends."""

    rank: int
    error: BaseException


class MemoryCluster:
    """Runs one program on several ranks, each in a thread of this process.

    Every message a rank sends or receives passes a point named after it, e.g. "send EXCHANGE" or
    "receive CENTER"; programs can name points of their own with `MemoryWorld.reach`.

    Args:
        size: how many ranks.

    Example:
        >>> with MemoryCluster(2) as cluster:
        ...     cluster.run(lambda world: world.gather_text(f"hello from {world.rank}")[0])
        ['hello from 0', 'hello from 0']
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(size)
        self._texts: list[str] = [""] * size
        self._mail: dict[tuple[int, int], queue.SimpleQueue[Event | _Broken]] = {}
        self._faults: dict[tuple[int, str], int] = {}
        self._gates: dict[tuple[int, str], tuple[int, threading.Event]] = {}
        self._reached: Counter[tuple[int, str]] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _count, gate in self._gates.values():
            gate.set()

    def fail(self, rank: int, point: str, occurrence: int = 1) -> None:
        """Let `rank` die when it reaches `point` for the given time; the others then see it as lost."""
        self._faults[rank, point] = occurrence

    def hold(self, rank: int, point: str, occurrence: int = 1) -> threading.Event:
        """Let `rank` wait at `point` until the returned event is set."""
        gate = threading.Event()
        self._gates[rank, point] = (occurrence, gate)
        return gate

    def run(self, program: Callable[[MemoryWorld], Any], timeout_s: float = 60.0) -> list[Any]:
        """Run `program` on every rank and return what each returned (an `InjectedFault` if it died).

        Raises:
            PeerLostError: a rank has not ended in time; the message names where it was last.
            BaseException: what the first rank that failed raised, with a note that names the rank.
        """
        results: list[Any] = [None] * self.size
        worlds = [MemoryWorld(self, rank) for rank in range(self.size)]
        threads = [
            threading.Thread(target=self._run_rank, args=(program, world, results), daemon=True)
            for world in worlds
        ]
        for thread in threads:
            thread.start()
        for world, thread in zip(worlds, threads, strict=True):
            thread.join(timeout_s)
            if thread.is_alive():
                raise PeerLostError(world.rank, f"has not ended after {timeout_s} s; last at {world.last!r}")
        failures = [error for error in results if isinstance(error, BaseException)]
        for error in sorted(failures, key=lambda error: isinstance(error, PeerLostError)):
            if not isinstance(error, InjectedFault):
                raise error
        return results

    def _run_rank(
        self, program: Callable[[MemoryWorld], Any], world: MemoryWorld, results: list[Any]
    ) -> None:
        try:
            results[world.rank] = program(world)
        except InjectedFault as fault:
            results[world.rank] = fault
            self._post_to_others(world.rank, Lost(world.rank))
        except BaseException as error:  # it is raised again, by run
            error.add_note(f"on rank {world.rank} of {self.size}, last at {world.last!r}")
            results[world.rank] = error
            self._barrier.abort()
            self._post_to_others(world.rank, _Broken(world.rank, error))

    def _post_to_others(self, rank: int, event: Lost | _Broken) -> None:
        with self._lock:
            for (other, _), mail in self._mail.items():
                if other != rank:
                    mail.put(event)

    def mail(self, rank: int, door: int) -> queue.SimpleQueue[Event | _Broken]:
        """Return the letter box behind the given door of a rank."""
        with self._lock:
            return self._mail.setdefault((rank, door), queue.SimpleQueue())

    def gather(self, rank: int, text: str) -> list[str]:
        """Collect a text from every rank."""
        self._texts[rank] = text
        try:
            self._barrier.wait()
            texts = list(self._texts)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLostError(rank, "waited for the others, but another rank has failed") from None
        return texts

    def pass_point(self, rank: int, point: str) -> None:
        """Die or wait here, if somebody asked for it."""
        key = (rank, point)
        with self._lock:
            self._reached[key] += 1
            count = self._reached[key]
        if self._faults.get(key) == count:
            raise InjectedFault(f"rank {rank} dies at {point!r}, occurrence {count}")
        occurrence, gate = self._gates.get(key, (0, None))
        if gate is not None and occurrence == count:
            gate.wait()


class MemoryWorld:
    """What a program on one rank of a `MemoryCluster` sees; stands in for the ranks of MPI.

    Attributes:
        last: the point this rank reached last.
    """

    def __init__(self, cluster: MemoryCluster, rank: int) -> None:
        self._cluster = cluster
        self.rank, self.size, self.host = rank, cluster.size, "memory"
        self.last = "start"
        self._doors = 0

    def reach(self, point: str) -> None:
        """Name a point of the program; `MemoryCluster.fail` and `hold` act on it."""
        self.last = point
        self._cluster.pass_point(self.rank, point)

    def gather_text(self, text: str) -> list[str]:
        """Give every rank the texts of all ranks (collective)."""
        self.reach("gather")
        return self._cluster.gather(self.rank, text)

    def open(self, links: Sequence[Link], own: Iterable[FlatVector] = ()) -> MemoryEndpoint:  # noqa: ARG002
        """Open this rank's next door (collective)."""
        self._doors += 1
        return MemoryEndpoint(self._cluster, self, links, self._doors)

    def engage(self) -> Callable[[], None]:
        """Do nothing: the cluster sees to it that a failure ends the run."""
        return lambda: None

    def abort(self, code: int) -> NoReturn:
        """End this rank, and with it the run."""
        raise SystemExit(code)


class MemoryEndpoint:
    """One rank's door; a message is copied into memory of its own when it is sent."""

    def __init__(self, cluster: MemoryCluster, world: MemoryWorld, links: Sequence[Link], door: int) -> None:
        self._cluster, self._world, self._door = cluster, world, door
        self._sizes = {(link.peer, link.shard): link.size for link in links}
        self._mail = cluster.mail(world.rank, door)

    def send(self, peer: int, message: Message, frame: Frame | None = None) -> None:  # noqa: ARG002
        """Put a copy of the message into the peer's letter box."""
        self._world.reach(f"send {message.kind.name}")
        letter = Frame(self._sizes[peer, message.shard])
        if message.vector is not None:
            np.copyto(letter.vector[: message.vector.size], message.vector)
        received = Received(decode(letter, encode(message, letter)), letter)
        self._cluster.mail(peer, self._door).put(received)

    def receive(self, timeout_s: float | None = None) -> Event | None:
        """Return the next event; None if none came within `timeout_s`."""
        try:
            event = self._mail.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(event, _Broken):
            raise PeerLostError(event.rank, f"failed: {event.error!r}") from event.error
        if isinstance(event, Received):
            self._world.reach(f"receive {event.message.kind.name}")
        return event

    def release(self, peer: int, frame: Frame) -> None:
        """Forget the letter."""

    def close(self) -> None:
        """Nothing is under way that would have to leave."""
