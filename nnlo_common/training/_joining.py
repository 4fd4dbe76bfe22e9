"""Joining a training: find the other ranks and assign the roles."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from nnlo_common.algorithms import EASGD, CenterRule
from nnlo_common.algorithms._rule import GroupRule
from nnlo_common.base._block_threads import worth_threads
from nnlo_common.base._errors import ConfigurationError, plural, warn
from nnlo_common.base._process_memory import free_memory
from nnlo_common.cluster._connecting import connect, limit_threads, require_threads
from nnlo_common.cluster._hosts import ClockOffset, Place, gathered_offset, gathered_places
from nnlo_common.cluster._threads import BorrowedThreads
from nnlo_common.cluster._topology import Cell, Role, Roles, Topology
from nnlo_common.cluster.transport._endpoint import Endpoint, Group, Link, RankWorld
from nnlo_common.cluster.transport._group_endpoints import LeadEndpoint, MemberEndpoint, QueryEndpoint
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Averages,
    QueryClient,
    Server,
    Shard,
    Wire,
    Worker,
)
from nnlo_common.training._all_reduce import ALL_REDUCES, Reducer, reducer_of
from nnlo_common.training._group_rank import GroupRank
from nnlo_common.training._group_worker import GroupTrainer, GroupWorkerRank
from nnlo_common.training._heir_rank import HeirRank
from nnlo_common.training._plan import TrainingPlan, agree, readable
from nnlo_common.training._rank_parts import TeamPart
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._spare_rank import PlacedRank, PlaceTaken, SpareRank
from nnlo_common.training._stall_detector import StallDetector
from nnlo_common.training._state_copies import PIECE
from nnlo_common.training._training_queries import TrainingQueries
from nnlo_common.training._tree_joining import check_layout, check_tree, join_tree
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["Member", "join", "launched", "planned", "within"]

_LOG = logging.getLogger(__name__)

# A copy of a server's state: the centre, and at most what the optimizers of both frameworks keep of it.
_COPIED_VECTORS = 4
#: How many workers may take a server's place, one after the other.
_HEIRS = 2
#: The part of a host's free memory that copies may take unasked.
_FOR_HEIRS = 4


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank that has joined.

    Attributes:
        part: the rank's part in the training.
        role: the name of its role.
        place: its host.
        threads: the number of compute threads to use; None if ranks share a process.
        table: all ranks and their roles, as text.
        workers: the number of workers.
        servers: the number of servers that share the centre.
        heirs: workers take the places of dead servers.
        sub_servers: the number of sub-servers of an elastic tree.
        trains: the ranks that train.
        worker: its index among the workers; None on a server.
        server: on a server, the state machine of its shard.
        group: its side of its group; None if each worker is one rank, and on a server.
        group_size: the number of ranks of each worker.
        clock: how far its host's clock is ahead of the first rank's.
        disengage: call it after the rank has left normally.
    """

    part: TeamPart
    role: str
    place: Place
    threads: int | None
    table: str
    workers: int
    servers: int
    heirs: bool = False
    sub_servers: int = 0
    trains: tuple[int, ...] = ()
    worker: int | None = None
    server: Server | None = None
    group: GroupRank | None = None
    group_size: int = 1
    clock: ClockOffset = field(default_factory=ClockOffset)
    disengage: Callable[[], None] = field(repr=False)

    @property
    def share(self) -> tuple[int, int]:
        """This rank's index among all ranks that train, and their number; the index is -1 on a server.

        The ranks of a group come as far apart as they can, so that the samples i, i + n, i + 2 n, ... of the
        ranks of a group are together those of one worker that takes the same part alone.
        """
        if self.worker is None:
            return -1, self.workers * self.group_size
        index = 0 if self.group is None else self.group.index
        return self.worker + self.workers * index, self.workers * self.group_size

    def abandon(self) -> None:
        """Leave before the part was started (collective)."""
        self.part.abandon()
        self.disengage()


_inside: ContextVar[RankWorld | None] = ContextVar("nnlo_world", default=None)
_apart: ContextVar[bool] = ContextVar("nnlo_apart", default=False)


@contextmanager
def within(world: RankWorld) -> Iterator[None]:
    """Make `launched` return this world, or None if it is one rank, inside a `with` block."""
    before = _inside.set(world)
    try:
        yield
    finally:
        _inside.reset(before)


@contextmanager
def apart() -> Iterator[None]:
    """Let this rank act as if it had been started alone, inside a `with` block."""
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


#: The world of all ranks, once: who ends the job must know what a training has learnt of them.
_of_job: list[RankWorld] = []


def launched() -> RankWorld | None:
    """Return MPI's world if a launcher has started this process as one of several ranks.

    Inside `within`, return that world instead: a trial of a search has a part of the ranks to itself.
    """
    if _apart.get():
        return None
    if (inside := _inside.get()) is not None:
        return inside if inside.size > 1 else None
    world = connect()
    if world is None or world.size == 1:
        return None
    # All MPI calls come from one thread; Python cannot use a library that grants less.
    require_threads(world, "FUNNELED", why="training over MPI")
    if not _of_job:
        from nnlo_common.cluster.transport._mpi_world import MPIWorld

        _of_job.append(MPIWorld(world))
    return _of_job[0]


def planned(world: RankWorld, roles: Roles) -> Topology:
    """Return the roles of all ranks before they join; with sub-servers all ranks call it (collective).

    Raises:
        ConfigurationError: the number of ranks does not fit.
    """
    branched = roles.get("sub_servers", 0)
    if branched and world.of_trial:
        raise ConfigurationError(
            f"sub_servers={branched} in a trial of a search is not possible; leave it out"
        )
    hosts = world.gather_text(world.host) if branched else [""] * world.size
    return Topology.of_training(hosts, **roles)


def join(world: RankWorld, plan: TrainingPlan) -> Member:
    """Join the training (collective).

    Raises:
        ConfigurationError: the ranks do not agree, or their number does not fit; raised on all ranks.
    """
    disengage = world.engage()
    try:
        agree(world, plan)
        topology = planned(world, plan.ranks.roles(plan.algorithm.tree()))
        cell = topology.cell_of(world.rank)
        _check_options(world, plan)
        check_layout(plan.algorithm, cell)
        if cell.branches:
            check_tree(plan)
        heirs = _has_heirs(world, plan, cell)
        parts = plan.parameters.layout.cut(len(cell.servers)) if cell.servers else []
    except ConfigurationError as error:
        error.collective = True  # all ranks compare the same facts and raise the same error
        disengage()  # no exchange has begun, so leaving is safe
        raise
    if cell.spares and not world.survives_loss and world.rank == 0:
        warn(
            f"spares={len(cell.spares)}, but here the job ends with any rank that dies; start it by "
            "mpiexec --with-ft ulfm of Open MPI 5, or leave spares out and have a rank more that trains"
        )
    places = gathered_places(world.gather_text)
    place = places[world.rank]
    clock = ClockOffset()
    several = any(one.host != place.host for one in places)
    if several and world.own_process and not world.of_trial:  # the ranks of a trial gather by slower mail
        clock = gathered_offset(world.gather_text, world.rank)
        if place.host == places[0].host:
            clock = ClockOffset()  # one host has one clock
    threads = limit_threads(place.local_size, place.host_cores) if world.own_process else None
    table = topology.table(places)
    _LOG.info("rank %d of %d:\n%s", world.rank, world.size, table)
    shards = [
        Shard(index, server, part, _heirs_of(index, cell) if heirs else cell.spares_of(index))
        for index, (server, part) in enumerate(zip(cell.servers, parts, strict=True))
    ]
    assignment = topology.assignment(world.rank)
    group_size = topology.arrangement.group_size
    group = None
    if assignment.worker is not None and group_size > 1:
        naps = any(places[rank].crowded for rank in cell.ranks)
        group = _grouped(world, plan, cell, cell.groups[assignment.worker], places, naps=naps)
    part: TeamPart
    server: Server | None = None
    if cell.branches:
        part, server = join_tree(world, plan, cell, places, size=_buffered(plan), averages=_averages(plan))
    elif assignment.role is Role.SERVER:
        part, server = _join_as_server(world, plan, cell, shards, places)
    elif assignment.role is Role.SPARE:
        part, server = _join_as_spare(world, plan, cell, shards, places)
    elif cell.servers:
        part = _join_as_worker(world, plan, cell, shards, places, group=group)
    else:
        assert group is not None  # `Topology.of_training` allows nothing else
        part = _join_as_trainer(plan, group, places)
    return Member(
        part=part,
        role=assignment.title,
        place=place,
        threads=threads,
        table=table,
        workers=len(cell.workers),
        servers=len(cell.servers),
        heirs=heirs,
        sub_servers=len(cell.branches),
        trains=tuple(rank for ranks in cell.groups for rank in ranks),
        worker=assignment.worker,
        server=server,
        group=group,
        group_size=group_size,
        clock=clock,
        disengage=disengage if group is None else partial(_leave_group, group, disengage),
    )


def _check_options(world: RankWorld, plan: TrainingPlan) -> None:
    """Refuse ways to send gradients that this world or this algorithm does not have."""
    if world.of_trial and plan.ranks.all_reduce != "auto":
        raise ConfigurationError(
            f"all_reduce={plan.ranks.all_reduce!r} in a trial of a search: there the ranks of a group "
            "add up gradients by messages, so that the trial can be broken off; leave all_reduce out"
        )
    if plan.ranks.overlap:
        _check_overlap(plan)


def _check_overlap(plan: TrainingPlan) -> None:
    """Refuse gradients that leave while they are made where a step does not send them as they are."""
    algorithm, servers = plan.algorithm, plan.ranks.servers
    if plan.ranks.grouped:
        problem = "in groups: all_reduce='thread' adds up gradients while they are made"
    elif algorithm.tree():
        problem = "with sub_servers: they send what they have added up"
    elif algorithm.lag:
        problem = f"with lag={algorithm.lag}, which hides the whole exchange; leave one of them out"
    elif algorithm.wire != "float32":
        problem = f"with wire={algorithm.wire!r}, which needs the whole gradient; leave one of them out"
    elif not algorithm.worker(1, 1).sends_each_gradient:
        problem = (
            f"with {readable(algorithm.describe())}: it does not send the gradient of each step as it is"
        )
    elif servers > 1 and algorithm.sampled(plan.parameters.vector.size, 2) is not None:
        problem = (
            f"with {type(algorithm).__name__} and servers={servers}: it needs numbers of the whole first"
        )
    else:
        return
    raise ConfigurationError(f"overlap=True is not possible {problem}")


def _has_heirs(world: RankWorld, plan: TrainingPlan, cell: Cell) -> bool:
    """Return whether workers take the places of dead servers, none of them those of two (collective).

    Raises:
        ConfigurationError: it was asked for, but nobody would train on, or none can.
    """
    asked, servers, workers = plan.ranks.heir, len(cell.servers), len(cell.workers)
    obstacle = "in a trial of a search" if world.of_trial else "with sub_servers" if cell.branches else ""
    if asked is None:
        able = 0 < servers < workers and not (obstacle or cell.spares or plan.ranks.grouped)
        # Ranks that share a process die together.
        dies_alone = world.survives_loss and world.own_process
        return able and dies_alone and _has_room_for_heirs(world, plan, cell)
    if not asked:
        return False
    if obstacle:
        raise ConfigurationError(f"heir=True {obstacle} is not possible; leave heir out")
    if workers <= servers:
        missing = servers + 1 - workers
        raise ConfigurationError(
            f"heir=True with {plural(servers, 'server')} and {plural(workers, 'worker')} is not possible: "
            f"nobody would train once workers serve in the places of all servers. Start {missing} more "
            f"rank{'s' * (missing > 1)}, or leave heir out"
        )
    if not world.survives_loss and world.rank == 0:
        warn(
            "heir=True, but here the job ends with any rank that dies; start it by "
            "mpiexec --with-ft ulfm of Open MPI 5, or leave heir out"
        )
    return world.survives_loss


def _has_room_for_heirs(world: RankWorld, plan: TrainingPlan, cell: Cell) -> bool:
    """Return whether the hosts of the workers that would be heirs have the memory for it (collective)."""
    heirs = [rank for index in range(len(cell.servers)) for rank in _heirs_of(index, cell)]
    # Messages of each other worker, and two copies of up to so many vectors while one of them arrives.
    vectors = (1 + plan.ranks.overlap) * len(cell.workers) + 2 * _COPIED_VECTORS
    needed = 4 * vectors * plan.parameters.vector.size // len(cell.servers)
    told = [text.split(maxsplit=1) for text in world.gather_text(f"{free_memory()[0]} {world.host}")]
    for heir in heirs:
        free, host = int(told[heir][0]), told[heir][1]
        if needed * sum(told[one][1] == host for one in heirs) > free // _FOR_HEIRS:
            if world.rank == 0:
                warn(
                    f"no worker holds a copy of the server's state, so that its death ends the job: rank "
                    f"{heir} on {host} would need {needed / 2**30:.1f} GiB for it, of {free / 2**30:.1f} GiB "
                    "that are free there. heir=True has it nevertheless, heir=False says nothing"
                )
            return False
    return True


def _heirs_of(index: int, cell: Cell) -> tuple[int, ...]:
    """Return the workers that take the place of a server, in this order; another one trains even then.

    Of several servers each has one.
    """
    alone = len(cell.servers) == 1
    return cell.workers[: min(_HEIRS, len(cell.workers) - 1)] if alone else cell.workers[index : index + 1]


def _heirs(shards: Sequence[Shard], cell: Cell) -> set[int]:
    """Return the workers that take the places of servers."""
    return {rank for shard in shards for rank in shard.spares if rank in cell.workers}


def _grouped(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    ranks: Sequence[int],
    places: Sequence[Place],
    *,
    naps: bool,
) -> GroupRank:
    way = plan.ranks.all_reduce
    lasts = world.survives_loss and not world.of_trial and ALL_REDUCES[way].lasts
    group = world.group(ranks, naps=naps, lasting=lasts)
    if world.of_trial:
        return GroupRank(group)  # whose messages a trial can break off; no other way to add up can be
    one_host = world.own_process and len({places[rank].host for rank in ranks}) == 1

    def reducer(group: Group) -> Reducer:
        return reducer_of(way, group, one_host=one_host)

    # With servers the lead talks for all; without, each can do what it does.
    lasting: Literal["", "any", "led"] = "" if not lasts else "led" if cell.servers else "any"
    return GroupRank(group, reducer, plan.parameters.layout, lasting=lasting)


def _leave_group(group: GroupRank, disengage: Callable[[], None]) -> None:
    group.reducer.close()
    disengage()


def _join_as_trainer(plan: TrainingPlan, group: GroupRank, places: Sequence[Place]) -> GroupTrainer:
    return GroupTrainer(
        group,
        plan.parameters,
        plan.gradient,
        plan.alone_optimizer,
        averages=_averages(plan),
        rule=_group_rule(plan),
        numbers=_buffered(plan),
        hosts=[place.host for place in places],
    )


def _group_rule(plan: TrainingPlan) -> GroupRule | None:
    if not plan.algorithm.steps_groups:
        return None
    size = plan.parameters.vector.size
    return plan.algorithm.group(size, plan.alone_optimizer or plan.center_optimizer(slice(0, size)))


def _join_as_worker(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    shards: list[Shard],
    places: Sequence[Place],
    *,
    group: GroupRank | None,
) -> WorkerRank:
    leads = group is None or group.index == 0
    worker = _worker(plan, cell, shards, world.rank if group is None else group.group.ranks[0])
    parameters = worker.parameters
    queries = _query_client(world, plan, cell, shards)
    heirs = _heirs(shards, cell)
    spares = heirs or cell.spares
    hosts = {rank: places[rank].host for rank in (*cell.servers, *spares) if rank != world.rank}
    common: dict[str, Any] = {
        "stall_timeout_s": plan.ranks.stall_timeout_s,
        "tells": world.rank == cell.workers[0],
        "on_drop": world.cast_off,
        "spares": spares,
        "drop": world.drop,
    }
    endpoint: Endpoint = world.open(_links(plan, cell, shards, world.rank))
    if world.rank in heirs:

        def serve() -> SpareRank:
            # The rule that it serves by is made when it does: that may take memory, and the user's optimizer.
            idle = EASGD().center(plan.parameters.vector, 1, None)
            return _spare(world, plan, cell, shards, places, endpoint=endpoint, queries=queries, rule=idle)

        return HeirRank(endpoint, worker, queries, hosts, serve=serve, **common)
    if group is None:
        return WorkerRank(endpoint, worker, queries, hosts, **common)
    asking = endpoint
    if leads:
        endpoint = LeadEndpoint(endpoint, group.group, queries.shard)
        asking = QueryEndpoint(endpoint)
    else:
        size = max(_link(plan, shard.server, shard, serving=False).size for shard in shards)
        endpoint = MemberEndpoint(endpoint, group.group, size)
    return GroupWorkerRank(group, parameters, endpoint, worker, queries, hosts, asking=asking, **common)


def _worker(plan: TrainingPlan, cell: Cell, shards: Sequence[Shard], rank: int) -> Worker:
    """Return the state machine of a worker."""
    return Worker(
        rank,
        plan.algorithm,
        plan.parameters if plan.own_parameters is None else plan.own_parameters,
        plan.gradient,
        shards,
        workers=len(cell.workers),
        members=len(cell.groups[0]),
        local=plan.local_optimizer,
        given_sums=plan.given_sums,
    )


def _join_as_server(
    world: RankWorld, plan: TrainingPlan, cell: Cell, shards: list[Shard], places: Sequence[Place]
) -> tuple[ServerRank, Server]:
    index = cell.servers.index(world.rank)
    mine = shards[index]
    server = _server(world, plan, cell, shards, mine)
    if not plan.algorithm.lag and worth_threads(server.rule.center.size):
        server.threads = BorrowedThreads(world.rank, places, cell.servers, cell.groups)
    service: TrainingQueries | None = None
    if index == 0:
        every = *cell.servers, *cell.spares
        service = _service(world, plan, cell, shards, server.rule, servers=every)
    serving = ServerRank(
        world.open(_links(plan, cell, shards, world.rank)),
        server,
        plan.parameters,
        shards,
        queries=service or _query_client(world, plan, cell, shards),
        service=service,
        stall_detector=_stall_detector(plan, cell, places, tells=index == 0),
        drop=world.drop,
        groups=cell.groups,
        hosts=_hosts(cell, shards, places),
    )
    return serving, server


def _join_as_spare(
    world: RankWorld, plan: TrainingPlan, cell: Cell, shards: list[Shard], places: Sequence[Place]
) -> tuple[SpareRank, Server]:
    endpoint, queries = (
        world.open(_links(plan, cell, shards, world.rank)),
        _query_client(world, plan, cell, shards),
    )

    def train(shards: Sequence[Shard], place: PlaceTaken) -> PlacedRank:
        worker = _worker(plan, cell, shards, world.rank)
        worker.begin_in_place(place.epochs, place.views, place.pauses)
        return PlacedRank(
            endpoint,
            worker,
            queries,
            {one: places[one].host for shard in shards for one in (shard.server, *shard.spares)},
            index=cell.workers.index(place.worker),
            stall_timeout_s=plan.ranks.stall_timeout_s,
            tells=False,
            on_drop=world.cast_off,
            spares={spare for shard in shards for spare in shard.spares},
            drop=world.drop,
        )

    dies_alone = world.survives_loss and cell.spares_may_train
    spare_rank = _spare(
        world,
        plan,
        cell,
        shards,
        places,
        endpoint=endpoint,
        queries=queries,
        train=train if dies_alone else None,
    )
    return spare_rank, spare_rank.server


def _spare(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    shards: list[Shard],
    places: Sequence[Place],
    *,
    endpoint: Endpoint,
    queries: QueryClient,
    rule: CenterRule | None = None,
    train: Callable[[Sequence[Shard], PlaceTaken], PlacedRank] | None = None,
) -> SpareRank:
    """Return the part of a rank that serves in the place of a dead server."""
    shard = next(one for one in shards if world.rank in one.spares)  # the first that it may serve
    server = _server(world, plan, cell, shards, shard, rule=rule)

    def serve_another(shard: Shard) -> tuple[CenterRule, Wire]:
        return _rule(plan, cell, shards, shard), _wire(plan, shard)

    def serve_queries(workers: Sequence[int], others: Sequence[int], pauses: int) -> TrainingQueries:
        serve = world.rank, *others
        return _service(world, plan, cell, shards, server.rule, servers=serve, workers=workers, pauses=pauses)

    return SpareRank(
        endpoint,
        server,
        plan.parameters,
        shards,
        queries=queries,
        serve_another=serve_another,
        serve_queries=serve_queries,
        stall_detector=_stall_detector(plan, cell, places, tells=True),
        drop=world.drop,
        hosts=_hosts(cell, shards, places),
        train=train,
    )


def _hosts(cell: Cell, shards: Sequence[Shard], places: Sequence[Place]) -> dict[int, str]:
    """Return the hosts of all ranks that may serve."""
    return {rank: places[rank].host for rank in (*cell.servers, *cell.spares, *_heirs(shards, cell))}


def _links(plan: TrainingPlan, cell: Cell, shards: Sequence[Shard], rank: int) -> list[Link]:
    """Return the links of a rank; those of its peers are their mirror images.

    Who may serve a shard has a link for it to every other rank, and for queries, too, if it is the first
    shard. Of two that may both serve it the earlier serves the later, and sends it copies.
    """
    links = []
    members = {one for group in cell.groups for one in group[1:]}  # their lead exchanges for them
    trains = [one for group in cell.groups for one in group]
    ranks = [*cell.servers, *trains, *cell.spares]
    for shard in shards:
        may_serve = (shard.server, *shard.spares)
        for serves in may_serve:
            for served in ranks:
                both = served in may_serve
                if rank not in (serves, served) or (
                    both and may_serve.index(served) <= may_serve.index(serves)
                ):
                    continue
                peer, serving = (served, True) if rank == serves else (serves, False)
                if served not in members:
                    links.append(_link(plan, peer, shard, serving=serving))
                if shard.index == 0:
                    links.append(_query_link(plan, shards, peer, serving=serving))
                if both:
                    links.append(Link(peer, len(shards) + 1, PIECE, 1, not serving))
    return links


def _server(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    shards: Sequence[Shard],
    mine: Shard,
    *,
    rule: CenterRule | None = None,
) -> Server:
    """Return the state machine of a shard on this rank; another `rule` is replaced before it serves."""
    return Server(
        rule or _rule(plan, cell, shards, mine),
        cell.workers,
        rank=world.rank,
        shard=mine.index,
        depth=plan.algorithm.lag + 1,
        other_servers={*cell.servers, *cell.spares, *_heirs(shards, cell)} - {world.rank},
        record=plan.record,
        by_parts=True,
        wire=_wire(plan, mine),
    )


def _rule(plan: TrainingPlan, cell: Cell, shards: Sequence[Shard], mine: Shard) -> CenterRule:
    """Return the centre's half of the algorithm for a shard; the centre is a view of the parameters."""
    center = plan.parameters.vector[mine.place]
    optimizer = plan.algorithm.at_center(plan.center_optimizer(mine.place), center.size)
    rule = plan.algorithm.center(center, len(cell.workers), optimizer)
    rule.in_groups(len(cell.groups[0]))
    if len(shards) > 1:
        rule.share(plan.parameters.vector.size)
    told = rule.gain_report()
    if told is not None and told.held_bytes:
        _LOG.info("a copy of the centre is kept to go back to: %.3g MB on this server", told.held_bytes / 1e6)
    return rule


def _wire(plan: TrainingPlan, shard: Shard) -> Wire:
    return Wire(plan.algorithm, plan.parameters.layout, shard.place)


def _stall_detector(plan: TrainingPlan, cell: Cell, places: Sequence[Place], *, tells: bool) -> StallDetector:
    hosts = {rank: places[rank].host for rank in cell.workers}
    return StallDetector(hosts, stall_timeout_s=plan.ranks.stall_timeout_s, tells=tells)


def _service(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    shards: list[Shard],
    rule: CenterRule,
    *,
    servers: Sequence[int],
    workers: Sequence[int] | None = None,
    pauses: int = 0,
) -> TrainingQueries:
    # If commits wait for several workers, a worker that waits for a lease would block the others.
    patient = world.survives_loss and rule.quorum(2) == 1
    trains = [rank for group in cell.groups for rank in group] if workers is None else workers
    leads = cell.workers if workers is None else workers
    averages = _averages(plan)
    return TrainingQueries(
        servers, trains, len(shards), averages, leads=leads, patient=patient, pauses=pauses
    )


def _averages(plan: TrainingPlan) -> Averages:
    start = np.zeros(0, np.float32) if plan.buffers is None else plan.buffers.vector
    return Averages(start, plan.moving, plan.updates)


def _query_client(world: RankWorld, plan: TrainingPlan, cell: Cell, shards: list[Shard]) -> QueryClient:
    return QueryClient(world.rank, cell.servers[0], len(shards), _buffered(plan))


def _buffered(plan: TrainingPlan) -> int:
    # Each layer with moving statistics adds three float64 counts, each as wide as two float32 numbers.
    return 0 if plan.buffers is None else plan.buffers.vector.size + 6 * len(plan.moving)


def _link(plan: TrainingPlan, peer: int, shard: Shard, *, serving: bool) -> Link:
    places = plan.algorithm.sampled(plan.parameters.vector.size, 2)
    size = max(shard.place.stop - shard.place.start, plan.options, 0 if places is None else places.size)
    packed = 0 if plan.algorithm.lag else _wire(plan, shard).packed_size
    ahead = shard.place.stop - shard.place.start if plan.ranks.overlap else packed
    return Link(peer, shard.index, size, plan.algorithm.lag + 1, serving, ahead, in_order=packed > 0)


def _query_link(plan: TrainingPlan, shards: Sequence[Shard], peer: int, *, serving: bool) -> Link:
    return Link(peer, len(shards), QUERY_NUMBERS + _buffered(plan), 1, serving)
