"""Spares and heirs: ranks that hold copies of servers' states, and serve in the place of a dead one.

A spare that no server needs trains in the place of a dead worker.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from nnlo_common.algorithms import CenterRule
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector, telling_places
from nnlo_common.base._state_tree import State
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    REPLIES,
    Action,
    Activity,
    Event,
    Kind,
    Lost,
    Message,
    QueryClient,
    Received,
    Release,
    Send,
    Server,
    Shard,
    Standing,
    Wait,
    Wire,
    Worker,
    shards_without,
)
from nnlo_common.protocol._query_messages import (
    Answer,
    AnswerT,
    BroadcastQuery,
    GiveBackQuery,
    HeldLeasesAnswer,
    HeldLeasesQuery,
    LeaseAnswer,
    LeaseQuery,
    LeaveQuery,
    PauseQuery,
    PlaceQuery,
    Query,
)
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._stall_detector import StallDetector, date_and_time
from nnlo_common.training._state_copies import ReceivedCopies
from nnlo_common.training._training_queries import TrainingQueries
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["HeirRank", "PlaceTaken", "PlacedRank", "SpareRank"]

_LOG = logging.getLogger(__name__)

# What a rank that trains no more hears of samples: it gets none, and holds none.
_WITHOUT_SAMPLES: Mapping[type[Query[Any]], Answer] = {
    LeaseQuery: LeaseAnswer(lease=None),
    GiveBackQuery: Answer(),
    HeldLeasesQuery: HeldLeasesAnswer(leases=()),
}


@dataclass(slots=True)
class _ServerInheritance:
    """What a worker knows when it begins to serve in the place of a dead server.

    Attributes:
        copies: of the server's state.
        early: messages of workers that have heard of the death first.
        departed: workers that have left.
        gone: ranks that have died.
        epochs: those that it has finished.
        views: how often it has viewed the centre at the end of an epoch.
        ends: its script is over.
    """

    copies: ReceivedCopies = field(default_factory=ReceivedCopies)
    early: list[Received] = field(default_factory=list)
    departed: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    epochs: int = 0
    views: int = 0
    ends: bool = False


@dataclass(frozen=True, slots=True)
class PlaceTaken:
    """Where a spare begins to train.

    Attributes:
        worker: the dead worker.
        epochs: those that are finished.
        views: how often all ranks have viewed the centre together.
        pauses: the number of the last pause.
    """

    worker: int
    epochs: int
    views: int
    pauses: int


class SpareRank(ServerRank):
    """Goes through the script as a server does, with each epoch's centre, and takes over from a dead one.

    Until then nothing is asked of it. A script that counts, schedules, validates or stops on the server does
    so here, too, so whatever that is based on is known when this rank takes over. If no server needs this
    rank, it trains once a worker has died: see `take_place`.

    Args:
        endpoint: this rank's endpoint.
        server: the state machine that will serve, made for the first shard that this rank may serve; its
            centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        shards: all shards, each with the rank that serves it and those that take over.
        queries: sends queries to the query service.
        serve_another: makes what the machine needs to serve another shard.
        serve_queries: makes the query service on this rank, for workers, and for other servers and spares;
            the last number is that of the pauses between epochs that it has known.
        stall_detector: records when each worker was heard.
        drop: takes a stalled rank out of the job if the others can continue.
        hosts: the hosts of all ranks that may serve.
        train: makes the part that trains in the place of a dead worker; None: it never does.

    Attributes:
        standing_by: this rank has not taken over.
        role: the role it has taken over; empty while it stands by.
        on_taking_over: called when it takes over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        parameters: FlatVector,
        shards: Sequence[Shard],
        *,
        queries: QueryClient,
        serve_another: Callable[[Shard], tuple[CenterRule, Wire]],
        serve_queries: Callable[[Sequence[int], Sequence[int], int], TrainingQueries],
        stall_detector: StallDetector,
        drop: Callable[[int], bool],
        hosts: Mapping[int, str],
        train: Callable[[Shard, PlaceTaken], PlacedRank] | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            server,
            parameters,
            shards,
            queries=queries,
            service=None,
            stall_detector=stall_detector,
            drop=drop,
            hosts=hosts,
        )
        self.standing_by, self.role = True, ""
        self.on_taking_over: list[Callable[[], object]] = []
        self._client, self._serve_another, self._serve_queries = queries, serve_another, serve_queries
        # Of each shard that this rank may serve; and whose these are, by the ranks that may send copies.
        self._received = {one.index: ReceivedCopies() for one in shards if server.rank in one.spares}
        self._copied_by = {
            rank: index for index in self._received for rank in (shards[index].server, *shards[index].spares)
        }
        self._early: list[Received] = []  # from ranks that have heard of the death first
        # Shards, and the workers and servers that need no more of them.
        self._departed: set[tuple[int, int]] = set()
        self._only_fetches = False  # this rank assembles, and stood by when it began to
        self._ends = False  # the script is over
        self._replaced: int | None = None  # place of a dead server among the losses, until they are counted
        self._trained = False  # this rank was a worker
        self._compares_saves = False  # with those that the workers tell
        self._train = train
        self._placed: dict[int, Message] = {}  # what spares have said that train in dead workers' places

    def start(self) -> None:
        """Wait for the first copy of each shard for which this rank is the next to take over."""
        self.wait_until(lambda: all(self._received[index].came_s is not None for index in self._next_for()))
        if not self.standing_by:
            super().start()

    def take_place(self) -> PlacedRank | None:
        """Return the part that trains in the place of a dead worker from now on; None: stay a spare.

        Call it before each epoch, and this part no more once it has returned another.
        """
        rank = self._server.rank
        may = self.calls_spares and self.standing_by and len(self._shards) == 1
        if self._train is None or not may or self._next_for():
            return None
        answer = self.ask(PlaceQuery(epochs=self._epochs))
        if answer.place is None or not self.standing_by:
            return None
        (shard,) = self._shards.values()
        earlier = shard.spares[: shard.spares.index(rank)]
        for spare in earlier:  # one of them serves if the server dies before it has copied its new records
            told = Message(Kind.PLACE, rank, 0, self._epochs, answer.place, shard=shard.index)
            self._endpoint.send(spare, told)
        place = PlaceTaken(answer.place, self._epochs, self._views, answer.pauses)
        return self._train(replace(shard, spares=earlier), place)

    def _next_for(self) -> list[int]:
        """Return the shards whose servers this rank takes over from, the next time they die."""
        shards = self._shards.values() if self.standing_by else ()
        return [one.index for one in shards if one.spares[:1] == (self._server.rank,)]

    def end_epoch(self) -> None:
        """Wait until all workers have finished one more epoch, and fetch the centre."""
        self._epochs += 1
        if self.standing_by:
            self._assemble()
        if not self.standing_by:
            self._epochs -= 1
            super().end_epoch()

    def last_round(self) -> None:
        """Fetch the centre again, after the last round."""
        stood_by = self.standing_by
        super().last_round()
        if stood_by and not self.standing_by:
            super().last_round()

    def view(self, into: Vector) -> None:
        """Copy the centre of this epoch's end into `into`."""
        if self.standing_by:
            self._views += 1
            self.look(into)
        else:
            super().view(into)

    def pause(self, *, between: bool = False) -> bool:
        """Do nothing while another rank serves but to count: it lets all workers pause."""
        if self.standing_by:
            self._client.record.saves += between
            return True
        if self.service is not None or not between:
            return super().pause(between=between)
        # The pause may be over. What the dead server has granted its workers tell when they join.
        self.wait_until(lambda: self._server.peers.gathered)
        known = self.ask(PauseQuery(saves=self._client.record.saves + 1))
        return self._pause(known.number, between=between)

    def want_pause(self) -> None:
        """Do nothing while another rank serves."""
        if not self.standing_by:
            super().want_pause()

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Leave; take over until then."""
        self._ends = True
        if self.standing_by:
            self.ask(LeaveQuery())
        if self.standing_by:
            self._assemble(for_good=True)
        if not self.standing_by:
            self._catch_up()
            super().finish(last)
            return
        # Alone, the server's death does not matter any more: the centre is final, and here. Of several it
        # does until this rank has heard that the others have the dead one's shard, too.
        self._served = len(self._shards) == 1
        last()
        if self._is_over():
            self._leave()
            self._endpoint.close()
        else:
            self._catch_up()
            super().finish(last)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service; a rank that was a worker gets no more samples."""
        if self._trained and type(query) in _WITHOUT_SAMPLES:
            return cast("AnswerT", _WITHOUT_SAMPLES[type(query)])
        return super().ask(query)

    def inherit(self, known: _ServerInheritance, dead: int) -> None:
        """Take over from a dead server with what this rank knows as a worker."""
        rank = self._server.rank
        (index,) = self._received
        self._trained, self._received[index] = True, known.copies
        self._early, self._departed = known.early, {(index, one) for one in known.departed}
        self._gone |= known.gone
        self._epochs, self._views, self._ends = known.epochs, known.views, known.ends
        self._server.peers[rank].standing = Standing.LOST  # nobody waits for what it would have contributed
        self._without(dead)

    def answered(self) -> Answer:
        """Return the answer to the query that was open when this rank took over."""
        self.wait_until(lambda: self._queries.answer is not None)
        assert self._queries.answer is not None  # waited for
        return self._queries.answer

    def _is_over(self) -> bool:
        """Wait until no more copies come; return whether this rank stands by even so."""
        copying = {index: self._shards[index].server for index in self._received}
        self.wait_until(
            lambda: (
                not self.standing_by
                or all(self._received[index].over or one in self._gone for index, one in copying.items())
            )
        )
        return self.standing_by

    def _catch_up(self) -> None:
        """Wait for the pause of a save that this rank has passed while it stood by, and workers have not."""
        saves = self._client.record.saves
        if self.service is not None:
            self._let_pause(before_epoch=math.inf)
        elif saves:
            self.wait_until(lambda: self._server.peers.gathered)
            number = self.ask(PauseQuery(saves=saves)).number
            pauses, completed = self._server.pauses, self._server.pauses.completed
            self._let_pause(before_epoch=math.inf)
            self.wait_until(
                lambda: (
                    self._server.finished
                    or (pauses.completed > completed if number is None else pauses.made >= number)
                )
            )

    def _assemble(self, *, for_good: bool = False) -> None:
        self._only_fetches = self.standing_by
        super()._assemble(for_good=for_good)
        self._only_fetches = False

    def _assembled(self) -> bool:
        if self._only_fetches:  # until it has taken over: then it assembles again, as a server
            return not self.standing_by or not self._missing
        return super()._assembled()

    def _look(self) -> None:
        if not self.standing_by:
            super()._look()
        elif self.keeper is not None and not self._queries.busy:
            self.keeper.settle()

    # -- while another rank serves --------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if not self.standing_by:
            self._serve(event)
        elif isinstance(event, Lost):
            self._gone.add(event.rank)
            if self._knows(event.rank):
                self._without(event.rank)
        else:
            self._hear(event, event.message)

    def _hear(self, event: Received, message: Message) -> None:
        if message.kind is Kind.COPY:
            self._received[self._copied_by[message.sender]].take(message)
            self._acknowledge(event)
        elif message.kind is Kind.CENTER:
            self._take_shard(event)
        elif message.kind is Kind.ANSWER:
            perform(self._endpoint, self._queries.handle(event))
        elif message.kind is Kind.LEAVE:
            self._departed.add((message.shard, message.sender))
            self._endpoint.release(message.sender, event.frame)
        elif message.kind is Kind.PLACE:
            self._endpoint.release(message.sender, event.frame)
            self._placed[message.sender] = message
            shard = self._shards[message.shard]
            left = tuple(one for one in shard.spares if one != message.sender)
            self._shards[shard.index] = replace(shard, spares=left)
        else:
            self._early.append(event)

    def _acknowledge(self, event: Received) -> None:
        perform(self._endpoint, [_answer_to_copy(event, self._server.rank)])

    def _without(self, rank: int) -> None:
        """Go on without a dead server or spare: the next rank serves each shard that was its, or this one."""
        if self.standing_by:
            if self._served:
                return
            for shard in shards_without([*self._shards.values()], rank):
                if shard.server == self._server.rank:
                    self._take_over(shard, rank)
                    return
        super()._without(rank)

    def _take_shard(self, event: Received) -> None:
        self._server.stopping |= event.message.final  # all workers have left
        super()._take_shard(event)

    def _take_over(self, shard: Shard, dead: int) -> None:
        """Serve a shard in the place of a dead server, from the newest copy of its state."""
        received = self._received[shard.index]
        if received.came_s is None:
            holder = "the first worker" if self._trained else "a spare"
            raise PeerLostError(dead, f"the server has died before {holder} had a copy of its state")
        began_s, state = time.monotonic(), received.state()
        self.standing_by, self.role = False, f"server {shard.index}"
        if shard.index != self._server.shard:
            self._serve_shard(shard)
        self._shards = {one.index: one for one in shards_without([*self._shards.values()], dead)}
        self._missing.discard(shard.index)
        self._pulls.pop(shard.index, None)
        departed = self._take_records(shard, state["server"])
        self.script_state = state["script"]
        serving = {one.server for one in self._others.values()}
        self._server.other_servers = dict.fromkeys(serving | self._standing_by, 0)
        self._server.other_servers |= dict.fromkeys(departed - self._server.peers.keys(), math.inf)
        if self._client.service == dead:
            self._take_over_queries(state["queries"], sorted((serving | self._standing_by) - departed))
        for call in self.on_taking_over:
            call()
        if self.service is not None:
            perform(self._endpoint, self.service.take_over(self._client.told()))
            if self._client.open is not None:
                perform(self._endpoint, self.service.ask(self._client.open))
        self._stall_detector.begin()
        self._stall_detector.tell(tells=shard.index == 0)
        self._keep_spare()
        self._begin_copies()
        old_s = began_s - received.came_s
        how = " and trains no more" * self._trained
        told = f"{self._replaced_by(shard, dead)}{how}, from a copy of {old_s:.1f} s before"
        self._losses.append(f"{told}, at {date_and_time()}")
        _LOG.warning("nnlo: %s. What workers have contributed since is lost", told)
        self._replaced = len(self._losses) - 1
        for rank in self._gone & self._server.peers.keys():
            if not self._server.peers[rank].gone:
                self._serve(Lost(rank))
        self._serve_early()
        if self._trained:
            self._compares_saves = True
        else:
            self._let_late_pauses()

    def _take_records(self, shard: Shard, copy: State) -> set[int]:
        """Load the copy of a dead server's records; return the workers and servers that have left."""
        departed = {rank for index, rank in self._departed if index == shard.index}
        for spare, message in self._placed.items():
            self._server.seat(spare, message.place, message.epochs)
        center = self._parameters.vector[shard.place]
        final = center.copy() if shard.index in self._had else None
        self._server.take_over(copy, departed & self._server.peers.keys())
        if final is not None:  # it has come since the copy
            np.copyto(center, final)
        for spare in self._server.places.keys() - self._server.peers.called():
            self._stall_detector.watch(spare, self._hosts[spare])
        return departed

    def _serve_early(self) -> None:
        """Take what ranks have sent that have heard of the death first."""
        early, self._early = self._early, []
        for event in early:
            if event.message.sender in self._gone:
                self._endpoint.release(event.message.sender, event.frame)
            else:
                self._serve(event)

    def _let_late_pauses(self) -> None:
        """Allow the pause of a save that this rank has passed while it stood by, and workers have not."""
        if self._epochs and (self._ends or not self._only_fetches):
            self._let_pause(before_epoch=self._epochs + 1)

    def _serve_shard(self, shard: Shard) -> None:
        """Let the machine serve another shard than it was made for."""
        rule, wire = self._serve_another(shard)
        self._server.serve(rule, shard.index, wire)
        self._telling = telling_places(self._parameters.layout, shard.place)

    def _take_over_queries(self, state: Mapping[str, Any], others: Sequence[int]) -> None:
        """Answer queries in the place of a dead query service.

        Args:
            state: the newest copy of its state.
            others: the other servers and spares.
        """
        peers = self._server.peers.items()
        workers = [rank for rank, one in peers if not (rank in self._gone or one.gone)]
        self._queries = self.service = self._serve_queries(workers, others, self._client.record.saves)
        self.service.follow(self._server)
        # Who is called after this epoch is decided at its end, which this rank has perhaps not served yet.
        self.service.places.decide(self._epochs - (self._only_fetches and not self._ends))
        self.service.load_copy(state)

    def _serve(self, event: Event) -> None:
        """Take an event in the place of the server."""
        if isinstance(event, Received) and event.message.kind is Kind.COPY:
            self._acknowledge(event)  # the last of a server that has not heard of the death yet
        elif isinstance(event, Received) and event.message.kind is Kind.PLACE:
            message = event.message
            self._endpoint.release(message.sender, event.frame)
            self._server.seat(message.sender, message.place, message.epochs)
            if self.service is not None:
                self.service.admit(message.sender)
        elif isinstance(event, Received) and self._is_for_another(event.message):
            self._early.append(event)
        elif isinstance(event, Received) and self._goes_before_it_returns(event.message):
            self._endpoint.release(event.message.sender, event.frame)
            perform(self._endpoint, self._server.depart(event.message.sender))
            self._left(event.message.sender)
        elif isinstance(event, Received) and self._needs_no_more(event.message):
            perform(self._endpoint, self._server.handle(event))
            self._left(event.message.sender)
        else:
            super()._handle(event)
        if self._compares_saves and self.service is not None and self.service.heard:
            self._compares_saves = False
            if self.service.pauses.behind(self._client.record.saves):
                self._let_pause(before_epoch=self._epochs + 1)
        if self._replaced is not None:
            self._tell_what_is_lost(self._replaced)

    def _is_for_another(self, message: Message) -> bool:
        """Return whether this is for what this rank does not serve: the sender has not heard of a death yet.

        It waits for ever: either it is a LEAVE, or all will hear that nobody serves that shard.
        """
        if message.kind is Kind.ASK:
            return self.service is None
        return message.shard in self._others and message.kind is not Kind.CENTER

    def _needs_no_more(self, message: Message) -> bool:
        """Return whether another server leaves that had not heard that this rank serves."""
        leaves = message.kind is Kind.LEAVE and not message.mark
        return leaves and message.sender in self._server.other_servers

    def _tell_what_is_lost(self, place: int) -> None:
        """Tell how many commits are lost, once all workers have said how many they saw.

        Args:
            place: of the dead server among the losses.
        """
        peers = self._server.peers.items()
        if any(one.standing is Standing.EXPECTED and rank not in self._gone for rank, one in peers):
            return
        self._replaced, lost = None, self._server.commits_lost
        self._losses[place] += f"; lost commits: {lost}"
        _LOG.warning("nnlo: all workers are with rank %d now; lost commits: %d", self._server.rank, lost)

    def _goes_before_it_returns(self, message: Message) -> bool:
        """Return whether a worker leaves that had not heard that this rank serves."""
        peer = self._server.peers.get(message.sender)
        return message.kind is Kind.LEAVE and peer is not None and peer.standing is Standing.EXPECTED


def _answer_to_copy(event: Received, rank: int) -> Action:
    """Return what this rank does with a piece of a copy that it has taken, or does not need."""
    message = event.message
    if message.last_copy:
        return Release(message.sender, event.frame)
    reply = Message(Kind.ACK, rank, message.sequence, 0, message.pulled_at, shard=message.shard)
    return Send(message.sender, reply, event.frame)


class PlacedRank(WorkerRank):
    """Trains in the place of a dead worker; it was a spare.

    Args:
        endpoint: this rank's endpoint, that of the spare.
        worker: the state machine.
        queries: sends queries to the query service.
        hosts: the host of the server and of each spare.
        index: the dead worker's index among the workers.
        options: those of a `WorkerRank`.

    Attributes:
        index: the worker's index among the workers.
        role: its role.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: Worker,
        queries: QueryClient,
        hosts: Mapping[int, str],
        *,
        index: int,
        **options: Any,
    ) -> None:
        super().__init__(endpoint, worker, queries, hosts, **options)
        self.index, self.role = index, f"worker {index}"

    def _deliver(self, event: Received) -> list[Action]:
        message = event.message
        if message.kind is Kind.COPY:
            return [_answer_to_copy(event, self._worker.rank)]
        if message.kind in (Kind.LEAVE, Kind.PLACE):
            return [Release(message.sender, event.frame)]
        if message.kind not in REPLIES:  # from ranks that have heard first that nobody can serve any more
            return []
        return super()._deliver(event)


class _SuccessionError(Exception):
    """The server is dead, and this worker takes its place; it ends what the worker was doing."""

    def __init__(self, dead: int) -> None:
        super().__init__(dead)
        self.dead = dead


class HeirRank(WorkerRank):
    """Trains as a worker, holds a copy of the server's state, and serves once the server has died.

    It hears of the death within a call, as that is where it waits. What the call has begun as a worker's is
    dropped, and ended as a server's; what the script has still to do in this epoch is nothing.

    Args:
        endpoint: this rank's endpoint.
        worker: the state machine.
        queries: sends queries to the query service.
        hosts: the host of each server.
        others: the other workers.
        serve: makes the part that serves.
        options: those of a `WorkerRank`.

    Attributes:
        serving: the part that serves now; None while this rank trains.
        on_taking_over: called when it takes over.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: Worker,
        queries: QueryClient,
        hosts: Mapping[int, str],
        *,
        others: Collection[int],
        serve: Callable[[], SpareRank],
        **options: Any,
    ) -> None:
        super().__init__(endpoint, worker, queries, hosts, **options)
        self._others, self._serve = frozenset(others), serve
        self._known = _ServerInheritance()
        self.serving: SpareRank | None = None
        self.on_taking_over: list[Callable[[], object]] = []

    def start(self) -> None:
        """Join; as a server, wait until all have."""
        super().start()
        if self.serving is not None:
            self.serving.start()

    def end_epoch(self) -> None:
        """Report the end of the epoch; as a server, serve it to its end."""
        super().end_epoch()
        if self.serving is not None:
            self.serving.end_epoch()

    def last_round(self) -> None:
        """Contribute the steps since the last round; a server has none."""
        super().last_round()
        if self.serving is not None:
            self.serving.last_round()

    def look(self, into: Vector) -> None:
        """Copy the current centre into `into`."""
        super().look(into)
        if self.serving is not None:
            self.serving.look(into)

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` once all have finished the epoch."""
        super().view(into)
        if self.serving is not None:
            self.serving.view(into)
        self._known.views += 1

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service, and wait for the answer."""
        answer = super().ask(query)
        if self.serving is None:
            return answer
        if type(query) in _WITHOUT_SAMPLES:
            return self.serving.ask(query)
        return cast("AnswerT", self.serving.answered())

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False: cancelled, or this rank serves now."""
        return super().pause(between=between) and self.serving is None

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`, then leave; serve until then if the server dies while others still train."""
        last()
        self._known.ends = True
        self._work(self._worker.leave(), "the end of the training")
        if self.serving is None:
            self._work(self._until_over(), "the end of the server")
        if self.serving is None:
            self._endpoint.close()
        else:
            self.serving.finish(last)

    def _until_over(self) -> Activity:
        while not self._known.copies.over:
            yield Wait()

    def _work(self, activity: Activity, what: str, endpoint: Endpoint | None = None) -> None:
        try:
            super()._work(activity, what, endpoint)
        except _SuccessionError as lost:
            self._take_over(lost.dead)

    def _lost(self, rank: int, error: PeerLostError | None) -> None:
        self._known.gone.add(rank)
        if rank in self._servers:
            raise _SuccessionError(rank) from error
        super()._lost(rank, error)

    def _deliver(self, event: Received) -> list[Action]:
        message = event.message
        if message.kind is Kind.COPY:
            self._known.copies.take(message)
            return [_answer_to_copy(event, self._worker.rank)]
        if message.sender not in self._others:
            return super()._deliver(event)
        if message.kind is Kind.LEAVE:
            self._known.departed.add(message.sender)
            return [Release(message.sender, event.frame)]
        self._known.early.append(event)
        return []

    def _take_over(self, dead: int) -> None:
        """Serve in the place of the dead server from now on."""
        asked = self._queries.open
        if type(asked) in _WITHOUT_SAMPLES:
            self._queries.drop()
        elif isinstance(asked, BroadcastQuery) and not asked.values:
            raise PeerLostError(dead, "the server has died while it sent its averages to all ranks")
        self._known.epochs = self._worker.epochs
        serving = self.serving = self._serve()
        serving.on_taking_over = self.on_taking_over
        serving.inherit(self._known, dead)
