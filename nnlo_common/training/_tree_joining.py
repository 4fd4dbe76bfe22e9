"""Joining an elastic tree, as the top server, a sub-server or a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._topology import Cell
from nnlo_common.cluster.transport._endpoint import Link, RankWorld
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Averages,
    QueryClient,
    Server,
    Shard,
    ShardClient,
    SubServer,
    Wire,
    Worker,
)
from nnlo_common.training._plan import TrainingPlan
from nnlo_common.training._stall_detector import StallDetector
from nnlo_common.training._training_queries import TrainingQueries
from nnlo_common.training._tree_ranks import SubServerRank, TopServerRank
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["check_layout", "check_tree", "join_tree"]

PartT = TypeVar("PartT", TopServerRank, SubServerRank)

_CENTER, _QUERIES, _PULLS = range(3)  # the channels; workers see the first two only


def check_layout(algorithm: Algorithm, cell: Cell) -> None:
    """Refuse an algorithm that cannot have so many servers, sub-servers and workers.

    Raises:
        ConfigurationError: it says so, e.g. since a moving rate is not below 1.
    """
    for branch in cell.branches:
        algorithm.check(len(branch) - 1, 1)
    if cell.branches:
        algorithm.check_tree(len(cell.branches))
    elif cell.servers:
        algorithm.check(len(cell.workers), len(cell.servers))
    elif algorithm.wire != "float32":
        raise ConfigurationError(
            f"wire={algorithm.wire!r} with servers=0 is not possible: the ranks of a group add up their "
            "gradients in float32; leave it out, or use a server"
        )


def check_tree(plan: TrainingPlan) -> None:
    """Refuse an option that a training in a tree cannot have.

    Raises:
        ConfigurationError: such an option is given.
    """
    if plan.record:
        raise ConfigurationError(
            f"log_order with sub_servers={plan.algorithm.tree()!r} is not possible: the log is that "
            "of one server; leave one of them out"
        )


def join_tree(
    world: RankWorld,
    plan: TrainingPlan,
    cell: Cell,
    places: Sequence[Place],
    *,
    size: int,
    averages: Averages,
) -> tuple[TopServerRank | SubServerRank | WorkerRank, Server | None]:
    """Return this rank's part, and its state machine if it serves.

    Args:
        world: the ranks.
        plan: this rank's plan.
        cell: the roles of all ranks.
        places: the place of each rank.
        size: the most numbers that a query carries after its JSON.
        averages: averages the buffers, on the top server.
    """
    joining = _Joining(world, plan, cell, places, size)
    if world.rank in cell.servers:
        return joining.top(averages)
    return joining.sub_server() if world.rank in cell.sub_servers else (joining.worker(), None)


class _Joining:
    """What all three roles need."""

    def __init__(
        self, world: RankWorld, plan: TrainingPlan, cell: Cell, places: Sequence[Place], size: int
    ) -> None:
        self._world, self._plan, self._cell, self._places, self._size = world, plan, cell, places, size
        self._top, self._rule = cell.servers[0], plan.algorithm
        self._whole = slice(0, plan.parameters.vector.size)
        self._wire = Wire(plan.algorithm, plan.parameters.layout, self._whole)

    def top(self, averages: Averages) -> tuple[TopServerRank, Server]:
        cell, center = self._cell, self._plan.parameters.vector
        subs, workers = cell.sub_servers, cell.workers
        links = [self._link(rank, channel, serving=True) for rank in subs for channel in (_CENTER, _PULLS)]
        links += [self._link(rank, _QUERIES, serving=True) for rank in (*subs, *workers)]
        rule = self._rule.top_center(center, len(subs))
        server = Server(rule, subs, rank=self._top, other_servers=subs, wire=self._wire)
        ranks, patient = (self._top, *subs), self._world.survives_loss
        service = TrainingQueries(ranks, workers, _QUERIES, averages, patient=patient)
        common = {"queries": service, "service": service, "branches": cell.branches}
        watched = self._stall_detector(workers, tells=False)  # its sub-server warns of a worker
        return self._part(TopServerRank, links, server, watched, common), server

    def sub_server(self) -> tuple[SubServerRank, Server]:
        rank, *workers = self._cell.branch_of(self._world.rank)
        links = [self._link(worker, _CENTER, serving=True) for worker in workers]
        links += [self._link(self._top, channel, serving=False) for channel in (_CENTER, _QUERIES, _PULLS)]
        shown, own = self._plan.parameters.vector, FlatVector(self._plan.parameters.layout)
        np.copyto(own.vector, shown)
        shard = Shard(_CENTER, self._top, self._whole)
        client = ShardClient(rank, shard, self._rule.sub_worker(), own, own, wire=self._wire)
        rule = self._rule.center(own.vector, len(workers), None)
        server = SubServer(rule, workers, client=client, shown=shown, pulls=_PULLS, wire=self._wire)
        common = {"queries": self._query_client(), "service": None, "drop": self._world.drop}
        watched = self._stall_detector(workers, tells=True)
        return self._part(SubServerRank, links, server, watched, common), server

    def worker(self) -> WorkerRank:
        plan, cell, rank = self._plan, self._cell, self._world.rank
        sub, *workers = cell.branch_of(rank)
        links = [self._link(sub, _CENTER, serving=False), self._link(self._top, _QUERIES, serving=False)]
        worker = Worker(
            rank,
            self._rule,
            plan.parameters if plan.own_parameters is None else plan.own_parameters,
            plan.gradient,
            [Shard(_CENTER, sub, self._whole)],
            workers=len(workers),
            local=plan.local_optimizer,
            given_sums=plan.given_sums,
        )
        return WorkerRank(
            self._world.open(links),
            worker,
            self._query_client(),
            {one: self._places[one].host for one in (sub, self._top)},
            stall_timeout_s=plan.ranks.stall_timeout_s,
            tells=rank == workers[0],
            on_drop=self._world.cast_off,
            says_goodbye=True,
        )

    def _part(
        self,
        kind: type[PartT],
        links: list[Link],
        server: Any,
        stall_detector: StallDetector,
        common: dict[str, Any],
    ) -> PartT:
        endpoint, parameters = self._world.open(links), self._plan.parameters
        return kind(endpoint, server, parameters, self._whole, [], stall_detector=stall_detector, **common)

    def _stall_detector(self, ranks: Sequence[int], *, tells: bool) -> StallDetector:
        hosts = {rank: self._places[rank].host for rank in ranks}
        return StallDetector(hosts, stall_timeout_s=self._plan.ranks.stall_timeout_s, tells=tells)

    def _query_client(self) -> QueryClient:
        return QueryClient(self._world.rank, self._top, _QUERIES, self._size)

    def _link(self, peer: int, channel: int, *, serving: bool) -> Link:
        vector = max(self._whole.stop, self._plan.options)
        return Link(peer, channel, QUERY_NUMBERS + self._size if channel == _QUERIES else vector, 1, serving)
