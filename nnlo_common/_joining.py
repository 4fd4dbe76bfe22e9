"""Taking up a part in a training: who is there, do all agree, and who does what."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nnlo_common._attendance import Attendance
from nnlo_common._errors import ConfigurationError
from nnlo_common._flat import FlatVector
from nnlo_common._layout import Layout
from nnlo_common._leasing import Leasing
from nnlo_common._optimizer import VectorOptimizer
from nnlo_common._places import Place, describe_here, locate
from nnlo_common._roles import TeamPart
from nnlo_common._serving import Serving
from nnlo_common._startup import connect, limit_threads, require_threads
from nnlo_common._topology import Arrangement, Assignment, Cell, Topology
from nnlo_common._working import Working
from nnlo_common.algorithms import Algorithm, CenterRule
from nnlo_common.protocol import (
    DESK_NUMBERS,
    Averages,
    Clerk,
    Copies,
    Counter,
    Desk,
    EpochMeans,
    Means,
    Notes,
    Server,
    Shard,
    Told,
    Worker,
)
from nnlo_common.transport._endpoint import Link, RankWorld

__all__ = ["Member", "Plan", "assigned", "join", "launched", "within"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a rank brings along; equal on all ranks but for the numbers in the vectors.

    Attributes:
        algorithm: how workers and centre exchange.
        parameters: the model.
        gradient: where gradients are put.
        gradients: all vectors that they are put into in turn, if there are several.
        servers: how many ranks share the serving of the centre.
        center_optimizer: makes what steps the given part of the centre; None where the algorithm knows.
        local_optimizer: what moves a worker's parameters; None where something else does.
        buffers: what is averaged and never goes through an optimizer, e.g. running statistics.
        options: how many numbers describe an optimizer's options, where workers send them.
        optimizer: what kind of optimizer it is, where all ranks are to have the same.
        epochs: how many the training is to have, where that is known before.
        meetings: what else all ranks meet in, by name.
        stall_timeout_s: after how long a silent worker is given up; None: never.
        record: keep the order of all requests.
    """

    algorithm: Algorithm
    parameters: FlatVector
    gradient: FlatVector
    gradients: Sequence[FlatVector] = ()
    servers: int = 1
    center_optimizer: Callable[[slice], VectorOptimizer | None] = lambda place: None
    local_optimizer: VectorOptimizer | None = None
    buffers: FlatVector | None = None
    options: int = 0
    optimizer: str = ""
    epochs: int = 0
    meetings: Sequence[str] = ()
    stall_timeout_s: float | None = None
    record: bool = False


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has joined.

    Attributes:
        part: what it does.
        role: that in words.
        place: where it is.
        threads: how many compute threads it is to use; None where ranks share a process.
        table: all ranks and their roles, as text.
        workers: how many workers there are.
        servers: how many servers there are.
        worker: which of them it is; None on a server.
        server: its half of the centre, on a server.
        disengage: to be called when it has left in good order.
    """

    part: TeamPart
    role: str
    place: Place
    threads: int | None
    table: str
    workers: int
    servers: int
    worker: int | None = None
    server: Server | None = None
    disengage: Callable[[], None] = field(repr=False)

    def prepare_order(self, path: Path) -> None:
        """Refuse now a path that could not be written when the training is over."""
        if self.server is not None:
            try:
                self._order_files(path)[0].write_text("")
            except OSError as error:
                raise ConfigurationError(
                    f"log_order={str(path)!r} cannot be written ({error.strerror}); name a file in a folder "
                    "that exists and is writable on the server's host"
                ) from None

    def write_order(self, path: Path) -> None:
        """Write the recorded order of requests, whole or not at all; workers have none."""
        if self.server is not None:
            fresh, final = self._order_files(path)
            fresh.write_text(json.dumps({"shard": self.server.shard, "handled": self.server.handled}))
            fresh.replace(final)

    def _order_files(self, path: Path) -> tuple[Path, Path]:
        shard = 0 if self.server is None else self.server.shard
        final = path if shard == 0 else path.with_name(f"{path.name}.shard{shard}")
        return final.with_name(final.name + ".part"), final


_inside: ContextVar[RankWorld | None] = ContextVar("nnlo_world", default=None)


@contextmanager
def within(world: RankWorld) -> Iterator[None]:
    """Let `launched` return this world, or nothing where it is one rank, for the length of a `with` block."""
    before = _inside.set(world)
    try:
        yield
    finally:
        _inside.reset(before)


def launched() -> RankWorld | None:
    """Return MPI's ranks if a launcher has started this process as one of several.

    Inside `within` those of that world instead: a trial of a search has a part of the ranks to itself.
    """
    if (inside := _inside.get()) is not None:
        return inside if inside.size > 1 else None
    world = connect()
    if world is None or world.size == 1:
        return None
    # All calls come from one thread; a library that grants less cannot be used from Python at all.
    require_threads(world, "FUNNELED", why="training over MPI")
    from nnlo_common.transport._mpi_world import MPIWorld

    return MPIWorld(world)


def assigned(world: RankWorld, servers: int) -> Assignment:
    """Return what this rank is to be, before it joins."""
    return Topology.plan(world.size, Arrangement(servers=servers)).assignment(world.rank)


def join(world: RankWorld, plan: Plan) -> Member:
    """Take up this rank's part (collective).

    Raises:
        ConfigurationError: the ranks do not agree, or their number does not fit; on all of them alike.
    """
    disengage = world.engage()
    try:
        _agree(world, plan)
        topology = Topology.plan(world.size, Arrangement(servers=plan.servers))
        cell = topology.cell_of(world.rank)
        plan.algorithm.check(len(cell.workers), len(cell.servers))
        parts = plan.parameters.layout.cut(len(cell.servers))
    except ConfigurationError as error:
        error.collective = True  # all ranks compare the same facts and find the same
        disengage()  # nothing has begun
        raise
    places = locate([json.loads(text) for text in world.gather_text(json.dumps(describe_here()))])
    place = places[world.rank]
    threads = limit_threads(place.local_size, place.host_cores) if world.own_process else None
    table = topology.table(places)
    _LOG.info("rank %d of %d:\n%s", world.rank, world.size, table)
    shards = [
        Shard(index, server, part)
        for index, (server, part) in enumerate(zip(cell.servers, parts, strict=True))
    ]
    assignment = topology.assignment(world.rank)
    part: TeamPart
    server: Server | None = None
    if assignment.shard is None:
        part = _join_as_worker(world, plan, cell, shards)
    else:
        part, server = _join_as_server(world, plan, cell, shards, places)
    return Member(
        part=part,
        role=assignment.title,
        place=place,
        threads=threads,
        table=table,
        workers=len(cell.workers),
        servers=len(cell.servers),
        worker=assignment.worker,
        server=server,
        disengage=disengage,
    )


def _join_as_worker(world: RankWorld, plan: Plan, cell: Cell, shards: list[Shard]) -> Working:
    links = [_link(plan, shard.server, shard, serving=False) for shard in shards]
    links.append(_desk_link(plan, shards, cell.servers[0], serving=False))
    worker = Worker(
        world.rank,
        plan.algorithm,
        plan.parameters,
        plan.gradient,
        shards,
        workers=len(cell.workers),
        local=plan.local_optimizer,
    )
    clerk = _clerk(world, plan, cell, shards)
    gradients = [gradient.frame for gradient in plan.gradients or [plan.gradient]]
    own = (plan.parameters.frame, *gradients, *worker.outgoing_frames())
    return Working(world.open(links, own), worker, clerk)


def _join_as_server(
    world: RankWorld, plan: Plan, cell: Cell, shards: list[Shard], places: Sequence[Place]
) -> tuple[Serving, Server]:
    index = cell.servers.index(world.rank)
    mine, others = shards[index], [shard for shard in shards if shard.index != index]
    links = [_link(plan, rank, mine, serving=True) for rank in cell.workers]
    for shard in others:
        links += [
            _link(plan, shard.server, mine, serving=True),
            _link(plan, shard.server, shard, serving=False),
        ]
    center = plan.parameters.vector[mine.place]
    rule = plan.algorithm.center(center, len(cell.workers), plan.center_optimizer(mine.place))
    desk: Desk | Clerk
    if index == 0:
        asking = [*cell.workers, *cell.servers[1:]]
        links += [_desk_link(plan, shards, rank, serving=True) for rank in asking]
        desk = _desk(world, plan, cell, shards, rule)
    else:
        links.append(_desk_link(plan, shards, cell.servers[0], serving=False))
        desk = _clerk(world, plan, cell, shards)
    server = Server(
        rule,
        cell.workers,
        rank=world.rank,
        shard=index,
        depth=plan.algorithm.lag + 1,
        guests=[shard.server for shard in others],
        record=plan.record,
    )
    attendance = Attendance(
        {rank: places[rank].host for rank in cell.workers},
        stall_timeout_s=plan.stall_timeout_s,
        tells=index == 0,
    )
    door, parameters = world.open(links), plan.parameters
    serving = Serving(
        door, server, parameters, mine.place, others, desk=desk, attendance=attendance, drop=world.drop
    )
    return serving, server


def _desk(world: RankWorld, plan: Plan, cell: Cell, shards: list[Shard], rule: CenterRule) -> Desk:
    ranks = [*cell.servers, *cell.workers]
    start = np.zeros(0, np.float32) if plan.buffers is None else plan.buffers.vector
    counters: dict[str, Counter] = {
        "mean": Means(ranks),
        "average": Averages(start),
        "note": Notes(),
        "epoch mean": EpochMeans(cell.workers),
        "copy": Copies(ranks, world.rank),
        "checkpoint": Told(),
        # Where workers wait for each other in their steps, none may wait outside of them for another's.
        "lease": Leasing(cell.workers, patient=world.survives_loss and rule.quorum(2) == 1),
    }
    return Desk(world.rank, len(shards), ranks, counters)


def _clerk(world: RankWorld, plan: Plan, cell: Cell, shards: list[Shard]) -> Clerk:
    return Clerk(world.rank, cell.servers[0], len(shards), _buffered(plan))


def _buffered(plan: Plan) -> int:
    return 0 if plan.buffers is None else plan.buffers.vector.size


def _link(plan: Plan, peer: int, shard: Shard, *, serving: bool) -> Link:
    size = max(shard.place.stop - shard.place.start, plan.options)
    return Link(peer, shard.index, size, plan.algorithm.lag + 1, serving)


def _desk_link(plan: Plan, shards: list[Shard], peer: int, *, serving: bool) -> Link:
    return Link(peer, len(shards), DESK_NUMBERS + _buffered(plan), 1, serving)


def _agree(world: RankWorld, plan: Plan) -> None:
    """Refuse, on all ranks alike, to train different models or algorithms together."""
    mine = {
        "host": world.host,
        "algorithm": plan.algorithm.describe(),
        "servers": plan.servers,
        "optimizer": plan.optimizer,
        "epochs": plan.epochs,
        "meetings": list(plan.meetings),
        "layout": plan.parameters.layout.to_json(),
        "buffers": None if plan.buffers is None else plan.buffers.layout.to_json(),
    }
    if world.rank < plan.servers > 1:  # each holds a part of one start
        mine["start"] = hashlib.blake2b(plan.parameters.vector.data, digest_size=8).hexdigest()
    everyone = [json.loads(text) for text in world.gather_text(json.dumps(mine))]
    first = everyone[0]
    for rank, other in enumerate(everyone):
        if other["algorithm"] != first["algorithm"]:
            problem = f"the algorithm is {first['algorithm']} on rank 0 but {other['algorithm']}"
        elif other["servers"] != first["servers"]:
            problem = f"servers={first['servers']} on rank 0 but {other['servers']}"
        elif other["optimizer"] != first["optimizer"]:
            problem = f"the optimizer is {first['optimizer']} on rank 0 but {other['optimizer']}"
        elif other["epochs"] != first["epochs"]:
            problem = f"epochs={first['epochs']} on rank 0 but {other['epochs']}"
        elif other["meetings"] != first["meetings"]:
            problem = f"{first['meetings']} take part on rank 0 but {other['meetings']}"
        elif other["layout"] != first["layout"]:
            difference = Layout.from_json(first["layout"]).difference(Layout.from_json(other["layout"]))
            problem = f"the model differs (here: rank 0, there: that rank): {difference}"
        elif other["buffers"] != first["buffers"]:
            problem = "the model's buffers (running statistics and the like) differ from those on rank 0"
        elif other.get("start") not in (None, first.get("start")):
            problem = (
                "the initial parameters, of which each server holds a part, are others than on rank 0 (seed "
                "all ranks alike before the model is made, or load the same file)"
            )
        else:
            continue
        raise ConfigurationError(
            f"{problem}, on rank {rank} (host {other['host']}); give all {world.size} ranks the same script"
        )
