"""Whole trainings in the virtual cluster, from an algorithm and a gradient function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common._errors import ConfigurationError
from nnlo_common._flat import FlatVector, Vector
from nnlo_common._optimizer import VectorOptimizer, fitted
from nnlo_common._state import State
from nnlo_common.algorithms import Algorithm
from nnlo_common.protocol import Activity, Compute, Server, Shard, Worker
from nnlo_common.transport._schedules import Schedule, require_workers
from nnlo_common.transport._virtual import VirtualCluster

__all__ = ["VirtualRun", "train_virtually"]

Gradient = Callable[[Vector, int], npt.ArrayLike]


@dataclass(frozen=True, slots=True)
class VirtualRun:
    """A finished training in the virtual cluster.

    Attributes:
        servers: one for each shard; `server.rule.center`, `.clock`, `server.staleness`, ...
        workers: in rank order.
        trace: for each shard the workers whose requests were handled, in order.
        seconds: the virtual time it took (with the schedule `ByTime`).
    """

    servers: list[Server]
    workers: list[Worker]
    trace: dict[int, list[int]]
    seconds: float

    @property
    def center(self) -> Vector:
        """The centre, all shards together."""
        return np.concatenate([server.rule.center for server in self.servers])

    @property
    def parameters(self) -> list[Vector]:
        """The parameters of each worker."""
        return [worker.parameters.vector for worker in self.workers]

    def state(self) -> State:
        """Return everything that a later run needs to continue exactly; see `resume` of `train_virtually`."""
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
    steps: int | Sequence[int],
    optimizer: VectorOptimizer | None = None,
    local: Callable[[], VectorOptimizer] | None = None,
    servers: int = 1,
    schedule: Schedule | None = None,
    begin: Sequence[Any] | None = None,
    leave: bool = True,
    resume: Mapping[str, Any] | None = None,
    losses: Mapping[int, int] | None = None,
    observe: Callable[[Worker, int], None] | None = None,
    check: bool = True,
) -> VirtualRun:
    """Train in the virtual cluster: servers have ranks 0, 1, ..., the workers the ranks after them.

    Args:
        algorithm: the options of the algorithm.
        gradient: called as gradient(x, rank) with the point x to take the gradient at.
        initial: the centre at the start: numbers, or a list of arrays (needed for several servers).
        workers: p.
        steps: how many steps each worker makes; one number, or one for each worker.
        optimizer: steps the centre; each shard gets a copy.
        local: makes the optimizer that moves a worker's own parameters.
        servers: how many shards the centre is cut into, at the boundaries of the arrays.
        schedule: who is served next; `RoundRobin` by default.
        begin: where each worker starts, if not at the centre.
        leave: workers leave at the end; False: they pause where they are, so that the run can be resumed.
        resume: the `state()` of an earlier run to continue from.
        losses: ranks that die, and after how many handled requests.
        observe: called as observe(worker, step) after each step.
        check: validate every invariant of the protocol after every event.

    Example:
        >>> from nnlo_common.algorithms import Downpour
        >>> from nnlo_common import SGD
        >>> run = train_virtually(Downpour(), lambda x, rank: x, [8.0], workers=2, steps=1,
        ...                       optimizer=SGD(0.25))
        >>> run.center, dict(run.servers[0].staleness)
        (array([4.], dtype=float32), {0: 1, 1: 1})
    """
    require_workers(workers)
    algorithm.check(workers, servers)
    arrays = _arrays(initial)
    flat = FlatVector.of(arrays)
    places = flat.layout.cut(servers)
    ranks = range(servers, servers + workers)
    shards = [Shard(index, index, place) for index, place in enumerate(places)]
    machines = [
        Server(
            algorithm.center(
                flat.vector[shard.place].copy(),
                workers,
                None if optimizer is None else fitted(optimizer, flat.layout, shard.place),
            ),
            ranks,
            rank=shard.server,
            shard=shard.index,
            depth=algorithm.lag + 1,
        )
        for shard in shards
    ]
    members = {
        rank: Worker(
            rank,
            algorithm,
            FlatVector.of(arrays),
            FlatVector(flat.layout),
            shards,
            workers=workers,
            local=None if local is None else fitted(local(), flat.layout, slice(0, flat.layout.size)),
        )
        for rank in ranks
    }
    if resume is not None:
        _check_counts(resume, servers, workers)
        for machine, state in zip(machines, resume["servers"], strict=True):
            machine.load(state)
        for member, state in zip(members.values(), resume["workers"], strict=True):
            member.load(state)
    counts = [steps] * workers if isinstance(steps, int) else list(steps)
    starts = [None] * workers if begin is None else list(begin)
    programs = {
        rank: _program(member, gradient, count, begin=start, leave=leave, observe=observe)
        for (rank, member), count, start in zip(members.items(), counts, starts, strict=True)
    }
    cluster = VirtualCluster(machines, members, programs, schedule=schedule, losses=losses, check=check)
    cluster.run()
    return VirtualRun(machines, list(members.values()), cluster.trace, cluster.now_s)


def _check_counts(resume: Mapping[str, Any], servers: int, workers: int) -> None:
    found = (len(resume["servers"]), len(resume["workers"]))
    if found != (servers, workers):
        raise ConfigurationError(
            f"the state was saved with {found[0]} servers and {found[1]} workers, but {servers} and "
            f"{workers} were asked for; resume with the same numbers"
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
    steps: int,
    *,
    begin: npt.ArrayLike | None,
    leave: bool,
    observe: Callable[[Worker, int], None] | None,
) -> Activity:
    yield from worker.join()
    if begin is not None:
        worker.parameters.vector[:] = begin
    for step in range(steps):
        yield Compute()
        worker.gradient.vector[:] = gradient(worker.gradient_point(), worker.rank)
        yield from worker.step()
        if observe is not None:
            observe(worker, step)
    if leave:
        yield from worker.leave()
