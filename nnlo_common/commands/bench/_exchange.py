"""Full round trip of an exchange, beside a raw ping-pong of the same bytes.

The ping-pong uses numpy's memory. A second one uses nnlo's large pages (`base/_flat_vector.py`), to separate
the gain of the pages from the cost of the exchange. In a third each rank adds what it has received to a
vector of its own, which is the least that an exchange computes if it computes one thing after the other.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from nnlo_common.algorithms import (
    EASGD,
    Algorithm,
    Ask,
    CenterRule,
    Contribution,
    Downpour,
    Steady,
    WorkerRule,
)
from nnlo_common.algorithms._optimizers import SGD, Adam
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Frame, Vector
from nnlo_common.cluster._hosts import gathered_places
from nnlo_common.cluster._threads import BorrowedThreads
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import MPI, World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.protocol import Activity, Server, Shard, Worker
from nnlo_common.training._rank_parts import perform, serve, work
from nnlo_common.training._stall_detector import ServerWatch

__all__ = ["run"]

SERVER, WORKER = 0, 1


class _EchoWorker(WorkerRule):
    """Sends the gradient and ignores the reply."""

    def due(self) -> Ask:
        return Ask.EXCHANGE

    def outgoing(self, parameters: Vector, gradient: Vector) -> Vector:  # noqa: ARG002
        return gradient

    def incoming(self, parameters: Vector, reply: Vector) -> None:
        pass


class _EchoCenter(CenterRule):
    """Returns the contribution unchanged, so that only the transport is measured."""

    def apply(self, contributions: Sequence[Contribution]) -> None:
        pass

    def reply(self, vector: Vector, part: slice = slice(None)) -> None:
        pass


@dataclass(frozen=True, kw_only=True)
class _Echo(Algorithm):
    def worker(self, size: int, workers: int) -> WorkerRule:  # noqa: ARG002
        return _EchoWorker()

    def center(self, center: Vector, workers: int, optimizer: VectorOptimizer | None) -> CenterRule:  # noqa: ARG002
        return _EchoCenter(center)


# The algorithm, the centre's optimizer, and the number of workers that it is for, of which one is there.
RULES: dict[str, tuple[Algorithm, VectorOptimizer | None, int]] = {
    "trivial": (_Echo(), None, 1),
    "EASGD": (EASGD(every=1, alpha=0.5), None, 1),
    "Downpour": (Downpour(), SGD(0.1), 1),
    "Steady": (Steady(), SGD(0.1, momentum=0.9), 2),
    "Steady Adam": (Steady(), Adam(0.001), 2),
}


def run(world: World, megabytes: Sequence[float], rounds: int) -> None:
    """Measure and print; ratios are formed within each round, so that drift of the machine cancels."""
    first = world.rank == SERVER
    if first:
        print(f"{world.library}; load {os.getloadavg()[0]:.2f} before; {rounds} rounds; median [min, max]")
        print(f"{'MB':>6} {'':>11} {'round trip':>12} {'over ping-pong':>24}")
    for size in megabytes:
        repeats = int(min(400, max(5, 200 / size)))
        raw, timings = _measure(world, int(size * 1e6 / 4), rounds, repeats)
        if not first:
            continue
        print(f"{size:6g} {'ping-pong':>11} {median(raw) * 1e6:9.1f} us")
        for name, seconds in timings.items():
            ratios = [one / base for one, base in zip(seconds, raw, strict=True)]
            print(
                f"{size:6g} {name:>11} {median(seconds) * 1e6:9.1f} us {median(ratios):10.3f} "
                f"[{min(ratios):.3f}, {max(ratios):.3f}]"
            )
    if first:
        print(f"load {os.getloadavg()[0]:.2f} after")


def _measure(
    world: World, size: int, rounds: int, repeats: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Return the median round trip of each round: of the ping-pong, and of each rule.

    Each round has new memory: where the system puts it changes a time by up to half, and for as long as it
    lives.
    """
    timings: dict[str, list[float]] = {}
    places = gathered_places(world.gather_text)
    threads = BorrowedThreads(SERVER, places, servers=[SERVER], groups=[(WORKER,)])
    for _ in range(rounds):
        plain = [Frame(size, lambda count: np.zeros(count, np.uint8)) for _ in range(2)]
        sides: dict[str, _PingPong | _Pair] = {
            "ping-pong": _PingPong(world, *plain),
            "large pages": _PingPong(world, Frame(size), Frame(size)),
            "additions": _PingPong(world, Frame(size), Frame(size), Frame(size)),
            **{name: _Pair(world, size, *rule, threads=threads) for name, rule in RULES.items()},
        }
        for name, side in sides.items():
            _timed(world, side.once, 2)  # the first touches the memory
            timings.setdefault(name, []).append(_timed(world, side.once, repeats))
        for side in sides.values():
            side.close()
    return timings.pop("ping-pong"), timings


def _timed(world: World, once: Callable[[], None], repeats: int) -> float:
    """Return the worker's median time of `repeats` calls, on both ranks."""
    world.comm.Barrier()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    result = np.array([median(seconds)])
    world.comm.Bcast(result, root=WORKER)
    return float(result[0])


class _PingPong:
    """Blocking Send and Recv of mpi4py, from one buffer into another; what came is added to `total`."""

    def __init__(self, world: World, out: Frame, back: Frame, total: Frame | None = None) -> None:
        self._rank, self._comm = world.rank, world.comm.Dup()
        self._out, self._back, self._total = out, back, total
        self._out.vector[:] = 1e-3  # else all its pages map to one page of zeros in the cache

    def once(self) -> None:
        back = [self._back.bytes, MPI.BYTE]
        if self._rank == WORKER:
            self._comm.Send([self._out.bytes, MPI.BYTE], SERVER)
            self._comm.Recv(back, SERVER)
            self._add()
        else:
            self._comm.Recv(back, WORKER)
            self._add()
            self._comm.Send(back, WORKER)

    def _add(self) -> None:
        if self._total is not None:
            np.add(self._total.vector, self._back.vector, out=self._total.vector)

    def close(self) -> None:
        self._comm.Free()


class _Pair:
    """A server and a worker as in training, one exchange at a time."""

    def __init__(
        self,
        world: World,
        size: int,
        algorithm: Algorithm,
        optimizer: VectorOptimizer | None,
        workers: int,
        *,
        threads: BorrowedThreads,
    ) -> None:
        arrays = [np.zeros(size, np.float32)]
        serving = world.rank == SERVER
        x, g = FlatVector.of(arrays), FlatVector.of(arrays)
        g.vector[:] = 1e-3
        link = Link(WORKER if serving else SERVER, 0, size, 1, serving)
        self._endpoint = MPIWorld(world).open([link])
        self._server = (
            Server(
                algorithm.center(x.vector, workers, copy.deepcopy(optimizer)),
                range(WORKER, WORKER + workers),
                by_parts=True,
            )
            if serving
            else None
        )
        if self._server is not None:
            self._server.threads = threads
        self._handled = 0
        self._watch = ServerWatch({SERVER: world.host}, lambda: [SERVER])
        self._worker = Worker(WORKER, algorithm, x, g, [Shard(0, SERVER, slice(0, size))], workers=workers)
        self._perform(self._worker.join)

    def once(self) -> None:
        self._perform(self._worker.step)

    def _lost(self, rank: int, error: PeerLostError | None) -> None:
        raise error or PeerLostError(rank, "has died")

    def _perform(self, request: Callable[[], Activity]) -> None:
        """Send one request on the worker, and handle it on the server."""
        if self._server is None:
            work(self._endpoint, self._worker.deliver, request(), self._lost, self._watch)
            return
        server, until = self._server, self._handled + 1

        def handle(event):  # type: ignore[no-untyped-def]
            self._handled += 1
            perform(self._endpoint, server.handle(event))

        serve(self._endpoint, handle, lambda: self._handled >= until)

    def close(self) -> None:
        self._perform(self._worker.leave)
        self._endpoint.close()
