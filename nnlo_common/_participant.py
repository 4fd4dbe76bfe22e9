"""One rank's part in a training without a framework: the same script on every rank."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy.typing as npt

from nnlo_common._errors import ConfigurationError
from nnlo_common._flat import FlatVector, Layout, Vector
from nnlo_common._optimizer import VectorOptimizer, fitted
from nnlo_common._places import describe_here, locate
from nnlo_common._roles import Alone, Part, Report, Serving, Working
from nnlo_common._startup import connect, limit_threads
from nnlo_common._topology import Arrangement, Cell, Role, Topology
from nnlo_common.algorithms import Algorithm
from nnlo_common.protocol import Server, Shard, Worker
from nnlo_common.transport._endpoint import Link, RankWorld

__all__ = ["Participant"]

_LOG = logging.getLogger(__name__)
_Batch = TypeVar("_Batch")


class Participant:
    """Takes part in a distributed training, in whatever part falls to this rank.

    The same script runs on every rank. Started with `python` it trains plainly; with `mpiexec -n 3` one
    rank serves the centre and two work.

    Args:
        algorithm: how workers and centre exchange, e.g. `EASGD(every=10)`.
        arrays: the initial parameters; equal shapes on all ranks. Each server's values are the start of the
            part of the centre that it serves.
        optimizer: the ordinary optimizer; it runs where the algorithm says, on the centre or the worker.
        names: what error messages call the arrays.
        servers: how many ranks share the serving of the centre.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        log_order: a file to write the order of all requests to, for a replay in the virtual cluster.

    Example:
        >>> import numpy as np
        >>> from nnlo_common import SGD, Downpour
        >>> with Participant(Downpour(), [np.ones(2, "f4")], optimizer=SGD(0.5)) as me:
        ...     for epoch in range(2):
        ...         for batch in me.batches([1, 2, 3]):
        ...             me.gradients[0][:] = me.point[0]  # of |x|^2 / 2
        ...             me.step()
        >>> me.parameters[0]
        array([0.015625, 0.015625], dtype=float32)
    """

    def __init__(
        self,
        algorithm: Algorithm,
        arrays: Sequence[npt.NDArray[Any]],
        *,
        optimizer: VectorOptimizer | None = None,
        names: Sequence[str] | None = None,
        servers: int = 1,
        world: RankWorld | None = None,
        log_order: str | Path | None = None,
    ) -> None:
        self.algorithm, self.optimizer = algorithm, optimizer
        self._arrangement = Arrangement(servers=servers)
        self._flat = FlatVector.of(arrays, names)
        self._gradient = FlatVector(self._flat.layout)
        self._world, self._log_order = world, None if log_order is None else Path(log_order)
        self._part: Part | None = None
        self._server: Server | None = None
        self.rank, self.size, self.role = 0, 1, "alone"
        self._workers, self._worker = 1, 0
        self._over = False
        self._disengage: Callable[[], None] = lambda: None

    @property
    def parameters(self) -> list[Vector]:
        """The parameters, as views in the arrays' shapes; on a server rank they are the centre."""
        return self._flat.views()

    @property
    def gradients(self) -> list[Vector]:
        """Where to put the gradient, as views in the arrays' shapes, before each `step`."""
        return self._gradient.views()

    @property
    def point(self) -> list[Vector]:
        """Where to take the gradient: the parameters, or ahead of them (EAMSGD)."""
        vector = self._running.point()
        return [vector[segment.place].reshape(segment.shape) for segment in self._flat.layout.segments]

    def batches(self, batches: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield this worker's share of an epoch's batches: every p-th one.

        On a server rank this serves the epoch and yields nothing. However uneven the shares are, nobody
        waits for a worker that has none left.
        """
        running = self._running
        if running.trains:
            yield from islice(batches, self._worker, None, self._workers)
        running.end_epoch()

    def step(self, weight: float = 1.0) -> None:
        """Make one step with the gradient that lies in `gradients`.

        Args:
            weight: this step's share in a mean over workers, e.g. the number of samples.
        """
        self._running.step(weight)

    def say(self, text: str) -> None:
        """Print `text` once: on the rank whose parameters are the centre."""
        if isinstance(self._part, Alone) or (self._server is not None and self._server.shard == 0):
            print(text, flush=True)

    def report(self) -> Report:
        """Return what this rank has seen so far; also after the `with` block."""
        return self._running.report() if self._part is None else self._part.report()

    def __enter__(self) -> Self:
        world = self._world or _launched()
        if world is None or world.size == 1:
            plain = self._fitted(self.algorithm.alone(self.optimizer))
            self._part = Alone(self._flat, self._gradient, plain)
        else:
            self._disengage = world.engage()
            self.rank, self.size = world.rank, world.size
            try:
                self._part = self._join(world)
            except ConfigurationError as error:
                error.collective = True  # all ranks compare the same facts and find the same
                raise
        self._over = False
        self._part.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the others must not be made to believe that all is well. Whether the error is caught
        # further up or not: the end of this process ends the job.
        if kind is None:
            self._running.finish()
            self._disengage()
            if self._log_order is not None and self._server is not None:
                self._write_order(self._log_order, self._server)
        self._over = True

    @property
    def _running(self) -> Part:
        if self._part is None or self._over:
            raise ConfigurationError("a Participant takes part inside its `with` block only; open one first")
        return self._part

    def _join(self, world: RankWorld) -> Part:
        _agree(world, self._flat.layout, self.algorithm.describe(), self._arrangement.servers)
        topology = Topology.plan(world.size, self._arrangement)
        reports = [json.loads(text) for text in world.gather_text(json.dumps(describe_here()))]
        places = locate(reports)
        place = places[world.rank]
        limit_threads(place.local_size, place.host_cores)
        _LOG.info("rank %d of %d:\n%s", world.rank, world.size, topology.table(places))
        cell = topology.cell_of(world.rank)
        assignment = topology.assignment(world.rank)
        cuts = enumerate(zip(cell.servers, self._flat.layout.cut(len(cell.servers)), strict=True))
        shards = [Shard(index, server, part) for index, (server, part) in cuts]
        self._workers = len(cell.workers)
        self.algorithm.check(self._workers, len(cell.servers))
        if assignment.role is Role.SERVER and assignment.shard is not None:
            self.role = f"server {assignment.shard}"
            return self._serving(world, cell, shards, assignment.shard)
        self._worker = assignment.worker or 0
        self.role = f"worker {self._worker}"
        return self._working(world, shards)

    def _working(self, world: RankWorld, shards: list[Shard]) -> Working:
        local = None
        if self.algorithm.optimizer_runs == "worker":
            local = self._fitted(self.algorithm.alone(self.optimizer))
        depth = self.algorithm.lag + 1
        links = [Link(s.server, s.index, s.place.stop - s.place.start, depth, serving=False) for s in shards]
        worker = Worker(
            world.rank,
            self.algorithm,
            self._flat,
            self._gradient,
            shards,
            workers=self._workers,
            local=local,
        )
        return Working(world.open(links, own=(self._flat, self._gradient)), worker)

    def _serving(self, world: RankWorld, cell: Cell, shards: list[Shard], index: int) -> Serving:
        mine, others = shards[index], [shard for shard in shards if shard.index != index]
        depth = self.algorithm.lag + 1
        size = mine.place.stop - mine.place.start
        links = [Link(rank, index, size, depth, serving=True) for rank in cell.workers]
        for shard in others:
            links.append(Link(shard.server, index, size, 1, serving=True))
            links.append(
                Link(shard.server, shard.index, shard.place.stop - shard.place.start, 1, serving=False)
            )
        optimizer = None
        if self.algorithm.optimizer_runs == "center" and self.optimizer is not None:
            optimizer = self._fitted(self.optimizer, mine.place)
        self._server = Server(
            self.algorithm.center(self._flat.vector[mine.place], self._workers, optimizer),
            cell.workers,
            rank=world.rank,
            shard=index,
            depth=depth,
            guests=[shard.server for shard in others],
            record=self._log_order is not None,
        )
        return Serving(world.open(links), self._server, self._flat, others)

    def _fitted(self, optimizer: VectorOptimizer, place: slice | None = None) -> VectorOptimizer:
        """An optimizer of this training's own: the user's object may serve several."""
        layout = self._flat.layout
        return fitted(optimizer, layout, slice(0, layout.size) if place is None else place)

    @staticmethod
    def _write_order(path: Path, server: Server) -> None:
        """Write whole or not at all: somebody may read it while the job ends."""
        path = path if server.shard == 0 else path.with_name(f"{path.name}.shard{server.shard}")
        fresh = path.with_name(path.name + ".part")
        fresh.write_text(json.dumps({"shard": server.shard, "handled": server.handled}))
        fresh.replace(path)


def _launched() -> RankWorld | None:
    world = connect()
    if world is None:
        return None
    from nnlo_common.transport._mpi import MPIWorld

    return MPIWorld(world)


def _agree(world: RankWorld, layout: Layout, algorithm: str, servers: int) -> None:
    """Refuse, on all ranks alike, to train different models or algorithms together."""
    mine = json.dumps(
        {"host": world.host, "algorithm": algorithm, "servers": servers, "layout": layout.to_json()}
    )
    everyone = [json.loads(text) for text in world.gather_text(mine)]
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["algorithm"] != first["algorithm"]:
            problem = f"the algorithm is {first['algorithm']} on rank 0 but {other['algorithm']}"
        elif other["servers"] != first["servers"]:
            problem = f"servers={first['servers']} on rank 0 but {other['servers']}"
        elif other["layout"] != first["layout"]:
            difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
            problem = f"the model differs (here: rank 0, there: that rank): {difference}"
        else:
            continue
        raise ConfigurationError(
            f"{problem}, on rank {rank} (host {other['host']}); give all {world.size} ranks the same script"
        )
