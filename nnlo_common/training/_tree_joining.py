"""Joining an elastic tree, as the top server, a sub-server or a worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from nnlo_common.algorithms import Algorithm
from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.cluster._hosts import Place
from nnlo_common.cluster._topology import Cell
from nnlo_common.cluster.transport._endpoint import Link, RankWorld
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Averages,
    Event,
    Lost,
    Message,
    QueryClient,
    Received,
    Server,
    Shard,
    ShardClient,
    SubServer,
    Wire,
    Worker,
)
from nnlo_common.protocol._query_messages import GoodbyeQuery, LeaveQuery
from nnlo_common.training._plan import TrainingPlan
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._stall_detector import StallDetector
from nnlo_common.training._training_queries import TrainingQueries
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["SubServerRank", "TopServerRank", "check_layout", "check_tree", "join_tree"]

# -- ranks of an elastic tree that serve: the top server, which knows all ranks, and sub-servers -------


class TopServerRank(ServerRank):
    """Holds the centre; exchanges with sub-servers, and answers the queries of all ranks.

    Args:
        branches: the ranks of each branch, its sub-server first.
        rest: see `ServerRank`.
    """

    def __init__(self, *rest: Any, branches: Sequence[Sequence[int]], **options: Any) -> None:
        super().__init__(*rest, **options)
        self._subs = {branch[0]: tuple(branch[1:]) for branch in branches}
        self._trains = {rank for ranks in self._subs.values() for rank in ranks}
        self._dead: set[int] = set()

    def stop(self) -> None:
        """Ask each worker to end; sub-servers hear of it at once."""
        super().stop()
        self._tell_wishes()

    def tell_rate(self, rate: float) -> None:
        """Send workers a learning rate from now on; sub-servers hear of it at once."""
        super().tell_rate(rate)
        self._tell_wishes()

    def want_pause(self) -> None:
        """Ask all for a pause; sub-servers hear of it at once."""
        super().want_pause()
        self._tell_wishes()

    def view(self, into: Vector) -> None:
        """Copy the centre into `into`: sub-servers have it from the end of the epoch, and show it."""
        self.look(into)

    def saving(self) -> set[int]:
        """Return the other ranks that save: the sub-servers, and the workers that have not left."""
        assert self.service is not None  # this is the first server
        return set(self._subs) | (self._trains & self.service.present)

    def workers(self) -> set[int]:
        """Return the ranks of all workers."""
        return set(self._trains)

    def lost(self) -> set[int]:
        """Return the ranks of the workers that have died."""
        return set(self._dead)

    def _is_awaited(self, rank: int) -> bool:  # noqa: ARG002 - sub-servers watch their workers
        return False

    def _assembled(self) -> bool:
        return True  # sub-servers pull at the ends of epochs whenever this rank serves

    def _left(self, sender: int) -> None:
        """Do nothing: workers and sub-servers tell the query service themselves."""

    def _take_shard(self, event: Received) -> None:
        perform(self._endpoint, self._server.handle(event))  # the pull of a sub-server

    def _lost(self, event: Lost) -> None:
        if event.rank in self._subs:
            workers = ", ".join(map(str, self._subs[event.rank]))
            raise PeerLostError(
                event.rank, f"the sub-server of the workers {workers} has died, and its centre with it"
            )
        if event.rank not in self._trains or event.rank in self._dead:
            return
        self._dead.add(event.rank)
        left = self._trains - self._dead
        self._losses.append(self._stall_detector.report_death(event.rank, len(left)))
        perform(self._endpoint, self._queries.handle(event))
        if not left:
            raise PeerLostError(event.rank, "the last worker has died")

    def _tell_wishes(self) -> None:
        perform(self._endpoint, self._server.tell_wishes())


class SubServerRank(ServerRank):
    """Serves the workers of a branch; its model shows the top's centre at the end of the last epoch.

    Args:
        server: the state machine; its own centre is no part of the model.
        rest: see `ServerRank`.
    """

    def __init__(self, endpoint: Any, server: SubServer, *rest: Any, **options: Any) -> None:
        super().__init__(endpoint, server, *rest, **options)
        self._machine = server
        self._top = server.client.shard.server
        self._of = f" of the sub-server on rank {server.rank}"

    def end_epoch(self) -> None:
        """Serve until every remaining worker has finished one more epoch, and all other branches, too."""
        super().end_epoch()
        self.wait_until(lambda: self._machine.shown_epochs >= self._epochs or self._machine.final)

    def tell_rate(self, rate: float) -> None:
        """Do nothing: workers get the rate of the top server."""

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Serve until every worker has left and the final centre is here; call `last`, then leave."""
        self._leaving = True
        self.ask(LeaveQuery())
        self.wait_until(lambda: self._machine.final)
        last()
        self.ask(GoodbyeQuery())
        self._endpoint.close()

    def _go_on(self, state: Any, *, others: bool = False) -> None:  # noqa: ARG002 - never with others
        self._epochs = self._machine.shown_epochs

    def _is_awaited(self, rank: int) -> bool:
        return super()._is_awaited(rank) and not self._machine.holds(rank)

    def _warn_of_leaving(self, message: Message) -> None:
        """Do nothing: the top server warns."""

    def _handle(self, event: Event) -> None:
        if isinstance(event, Received) and event.message.sender == self._top:
            if event.message.shard == self._queries.shard:
                perform(self._endpoint, self._queries.handle(event))
            else:
                perform(self._endpoint, self._machine.handle(event))
                self._look_for_pause()
            return
        super()._handle(event)

    def _lost(self, event: Lost) -> None:
        if event.rank == self._top:
            raise PeerLostError(event.rank, "the top server of the tree has died")
        super()._lost(event)


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
            f"wire={algorithm.wire!r} with servers=0 is not possible: nothing goes to a server there; leave "
            "it out, and let the ranks add up their gradients in 16 bits by all_reduce='bfloat16'"
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
        shards = [Shard(_CENTER, self._world.rank, self._whole)]
        return kind(endpoint, server, parameters, shards, stall_detector=stall_detector, **common)

    def _stall_detector(self, ranks: Sequence[int], *, tells: bool) -> StallDetector:
        hosts = {rank: self._places[rank].host for rank in ranks}
        return StallDetector(hosts, stall_timeout_s=self._plan.ranks.stall_timeout_s, tells=tells)

    def _query_client(self) -> QueryClient:
        return QueryClient(self._world.rank, self._top, _QUERIES, self._size)

    def _link(self, peer: int, channel: int, *, serving: bool) -> Link:
        vector = max(self._whole.stop, self._plan.options)
        return Link(peer, channel, QUERY_NUMBERS + self._size if channel == _QUERIES else vector, 1, serving)
