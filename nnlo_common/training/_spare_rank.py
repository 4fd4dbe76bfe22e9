"""Spares: ranks that hold copies of servers' states, and serve in the places of dead ones.

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
    Wire,
    Worker,
    shards_without,
)
from nnlo_common.protocol._query_messages import (
    Answer,
    AnswerT,
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
from nnlo_common.protocol._waiting_requests import heed
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training._stall_detector import StallDetector, date_and_time
from nnlo_common.training._state_copies import ReceivedCopies
from nnlo_common.training._training_queries import TrainingQueries
from nnlo_common.training._worker_rank import WorkerRank

__all__ = [
    "WITHOUT_SAMPLES",
    "PlaceTaken",
    "PlacedRank",
    "ServerInheritance",
    "SpareRank",
    "answer_to_copy",
]

_LOG = logging.getLogger(__name__)

#: What a rank that trains no more hears of samples: it gets none, and holds none.
WITHOUT_SAMPLES: Mapping[type[Query[Any]], Answer] = {
    LeaseQuery: LeaseAnswer(lease=None),
    GiveBackQuery: Answer(),
    HeldLeasesQuery: HeldLeasesAnswer(leases=()),
}


@dataclass(slots=True)
class ServerInheritance:
    """What a worker knows when it begins to serve in the place of a dead server, or to stand by to.

    Attributes:
        copies: of the server's state.
        early: messages of ranks that have heard of the death first.
        departed: workers that have left.
        over: servers, and others that stand by, that need nothing more.
        gone: ranks that have died.
        epochs: those that it has finished.
        views: how often it has viewed the centre at the end of an epoch.
        ends: its script is over.
    """

    copies: ReceivedCopies = field(default_factory=ReceivedCopies)
    early: list[Received] = field(default_factory=list)
    departed: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)
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
        train: Callable[[Sequence[Shard], PlaceTaken], PlacedRank] | None = None,
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
        # Shards, and the workers that have left them, and the servers and spares that need no more of them.
        self._departed: set[tuple[int, int]] = set()
        self._over: set[tuple[int, int]] = set()
        # Shards whose servers have not answered that this rank trains no more.
        self._turning: set[int] = set()
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
        may = self.spare_calls.allowed and self.standing_by
        if self._train is None or not may or self._next_for():
            return None
        answer = self.ask(PlaceQuery(epochs=self._epochs))
        self.wait_until(lambda: not (self.standing_by and self._pulls))  # asked of who has just taken over
        if answer.place is None or not self.standing_by:
            return None
        # Those after this rank train by now.
        shards = [
            replace(one, spares=one.spares[: one.spares.index(rank)]) if rank in one.spares else one
            for one in self._shards.values()
        ]
        # Who serves if a server dies before it has copied its new records; and who has taken over just now.
        to = {one: shard.index for shard in shards for one in (shard.server, *shard.spares)}
        for one, index in to.items():
            if one != shards[0].server:
                told = Message(Kind.PLACE, rank, 0, self._epochs, answer.place, shard=index)
                perform(self._endpoint, [Send(one, told)])
        place = PlaceTaken(answer.place, self._epochs, self._views, answer.pauses)
        return self._train(shards, place)

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
            self.wait_until(lambda: not self._missing)  # since this rank, a worker before, serves
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
        if self._trained and type(query) in WITHOUT_SAMPLES:
            return cast("AnswerT", WITHOUT_SAMPLES[type(query)])
        return super().ask(query)

    def inherit(self, known: ServerInheritance, dead: int) -> None:
        """Take over from a dead server with what this rank knows as a worker."""
        self._begin_with(known, dead)
        self._without(dead)
        self._tell_that_it_turned()
        if not self._ends:
            self._fetch_others()

    def stand_by_after(self, known: ServerInheritance, last: Callable[[], object]) -> None:
        """Stand by once this rank, a worker, has left; call `last` if it takes over."""
        own = self._parameters.vector.copy()
        self._begin_with(known)
        self._tell_that_it_turned()
        self.finish(lambda: None if self.standing_by else last())
        if self.standing_by:
            np.copyto(self._parameters.vector, own)

    def _begin_with(self, known: ServerInheritance, dies: int | None = None) -> None:
        """Begin where this rank was as a worker; a server that `dies` is still to be replaced."""
        (index,), rank = self._received, self._server.rank
        self._trained, self._received[index] = True, known.copies
        self._early = known.early
        self._departed, self._over = (
            {(index, one) for one in ranks} for ranks in (known.departed, known.over)
        )
        self._epochs, self._views, self._ends = known.epochs, known.views, known.ends
        # Nobody waits for what it would have contributed.
        self._server.peers[rank].standing = Standing.LEFT if known.ends else Standing.LOST
        self._server.turned.add(rank)
        self._server.pauses.passed = known.epochs
        self._gone |= known.gone
        for one in known.gone - {dies}:
            if self._knows(one):
                self._shards = {each.index: each for each in shards_without([*self._shards.values()], one)}
                self._server.forget_server(one)

    def _tell_that_it_turned(self) -> None:
        for index in self._others:
            self._turn_towards(index)
        first = self._shards[0].server
        if self._client.service not in (first, self._server.rank) and self.service is None:
            perform(self._endpoint, self._client.return_to(first))  # it has died just before

    def _turn_towards(self, index: int) -> None:
        """Tell the server of another shard that this rank is a worker no more."""
        self._turning.add(index)
        turn = Message(Kind.TURN, self._server.rank, 0, shard=index)
        perform(self._endpoint, [Send(self._shards[index].server, turn)])

    def _fetch_others(self) -> None:
        """Get the other shards: first as they are, then of the end of the last epoch, for which nobody waits.

        Its workers may wait for this rank.
        """
        for epochs in sorted({0, self._epochs}):
            self._missing, self._asked_for = set(self._others), (epochs, False)
            for index in sorted(self._missing):
                self._ask_for(index)
            if not epochs:
                self.wait_until(lambda: not self._missing)

    def _ask_for(self, index: int) -> None:
        if index not in self._turning:  # else once it has answered that
            super()._ask_for(index)

    def _was_for_the_worker(self, event: Received) -> bool:
        """Take the answers of a server to what this rank has asked for as a worker."""
        message = event.message
        shard = self._shards.get(message.shard)
        if message.shard not in self._turning or shard is None or message.sender != shard.server:
            return False
        if message.kind not in REPLIES:
            return False
        heed(message, self._server.rank)
        self._endpoint.release(message.sender, event.frame)
        if message.to_turn:
            self._turning.discard(message.shard)
            if self._asked_for > (0, False) or message.shard in self._missing:
                self._ask_for(message.shard)
        return True

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
                or (
                    all(self._received[index].over or one in self._gone for index, one in copying.items())
                    and not self._is_needed()
                )
            )
        )
        return self.standing_by

    def _is_needed(self) -> bool:
        """Return whether a rank that takes over after this one is still there, and may need a server."""
        rank, lines = self._server.rank, [self._shards[index].spares for index in self._received]
        later = {one for line in lines if rank in line for one in line[line.index(rank) + 1 :]}
        left = {one for index, one in self._over if index in self._received} | self._gone
        return bool(later - left)

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
        if self._was_for_the_worker(event):
            return
        if message.kind is Kind.COPY:
            self._received[self._copied_by[message.sender]].take(message)
            self._acknowledge(event)
        elif message.kind is Kind.CENTER:
            self._take_shard(event)
        elif message.kind is Kind.ANSWER:
            perform(self._endpoint, self._queries.handle(event))
        elif message.kind is Kind.LEAVE:
            gone = self._over if message.needs_no_more else self._departed
            gone.add((message.shard, message.sender))
            self._stood_by(message)
            self._endpoint.release(message.sender, event.frame)
        elif message.kind is Kind.PLACE:
            self._endpoint.release(message.sender, event.frame)
            self._placed[message.sender] = message
            self._shards = {one.index: one.without_spare(message.sender) for one in self._shards.values()}
        else:
            self._early.append(event)

    def _acknowledge(self, event: Received) -> None:
        perform(self._endpoint, [answer_to_copy(event, self._server.rank)])

    def _without(self, rank: int) -> None:
        """Go on without a dead server or spare: the next rank serves each shard that was its, or this one."""
        if self.standing_by:
            if self._served and not self._is_needed():
                return
            for shard in shards_without([*self._shards.values()], rank):
                if shard.server == self._server.rank:
                    self._served = False
                    self._take_over(shard, rank)
                    return
        super()._without(rank)

    def _go_on_with(self, shard: Shard, dead: int) -> None:
        if self._trained and not self._served and shard.server not in self._away:
            self._turn_towards(shard.index)
            if dead == self._client.service and type(self._client.open) in WITHOUT_SAMPLES:
                self._client.drop()
        super()._go_on_with(shard, dead)

    def _take_shard(self, event: Received) -> None:
        self._server.stopping |= event.message.final  # all workers have left
        super()._take_shard(event)

    def _take_over(self, shard: Shard, dead: int) -> None:
        """Serve a shard in the place of a dead server, from the newest copy of its state."""
        received = self._received[shard.index]
        if received.came_s is None:
            holder = f"rank {self._server.rank}" if self._trained else "a spare"
            raise PeerLostError(dead, f"the server has died before {holder} had a copy of its state")
        began_s, state = time.monotonic(), received.state()
        self.standing_by, self.role = False, f"server {shard.index}"
        if shard.index != self._server.shard or self._trained:
            self._serve_shard(shard)
        self._shards = {one.index: one for one in shards_without([*self._shards.values()], dead)}
        self._missing.discard(shard.index)
        self._pulls.pop(shard.index, None)
        over = {rank for index, rank in self._over if index == shard.index}
        self._take_records(shard, state["server"], over)
        self.script_state, self._losses = state["script"], [*state["lost"], *self._losses]
        others = self._standing_by | {one.server for one in self._others.values()}
        self._server.other_servers = {**dict.fromkeys(others, 0), **dict.fromkeys(over, math.inf)}
        if shard.index == 0:  # whose server answers queries
            self._take_over_queries(state["queries"], others - over)
        for call in self.on_taking_over:
            call()
        if self.service is not None:
            perform(self._endpoint, self.service.take_over(self._client.told()))
            if self._client.open is not None:
                perform(self._endpoint, self.service.ask(self._client.open))
        self._stall_detector.begin()
        self._stall_detector.tell(tells=shard.index == 0)
        self.spare_calls.keep()
        if self.service is not None:
            self.spare_calls.tell_all()
        self._begin_copies()
        old_s = began_s - received.came_s
        how = " and trains no more" * self._trained
        told = f"{self._replaced_by(shard, dead)}{how}, from a copy of {old_s:.1f} s before"
        self._losses.append(f"{told}, at {date_and_time()}")
        _LOG.warning("nnlo: %s. What workers have contributed since is lost", told)
        self._replaced = len(self._losses) - 1
        self._tell_places()
        for rank in self._gone & self._server.peers.keys():
            if not self._server.peers[rank].gone:
                self._serve(Lost(rank))
        if self._trained:
            self._refuse_solitude(self._server.rank)
        self._serve_early()
        if self._trained:
            self._compares_saves = True
        else:
            self._let_late_pauses()

    def _tell_places(self) -> None:
        """Say whose places spares have taken, if the dead server has not."""
        for spare, message in self._placed.items():
            self._tell_place(spare, message.epochs)

    def _take_records(self, shard: Shard, copy: State, over: set[int]) -> None:
        """Load the copy of a dead server's records.

        Args:
            shard: the one that it served.
            copy: of its records.
            over: servers and spares that need nothing more.
        """
        departed = {rank for index, rank in self._departed if index == shard.index}
        for spare, message in self._placed.items():
            self._server.seat(spare, message.place, message.epochs)
        center = self._parameters.vector[shard.place]
        final = center.copy() if shard.index in self._had else None
        for one in over & self._server.peers.keys() - departed:  # they have served since they trained
            self._server.peers[one].standing = Standing.LOST
            self._server.turned.add(one)
        self._server.take_over(copy, departed & self._server.peers.keys())
        if final is not None:  # it has come since the copy
            np.copyto(center, final)
        for spare in self._server.places.keys() - self._server.peers.called():
            self._stall_detector.watch(spare, self._hosts[spare])

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
        """Let the machine serve another shard than it was made for, or by another rule."""
        rule, wire = self._serve_another(shard)
        self._server.serve(rule, shard.index, wire)
        self._telling = telling_places(self._parameters.layout, shard.place)

    def _take_over_queries(self, state: Mapping[str, Any], others: Collection[int]) -> None:
        """Answer queries in the place of a dead query service.

        Args:
            state: the newest copy of its state.
            others: the other servers, and those that may serve.
        """
        peers = self._server.peers.items()
        workers = [rank for rank, one in peers if not (rank in self._gone or one.gone)]
        others = sorted({*others}.difference(workers))
        self._queries = self.service = self._serve_queries(workers, others, self._client.record.saves)
        self.service.follow(self._server)
        # Who is called after an epoch is told when this rank begins the next one, or has no more.
        self.service.places.decide(self._epochs - (not self._ends))
        self.service.load_copy(state)

    def _serve(self, event: Event) -> None:
        """Take an event in the place of the server."""
        if isinstance(event, Received) and self._was_for_the_worker(event):
            return
        if isinstance(event, Received) and event.message.kind is Kind.COPY:
            self._acknowledge(event)  # the last of a server that has not heard of the death yet
        elif isinstance(event, Received) and self._is_for_another(event.message):
            self._early.append(event)
        elif isinstance(event, Received) and self._goes_before_it_returns(event.message):
            self._endpoint.release(event.message.sender, event.frame)
            perform(self._endpoint, self._server.depart(event.message.sender))
            self._left(event.message.sender)
        elif isinstance(event, Received) and self._needs_no_more(event.message):
            self._stood_by(event.message)
            perform(self._endpoint, self._server.handle(event))
            if self.service is not None:  # to which it has not said goodbye
                perform(self._endpoint, self.service.left(event.message.sender))
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
        return message.needs_no_more and not message.mark and message.sender in self._server.other_servers

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
        leaves = message.kind is Kind.LEAVE and not message.needs_no_more
        return leaves and peer is not None and peer.standing is Standing.EXPECTED


def answer_to_copy(event: Received, rank: int) -> Action:
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

    def start(self) -> None:
        """Join; of several servers the first before the others, which heed which pauses it has granted."""
        if len(self._worker.shard_clients) == 1:
            super().start()
            return
        self._work(self._worker.join_first(), "the begin of the training")
        pauses = self.ask(PlaceQuery(epochs=0)).pauses
        self._work(self._worker.join_others(pauses), "the begin of the training")

    def _deliver(self, event: Received) -> list[Action]:
        message = event.message
        if message.kind is Kind.COPY:
            return [answer_to_copy(event, self._worker.rank)]
        if message.kind in (Kind.LEAVE, Kind.PLACE, Kind.CALL):
            return [Release(message.sender, event.frame)]
        if message.kind not in REPLIES:  # from ranks that have heard first that nobody can serve any more
            return []
        return super()._deliver(event)
