"""Spare rank: holds copies of servers' states, and serves in the place of one that has died."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common.algorithms import CenterRule
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector, telling_places
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    Event,
    Kind,
    Lost,
    Message,
    QueryClient,
    Received,
    Server,
    Shard,
    Standing,
    Wire,
    shards_without,
)
from nnlo_common.protocol._query_messages import LeaveQuery, PauseQuery
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._server_rank import ServerRank, TrainingQueries
from nnlo_common.training._stall_detector import StallDetector, date_and_time
from nnlo_common.training._state_copies import ReceivedCopies

__all__ = ["SpareRank"]

_LOG = logging.getLogger(__name__)


class SpareRank(ServerRank):
    """Goes through the script as a server does, with each epoch's centre, and takes over from a dead one.

    Until then nothing is asked of it. A script that counts, schedules, validates or stops on the server does
    so here, too, so whatever that is based on is known when this rank takes over.

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

    def start(self) -> None:
        """Wait for the first copy of each shard for which this rank is the next to take over."""
        self.wait_until(lambda: all(self._received[index].came_s is not None for index in self._next_for()))
        if not self.standing_by:
            super().start()

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
        else:
            self._early.append(event)

    def _acknowledge(self, event: Received) -> None:
        message = event.message
        if message.last_copy:
            self._endpoint.release(message.sender, event.frame)
            return
        reply = Message(
            Kind.ACK, self._server.rank, message.sequence, 0, message.pulled_at, shard=message.shard
        )
        self._endpoint.send(message.sender, reply, event.frame)

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
            raise PeerLostError(dead, "the server has died before a spare had a copy of its state")
        began_s, state = time.monotonic(), received.state()
        self.standing_by, self.role = False, f"server {shard.index}"
        if shard.index != self._server.shard:
            self._serve_shard(shard)
        self._shards = {one.index: one for one in shards_without([*self._shards.values()], dead)}
        self._missing.discard(shard.index)
        self._pulls.pop(shard.index, None)
        departed = {rank for index, rank in self._departed if index == shard.index}
        center = self._parameters.vector[shard.place]
        final = center.copy() if shard.index in self._had else None
        self._server.take_over(state["server"], departed & self._server.peers.keys())
        if final is not None:  # it has come since the copy
            np.copyto(center, final)
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
        self._begin_copies()
        old_s = began_s - received.came_s
        told = f"{self._replaced_by(shard, dead)}, from a copy of {old_s:.1f} s before"
        self._losses.append(f"{told}, at {date_and_time()}")
        _LOG.warning("nnlo: %s. What workers have contributed since is lost", told)
        self._replaced = len(self._losses) - 1
        for rank in self._gone & self._server.peers.keys():
            if not self._server.peers[rank].gone:
                self._serve(Lost(rank))
        early, self._early = self._early, []
        for event in early:
            if event.message.sender in self._gone:
                self._endpoint.release(event.message.sender, event.frame)
            else:
                self._serve(event)
        self._let_late_pauses()

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
        self.service.load_copy(state)

    def _serve(self, event: Event) -> None:
        """Take an event in the place of the server."""
        if isinstance(event, Received) and event.message.kind is Kind.COPY:
            self._acknowledge(event)  # the last of a server that has not heard of the death yet
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
