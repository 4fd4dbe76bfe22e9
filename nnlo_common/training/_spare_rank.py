"""Spare rank: holds a copy of the server's state, and serves in the server's place when it has died."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Event, Kind, Lost, Message, QueryClient, Received, Server, Shard, Standing
from nnlo_common.protocol._query_messages import GoodbyeQuery, LeaveQuery
from nnlo_common.training._rank_parts import perform
from nnlo_common.training._server_rank import ServerRank, TrainingQueries
from nnlo_common.training._stall_detector import StallDetector
from nnlo_common.training._state_copies import ReceivedCopies

__all__ = ["SpareRank"]

_LOG = logging.getLogger(__name__)


class SpareRank(ServerRank):
    """Goes through the script as a server does, with each epoch's centre, and takes over from a dead one.

    Until then nothing is asked of it. A script that counts, schedules, validates or stops on the server does
    so here, too, so whatever that is based on is known when this rank takes over.

    Args:
        endpoint: this rank's endpoint.
        server: the state machine that will serve; its centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        shard: the whole centre, with the rank that serves it and those that take over, this one among them.
        queries: sends queries to the query service.
        serve_queries: makes the query service on this rank, for workers and spares.
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
        shard: Shard,
        *,
        queries: QueryClient,
        serve_queries: Callable[[Sequence[int], Sequence[int]], TrainingQueries],
        stall_detector: StallDetector,
        drop: Callable[[int], bool],
        hosts: Mapping[int, str],
    ) -> None:
        super().__init__(
            endpoint,
            server,
            parameters,
            slice(0, parameters.vector.size),
            [shard],
            queries=queries,
            service=None,
            stall_detector=stall_detector,
            drop=drop,
        )
        self.standing_by, self.role = True, ""
        self.on_taking_over: list[Callable[[], object]] = []
        self._shard, self._client, self._serve_queries, self._hosts = shard, queries, serve_queries, hosts
        self._received = ReceivedCopies()
        self._early: list[Received] = []  # from workers that have heard of the death first
        self._gone: set[int] = set()  # dead ranks that this one knows
        self._departed: set[int] = set()  # workers that have left
        self._replaced: int | None = None  # place of a dead server among the losses, until they are counted
        self._served = False  # all has been served, and this rank may leave

    def start(self) -> None:
        """Wait for the first copy, where this rank is the next to take over."""
        self.wait_until(lambda: self._received.came_s is not None or not self._is_next)
        if not self.standing_by:
            super().start()

    @property
    def _is_next(self) -> bool:
        return self.standing_by and self._shard.spares[0] == self._server.rank

    def end_epoch(self) -> None:
        """Wait until all workers have finished one more epoch, and fetch the centre."""
        self._epochs += 1
        if self.standing_by:
            self._assemble()
        if not self.standing_by:
            self._epochs -= 1
            self._pulls = self._epochs
            super().end_epoch()

    def view(self, into: Vector) -> None:
        """Copy the centre of this epoch's end into `into`."""
        if self.standing_by:
            self._views += 1
            self.look(into)
        else:
            super().view(into)

    def pause(self) -> bool:
        """Do nothing while another rank serves: it lets all workers pause."""
        return True if self.standing_by else super().pause()

    def want_pause(self) -> None:
        """Do nothing while another rank serves."""
        if not self.standing_by:
            super().want_pause()

    def note_save(self) -> None:
        """Note that the others have saved together between two epochs, or are about to."""
        self._client.record.saves += 1

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Leave; take over until then."""
        if self.standing_by:
            self.ask(LeaveQuery())
        if self.standing_by:
            self._assemble(for_good=True)
        if not self.standing_by:
            super().finish(last)
            return
        self._served = True  # the centre is final, and here
        last()
        self.wait_until(lambda: self._received.over or self._shard.server in self._gone)
        perform(self._endpoint, self._queries.ask(GoodbyeQuery()))
        self.wait_until(lambda: self._queries.answer is not None or self._shard.server in self._gone)
        self._endpoint.close()

    def _assembled(self) -> bool:
        return not self.standing_by or not self._missing

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
            self._without(event.rank)
        else:
            self._hear(event, event.message)

    def _hear(self, event: Received, message: Message) -> None:
        if message.kind is Kind.COPY:
            self._received.take(message)
            reply = Message(
                Kind.ACK, self._server.rank, message.sequence, 0, message.pulled_at, shard=message.shard
            )
            self._endpoint.send(message.sender, reply, event.frame)
        elif message.kind is Kind.CENTER:
            self._take_shard(event)
        elif message.kind is Kind.ANSWER:
            perform(self._endpoint, self._queries.handle(event))
        elif message.kind is Kind.LEAVE:
            self._departed.add(message.sender)
            self._endpoint.release(message.sender, event.frame)
        else:
            self._early.append(event)

    def _without(self, rank: int) -> None:
        """Go on without a dead rank: another spare takes over from a dead server, or this one does."""
        self._gone.add(rank)
        if rank not in (self._shard.server, *self._shard.spares) or self._served:
            return
        dead, left = self._shard.server, self._shard.without(rank)
        assert left is not None  # this rank is one of them
        self._shard = left
        if left.server == dead:
            return
        if left.server == self._server.rank:
            self._take_over(dead)
            return
        self._others = {left.index: left}
        perform(self._endpoint, self._client.return_to(left.server))
        self._ask_for_missing()

    def _take_shard(self, event: Received) -> None:
        self._server.stopping |= event.message.final  # all workers have left
        super()._take_shard(event)

    def _take_over(self, dead: int) -> None:
        """Serve in the place of a dead server, from the newest copy of its state."""
        if self._received.came_s is None:
            raise PeerLostError(dead, "the server has died before a spare had a copy of its state")
        began_s, state = time.monotonic(), self._received.state()
        self.standing_by, self.role = False, f"server {self._shard.index}"
        self._others, self._missing, self._spares = {}, set(), self._shard.spares
        self._server.take_over(state["server"], self._departed)
        self._server.other_servers = dict.fromkeys(self._spares, math.inf)
        workers = [rank for rank, one in self._server.peers.items() if not (rank in self._gone or one.gone)]
        self._queries = self.service = self._serve_queries(workers, self._spares)
        self.service.load_copy(state["queries"])
        for call in self.on_taking_over:
            call()
        perform(self._endpoint, self.service.take_over(self._client.told()))
        if self._client.open is not None:
            perform(self._endpoint, self.service.ask(self._client.open))
        self._stall_detector.begin()
        if self._spares:
            self._begin_copies()
        old_s = began_s - self._received.came_s
        told = (
            f"rank {dead} on {self._hosts[dead]}, the server, has died; rank {self._server.rank} serves in "
            f"its place, from a copy of {old_s:.1f} s before"
        )
        self._losses.append(f"{told}, at {time.strftime('%Y-%m-%d %H:%M:%S')}")
        _LOG.warning("nnlo: %s. What workers have contributed since is lost", told)
        self._replaced = len(self._losses) - 1
        for rank in self._gone & self._server.peers.keys():
            if not self._server.peers[rank].gone:
                self._serve(Lost(rank))
        early, self._early = self._early, []
        for event in early:
            self._serve(event)

    def _serve(self, event: Event) -> None:
        """Take an event in the place of the server."""
        if isinstance(event, Received) and self._goes_before_it_returns(event.message):
            self._endpoint.release(event.message.sender, event.frame)
            perform(self._endpoint, self._server.depart(event.message.sender))
            self._left(event.message.sender)
        else:
            super()._handle(event)
        if self._replaced is not None:
            self._tell_what_is_lost(self._replaced)

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
