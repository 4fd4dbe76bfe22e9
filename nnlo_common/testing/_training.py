"""Whole trainings in the virtual cluster, from an algorithm and a gradient function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer, fitted
from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError, DroppedError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._state_tree import State
from nnlo_common.protocol import Activity, Compute, Server, Shard, Wire, Worker
from nnlo_common.testing._schedules import Schedule
from nnlo_common.testing._virtual import ServerDeath, VirtualCluster

__all__ = ["VirtualRanks", "VirtualRun", "train_virtually"]

Gradient = Callable[[Vector, int], npt.ArrayLike]
Observer = Callable[[Worker, int], None]


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """A finished training in the virtual cluster.

    Attributes:
        servers: one for each shard; `server.rule.center`, `server.rule.clock`, `server.staleness`, ...
        workers: in rank order.
        trace: for each shard the workers whose requests were handled, in order.
        seconds: the virtual time of the run (with the schedule `ByTime`).
        refused: the errors of the ranks that were dropped, in the order of their ends.

    Example:
        >>> from nnlo_common import SGD, LocalSGD
        >>> run = train_virtually(LocalSGD(every=2), lambda x, rank: x - rank, [0.0], workers=2, steps=3,
        ...                       local=SGD(0.5))
        >>> run.center, run.parameters  # the workers, ranks 1 and 2, have made one more step
        (array([1.125], dtype=float32), [array([1.0625], dtype=float32), array([1.5625], dtype=float32)])
        >>> run.trace[0]  # both join, exchange once and leave
        [1, 2, 1, 2, 1, 2]
    """

    servers: list[Server]
    workers: list[Worker]
    trace: dict[int, list[int]]
    seconds: float
    refused: list[DroppedError]

    @property
    def center(self) -> Vector:
        """The centre, all shards together."""
        return np.concatenate([server.rule.center for server in self.servers])

    @property
    def parameters(self) -> list[Vector]:
        """The parameters of each worker."""
        return [worker.parameters.vector for worker in self.workers]

    def state(self) -> State:
        """Return the state that a later run needs to continue exactly; see `resume` of `train_virtually`."""
        return {
            "servers": [server.state() for server in self.servers],
            "workers": [worker.state() for worker in self.workers],
        }


def train_virtually(
    algorithm: Algorithm,
    gradient: Gradient,
    initial: Sequence[Any] | npt.NDArray[Any],
    *,
    workers: int,
    steps: int | Sequence[int] | Sequence[Sequence[int]],
    optimizer: VectorOptimizer | None = None,
    local: VectorOptimizer | Callable[[], VectorOptimizer] | None = None,
    servers: int = 1,
    schedule: Schedule | None = None,
    begin: Sequence[Any] | None = None,
    leave: bool = True,
    resume: Mapping[str, Any] | None = None,
    losses: Mapping[int, int] | None = None,
    drops: Mapping[int, int] | None = None,
    deaths: Sequence[ServerDeath] = (),
    heir: bool = False,
    observe: Observer | None = None,
    check: bool = True,
) -> VirtualRun:
    """Train in the virtual cluster; servers have ranks 0, 1, ..., workers the ranks after them.

    Args:
        algorithm: the options of the algorithm.
        gradient: called as gradient(x, rank); returns the gradient at the point x.
        initial: the centre at the start: numbers, or a list of arrays (needed for several servers).
        workers: p.
        steps: steps of each worker: one number for all, or one for each. A list of numbers for each worker
            gives its steps in each epoch, with messages to the servers at the ends of epochs.
        optimizer: steps the centre; each shard gets a copy. Refused where no optimizer steps the centre
            (EASGD, LocalSGD, GEM).
        local: moves a worker's own parameters: an optimizer, of which each worker gets a copy, or a function
            that makes one. Without it they move by exchanges only.
        servers: the number of shards of the centre, cut at the boundaries of the arrays.
        schedule: chooses the next request; `RoundRobin` by default.
        begin: the start of each worker, if not the centre.
        leave: workers leave at the end; False makes them pause, so that the run can be resumed.
        resume: the `state()` of an earlier run to continue from.
        losses: the ranks that die, and the number of handled requests before that.
        drops: the ranks that the servers drop as too silent, and the number of handled requests before that;
            they speak again later, and end with the answer.
        deaths: deaths of servers, in order; each time a rank after the workers takes the place.
        heir: the first workers take them, each that of the shard with its number, and train no more; there
            are no other spares.
        observe: called as observe(worker, step) after each step.
        check: validate every invariant of the protocol after every event.

    Raises:
        ConfigurationError: an argument cannot work or would be unused.
        PeerLostError: a server has died, and no rank is left that takes its place.

    Example:
        >>> from nnlo_common.algorithms import Downpour
        >>> from nnlo_common import SGD
        >>> run = train_virtually(Downpour(), lambda x, rank: x, [8.0], workers=2, steps=1,
        ...                       optimizer=SGD(0.25))
        >>> run.center, dict(run.servers[0].staleness)
        (array([4.], dtype=float32), {0: 1, 1: 1})
    """
    workers, servers = whole_number("workers", workers, 1), whole_number("servers", servers, 1)
    _refuse_unused(algorithm, optimizer)
    algorithm = algorithm.with_momentum_of(optimizer)
    algorithm.check(workers, servers)
    for one in deaths:
        if one.shard not in range(servers):
            raise ConfigurationError(
                f"deaths={list(deaths)!r}: there is no shard {one.shard}; the servers have the shards 0 to "
                f"{servers - 1}"
            )
    if heir and workers <= servers:
        raise ConfigurationError(
            f"heir=True with {servers} servers and {workers} workers is not possible: a worker takes the "
            f"place of each server, and another one trains on; give at least {servers + 1} workers"
        )
    dying = tuple(one.shard for one in deaths)
    cell = VirtualRanks(algorithm, FlatVector.of(_arrays(initial)), servers, workers, dying, heir)
    counts, starts = _step_counts(steps, workers), _starts(begin, workers)
    ends = {
        name: _counts_by_rank(name, given or {}, cell.ranks)
        for name, given in (("losses", losses), ("drops", drops))
    }
    machines, members = cell.make_servers(optimizer), cell.make_workers(local)
    if resume is not None:
        _load(machines, members, resume)
    programs = {
        worker.rank: _program(worker, gradient, count, begin=start, leave=leave, observe=observe)
        for worker, count, start in zip(members, counts, starts, strict=True)
    }
    everyone = {worker.rank: worker for worker in members}
    cluster = VirtualCluster(
        machines,
        everyone,
        programs,
        schedule=schedule,
        deaths=deaths,
        spares=cell.make_spares(optimizer),
        check=check,
        **ends,
    )
    cluster.run()
    return VirtualRun(cluster.servers, members, cluster.trace, cluster.now_s, cluster.refused)


@dataclass(frozen=True, slots=True)
class VirtualRanks:
    """Makes the servers and workers of a run, and a spare for each shard whose server dies, or an heir."""

    algorithm: Algorithm
    start: FlatVector
    servers: int
    workers: int
    dying: tuple[int, ...] = ()
    heir: bool = False

    @property
    def ranks(self) -> range:
        """The ranks of the workers."""
        return range(self.servers, self.servers + self.workers)

    def shards(self) -> list[Shard]:
        places = self.start.layout.cut(self.servers)
        return [Shard(index, index, place, self._spares_of(index)) for index, place in enumerate(places)]

    def _spares_of(self, shard: int) -> tuple[int, ...]:
        if self.heir:
            return (self.ranks[shard],)
        last = self.servers + self.workers
        return tuple(last + turn for turn, index in enumerate(self.dying) if index == shard)

    def make_servers(self, optimizer: VectorOptimizer | None) -> list[Server]:
        return [self._server(shard, optimizer) for shard in self.shards()]

    def make_spares(self, optimizer: VectorOptimizer | None) -> list[Server]:
        return [
            self._server(replace(shard, server=rank, spares=()), optimizer)
            for shard in self.shards()
            for rank in shard.spares
        ]

    def _server(self, shard: Shard, optimizer: VectorOptimizer | None) -> Server:
        mine = None if optimizer is None else fitted(optimizer, self.start.layout, shard.place)
        center = self.start.vector[shard.place].copy()
        rule = self.algorithm.center(center, self.workers, self.algorithm.at_center(mine, center.size))
        if self.servers > 1:
            rule.share(self.start.vector.size)
        depth = self.algorithm.lag + 1
        wire = Wire(self.algorithm, self.start.layout, shard.place)
        return Server(rule, self.ranks, rank=shard.server, shard=shard.index, depth=depth, wire=wire)

    def make_workers(self, local: VectorOptimizer | Callable[[], VectorOptimizer] | None) -> list[Worker]:
        return [self._worker(rank, local() if callable(local) else local) for rank in self.ranks]

    def _worker(self, rank: int, local: VectorOptimizer | None) -> Worker:
        layout = self.start.layout
        return Worker(
            rank,
            self.algorithm,
            FlatVector.of(self.start.views()),
            FlatVector(layout),
            self.shards(),
            workers=self.workers,
            local=None if local is None else fitted(local, layout, slice(0, layout.size)),
        )


def _refuse_unused(algorithm: Algorithm, optimizer: VectorOptimizer | None) -> None:
    if optimizer is None or algorithm.optimizer_runs == "center" or algorithm.outer_optimizer:
        return
    name, by_worker = type(algorithm).__name__, algorithm.optimizer_runs == "worker"
    moves = "each worker steps by itself" if by_worker else "the algorithm steps by itself"
    remedy = "pass local= instead" if by_worker else "leave it out, or pass local= to move workers besides"
    raise ConfigurationError(
        f"optimizer={optimizer!r} steps the centre, but with {name} {moves}, so it would not be used; "
        f"{remedy}"
    )


def _step_counts(steps: int | Sequence[int] | Sequence[Sequence[int]], workers: int) -> list[int | list[int]]:
    if not isinstance(steps, Sequence | np.ndarray):
        return [whole_number("steps", steps, 0)] * workers
    if len(steps) != workers:
        raise ConfigurationError(
            f"steps has {len(steps)} entries, but there are {workers} workers; give one number, or one for "
            "each"
        )
    counts: list[int | list[int]] = []
    for index, of_worker in enumerate(steps):
        if isinstance(of_worker, Sequence):
            name = f"steps[{index}]"
            counts.append([whole_number(f"{name}[{epoch}]", n, 0) for epoch, n in enumerate(of_worker)])
        else:
            counts.append(whole_number(f"steps[{index}]", of_worker, 0))
    return counts


def _starts(begin: Sequence[Any] | None, workers: int) -> list[Any]:
    if begin is None:
        return [None] * workers
    if len(begin) != workers:
        raise ConfigurationError(
            f"begin has {len(begin)} entries, but there are {workers} workers; give one start for each"
        )
    return list(begin)


def _counts_by_rank(name: str, given: Mapping[int, int], ranks: range) -> dict[int, int]:
    unknown = [rank for rank in given if rank not in ranks]
    if unknown:
        raise ConfigurationError(
            f"{name}={dict(given)!r}: {unknown[0]!r} is not the rank of a worker; these have the ranks "
            f"{ranks[0]} to {ranks[-1]}, after the servers"
        )
    return {rank: whole_number(f"{name}[{rank}]", count, 0) for rank, count in given.items()}


def _load(servers: Sequence[Server], workers: Sequence[Worker], resume: Mapping[str, Any]) -> None:
    _check_counts(resume, len(servers), len(workers))
    for server, state in zip(servers, resume["servers"], strict=True):
        server.load(state)
    for worker, state in zip(workers, resume["workers"], strict=True):
        worker.load(state)


def _check_counts(resume: Mapping[str, Any], servers: int, workers: int) -> None:
    if not {"servers", "workers"} <= resume.keys():
        raise ConfigurationError(
            f"resume={resume!r:.60} has {sorted(resume)}; pass what state() of an earlier run has returned"
        )
    found = (len(resume["servers"]), len(resume["workers"]))
    if found != (servers, workers):
        raise ConfigurationError(
            f"the state was saved with {found[0]} servers and {found[1]} workers, but this run has "
            f"{servers} and {workers}; resume with the same numbers"
        )


def _arrays(initial: Sequence[Any] | npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    if isinstance(initial, np.ndarray):
        return [np.asarray(initial, np.float32)]
    if initial and isinstance(initial[0], np.ndarray):
        return list(initial)
    return [np.asarray(initial, np.float32)]


def _program(
    worker: Worker,
    gradient: Gradient,
    steps: int | list[int],
    *,
    begin: npt.ArrayLike | None,
    leave: bool,
    observe: Observer | None,
) -> Activity:
    yield from worker.join()
    if begin is not None:
        worker.parameters.vector[:] = begin
    done = count()
    for steps_of_epoch in [steps] if isinstance(steps, int) else steps:
        yield from worker.begin_epoch()
        for _ in range(steps_of_epoch):
            yield Compute()
            found = gradient(worker.gradient_point(), worker.rank)
            if found is None:  # it would become NaN
                raise ConfigurationError(
                    f"gradient(x, {worker.rank}) returned None; return the gradient at x, of its size"
                )
            worker.gradient.vector[:] = found
            yield from worker.step()
            if observe is not None:
                observe(worker, next(done))
        if not isinstance(steps, int):
            yield from worker.finish_epoch()
    if leave:
        yield from worker.leave()
