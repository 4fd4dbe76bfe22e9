"""The part of a server: it holds one shard of the centre, and serves it while workers train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from nnlo_common.algorithms._noise_scale import NoiseScale
from nnlo_common.base._errors import ConfigurationError, DivergedError, PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector, looks_finite, telling_places
from nnlo_common.base._state_tree import State, require
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    AWAITED,
    Answers,
    Event,
    Kind,
    Lost,
    Message,
    QueryClient,
    Received,
    Server,
    Shard,
    Standing,
)
from nnlo_common.protocol._query_messages import AnswerT, GoodbyeQuery, LeaveQuery, Query
from nnlo_common.training._event_loop import Periodic, perform, serve
from nnlo_common.training._roles import LocalStep, TrainingReport
from nnlo_common.training._stall_detector import LOOK_EVERY_S, StallDetector
from nnlo_common.training._training_queries import ALIKE, TrainingQueries

__all__ = ["ServerRank"]

_CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)
_NEVER = 0  # which all have finished
_OF_STEPS = (*_CONTRIBUTIONS, Kind.LOCK)


class Keeper(Protocol):
    """Whoever saves what a server has."""

    def all_pause(self) -> None:
        """All workers pause, and nothing else has been handled since."""

    def settle(self) -> None:
        """The server serves, and does not wait for an answer; called now and then."""


class ServerRank:
    """Holds one shard of the centre; between epochs its parameters are the whole centre.

    Args:
        endpoint: this rank's.
        server: the state machine; its centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        place: which part of them the server holds.
        others: the shards that other servers hold.
        queries: how it asks the query service.
        service: that one itself, on the first server.
        stall_detector: who is heard when.
        drop: ends a rank that stalls, if it can be ended while the others go on; says whether.

    Attributes:
        keeper: who saves what it has; None: nobody does.
        service: the query service, on the first server.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        parameters: FlatVector,
        place: slice,
        others: Sequence[Shard],
        *,
        queries: TrainingQueries | QueryClient,
        service: TrainingQueries | None,
        stall_detector: StallDetector,
        drop: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self._endpoint, self._server, self._parameters = endpoint, server, parameters
        self._queries = queries
        self.service = service
        self._others = {shard.index: shard for shard in others}
        self._epochs = self._views = self._pulls = 0
        self._telling = telling_places(parameters.layout, place)
        self._missing: set[int] = set()
        self._in_view = False  # it waits, between epochs, for all workers to look at the centre
        self._stall_detector, self._drop = stall_detector, drop
        self._dropped: set[int] = set()
        self._losses: list[str] = []
        self._watches = [Periodic(self._look, LOOK_EVERY_S)]
        server.pauses.before_epoch = _NEVER
        self._pauses = 0
        self.keeper: Keeper | None = None

    def start(self) -> None:
        """Serve until every worker has asked to join, so that all ranks get here together."""
        self._serve(lambda: self._server.peers.gathered)

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Refuse: a server gets no batches."""
        raise ConfigurationError(
            f"rank {self._server.rank} serves the centre; make steps inside the loop over batches"
        )

    def begin_epoch(self) -> bool:
        """Do nothing: the epoch is served when it ends."""
        return False

    def last_round(self) -> None:
        """Take the other servers' parts of the centre once more, as the last round has left them."""
        self._assemble(after_epoch=self._epochs)

    def end_epoch(self) -> None:
        """Serve until every worker that is still there has finished one more epoch."""
        self._epochs += 1
        # Who asks to pause after the end of this epoch pauses when this server has ended it, too.
        self._let_pause(before_epoch=self._epochs)
        self._serve(self._epoch_over)
        self._server.pauses.before_epoch = _NEVER
        self._assemble()

    def point(self) -> Vector:
        """Return the centre."""
        return self._parameters.vector

    @property
    def stopped(self) -> bool:
        """Whether the workers are being asked to end."""
        return self._server.stopping

    def stop(self) -> None:
        """Ask each worker to end, in the next reply to it."""
        self._server.stopping = True

    def look(self, into: Vector) -> None:
        """Copy the centre as this rank knows it into `into`."""
        np.copyto(into, self._parameters.vector)

    def view(self, into: Vector) -> None:
        """Serve until every worker has been shown the centre of this epoch's end, which is copied, too."""
        self._views += 1
        self._in_view = True
        self._serve(lambda: self._server.peers.have_viewed(self._views))
        self._in_view = False
        self.look(into)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service, and serve until the answer is there."""
        perform(self._endpoint, self._queries.ask(query))
        self._serve(lambda: self._queries.answer is not None)
        answer: Any = self._queries.answer
        return cast("AnswerT", answer)

    @property
    def told_rate(self) -> float:
        """The learning rate that workers are told; 0: none."""
        return self._server.rate

    def tell_rate(self, rate: float) -> None:
        """Tell workers a learning rate, with all replies from now on; 0: none any more."""
        self._server.set_rate(rate)

    def want_pause(self) -> None:
        """Ask all workers for a pause, in the next reply to each; only the first server's word counts."""
        self._server.pauses.wanted = True
        self._let_wait(may_wait=False)

    def pause(self) -> bool:
        """Serve, between epochs, until all workers pause."""
        pauses = self._server.pauses.made
        self._let_pause(before_epoch=math.inf)
        self._serve(lambda: self._server.pauses.made > pauses)
        self._server.pauses.before_epoch = _NEVER
        return True

    @property
    def pauses(self) -> int:
        """How many pauses there were of which this server knows."""
        return self._pauses

    def saving(self) -> set[int]:
        """Return who else has something to save: the workers that are in, and the other servers."""
        peers = self._server.peers.items()
        inside = {rank for rank, peer in peers if peer.standing is Standing.TRAINING}
        return inside | {shard.server for shard in self._others.values()}

    def workers(self) -> set[int]:
        """Return all workers."""
        return set(self._server.peers)

    def lost(self) -> set[int]:
        """Return the workers that have died."""
        return {rank for rank, peer in self._server.peers.items() if peer.standing is Standing.LOST}

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Serve until something holds."""
        self._serve(condition)

    def tell(self, answers: Answers) -> None:
        """Hand out answers of the query service."""
        assert self.service is not None  # whose answers these are
        perform(self._endpoint, self.service.tell(answers))

    def state(self) -> State:
        """Return everything that the next commit depends on; exact in a pause."""
        averages = None if self.service is None else self.service.averages.state()
        return {"server": self._server.state(), "averages": averages}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned; call it before `start`."""
        require("a server's part", state, server=Mapping, averages=type(state.get("averages")))
        self._server.load(state["server"])
        self._go_on(state)

    def load_for_others(self, state: Mapping[str, Any]) -> None:
        """Go on with the centre of `state`, but with other workers; call it before `start`."""
        self._server.load_for_others(state["server"])
        self._go_on(state, others=True)

    def watch(self, call: Callable[[], object], every_s: float) -> None:
        """Do something from time to time while this rank serves."""
        self._watches[1:] = [Periodic(call, every_s)]

    def report(self) -> TrainingReport:
        """Return what the shard has seen."""
        staleness, peers = self._server.staleness, self._server.peers.values()
        count = sum(staleness.values())
        mean = sum(stale * times for stale, times in staleness.items()) / count if count else 0.0
        noise: NoiseScale | None = getattr(self._server.rule, "noise_scale", None)
        return TrainingReport(
            samples=sum(peer.samples for peer in peers),
            exchanges=count,
            dropped=sum(peer.dropped for peer in peers),
            mean_staleness=mean,
            noise_scale=noise.value if noise is not None and noise.count else None,
            lost=tuple(self._losses),
        )

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Serve until every worker has left; `last` is done before it cannot be asked any more."""
        self.ask(LeaveQuery())
        self._serve(lambda: self._server.finished)
        self._assemble(for_good=True)
        last()
        self.ask(GoodbyeQuery())
        self._serve(lambda: self.service is None or not self.service.present)
        self._endpoint.close()

    def _go_on(self, state: Mapping[str, Any], *, others: bool = False) -> None:
        # Between two epochs of the workers a server has ended, and assembled, as many as all of them.
        self._epochs = self._pulls = min(peer.epochs for peer in self._server.peers.values())
        for other_server in self._server.other_servers:
            self._server.other_servers[other_server] = self._pulls
        if self.service is not None and state["averages"] is not None:
            self.service.averages.load(state["averages"], others=others)

    def _let_pause(self, *, before_epoch: float) -> None:
        """Let all pause while not all have finished so many epochs; some may have asked before."""
        self._server.pauses.before_epoch = before_epoch
        perform(self._endpoint, self._server.answer_pauses())
        self._look_for_pause()

    def _serve(self, until: Callable[[], bool]) -> None:
        self._stall_detector.begin()
        serve(self._endpoint, self._handle, until, self._watches)

    def _look(self) -> None:
        """Name workers that stall, and give up those who have for too long."""
        if self.keeper is not None and not self._queries.busy:
            self.keeper.settle()
        for rank in self._stall_detector.look(self._is_awaited):
            if rank not in self._dropped:
                self._dropped.add(rank)
                if not self._drop(rank):
                    raise PeerLostError(
                        rank,
                        f"is given up, as stall_timeout_s asks ({self._stall_detector.last(rank)}); the "
                        "others cannot go on without it here, so the job ends. See what that rank waits for",
                    )

    def _is_awaited(self, rank: int) -> bool:
        """Whether it is this worker's turn to say something."""
        peer = self._server.peers[rank]
        asked = self.service is not None and self.service.has_asked(rank)
        return peer.standing in AWAITED and not peer.unanswered and not asked

    def _assemble(self, *, for_good: bool = False, after_epoch: int | None = None) -> None:
        """Get the other servers' shards, and give them ours: then the parameters are the whole centre.

        Args:
            for_good: this server will not ask again, however many epochs others still make.
            after_epoch: the shards are as they are once all have finished so many epochs; None: one more
                than at the last time.
        """
        self._pulls += 1
        epochs = self._pulls if after_epoch is None else after_epoch
        self._missing = set(self._others)
        for shard in self._others.values():
            request = Message(Kind.PULL, self._server.rank, epochs, shard=shard.index, mark=for_good)
            self._endpoint.send(shard.server, request)
        self._serve(self._assembled)

    def _assembled(self) -> bool:
        return not self._missing and self._server.pulled_by_other_servers(self._pulls)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            self._lost(event)
            return
        self._stall_detector.heard(event.message)
        if event.message.shard == self._server.shard:
            self._refuse_nan(event.message)
            self._refuse_absence(event.message)
            perform(self._endpoint, self._server.handle(event))
            self._look_for_pause()
            if event.message.kind is Kind.LEAVE and self.service is not None:
                perform(self._endpoint, self.service.left(event.message.sender))
        elif event.message.shard == self._queries.shard:
            perform(self._endpoint, self._queries.handle(event))
        else:
            self._take_shard(event)

    def _look_for_pause(self) -> None:
        if self._server.pauses.made > self._pauses:
            self._pauses = self._server.pauses.made
            self._let_wait(may_wait=True)
            if self.keeper is not None:
                self.keeper.all_pause()

    def _let_wait(self, *, may_wait: bool) -> None:
        """Have workers wait for what others may leave behind of an epoch, or not."""
        if self.service is not None:
            perform(self._endpoint, self.service.let_wait(may_wait=may_wait))

    def _refuse_nan(self, message: Message) -> None:
        vector = message.vector if message.kind in _CONTRIBUTIONS else None
        if vector is None or vector.size != self._server.rule.center.size:
            return  # the state machine judges those
        if not looks_finite(vector, self._telling):
            raise DivergedError(
                f"what rank {message.sender} sent to the centre at its step {message.clock} holds NaN or "
                "infinity, so its loss has diverged; the centre was kept from it. Try a smaller learning "
                "rate, clip the gradients, or look for NaN in the data"
            )

    def _refuse_absence(self, message: Message) -> None:
        """Refuse steps of a worker that this server waits for elsewhere: it will never get there."""
        in_mean = self.service is not None and self.service.in_mean
        if (self._in_view or in_mean) and message.kind in _OF_STEPS and not self._server.stopping:
            peer = self._server.peers.get(message.sender)
            if in_mean or (peer is not None and peer.views < self._views):
                raise ConfigurationError(
                    f"rank {self._server.rank} waits for all ranks in evaluate() or mean() after epoch "
                    f"{self._epochs}, but rank {message.sender} has gone on training; {ALIKE}"
                )

    def _epoch_over(self) -> bool:
        if self.service is not None:
            self.service.refuse_absence(self._epochs)
        return self._server.peers.have_finished(self._epochs)

    def _lost(self, event: Lost) -> None:
        if event.rank in self._server.peers:
            others = set(self._server.peers.awaited()) - {event.rank}
            if self._server.peers[event.rank].standing in AWAITED:
                self._losses.append(self._stall_detector.report_death(event.rank, len(others)))
            perform(self._endpoint, self._server.handle(event))
            self._look_for_pause()  # all others may have waited for this one
            perform(self._endpoint, self._queries.handle(event))
            if all(peer.standing is Standing.LOST for peer in self._server.peers.values()):
                raise PeerLostError(event.rank, "has died, and with it the last worker")
        elif any(event.rank == shard.server for shard in self._others.values()):
            raise PeerLostError(event.rank, "its part of the centre is lost with it")

    def _take_shard(self, event: Received) -> None:
        shard = self._others[event.message.shard]
        assert event.message.vector is not None  # the reply to a pull is a CENTER
        self._server.stopping |= event.message.stop  # what one server was asked to, all do
        np.copyto(self._parameters.vector[shard.place], event.message.vector)
        self._missing.discard(shard.index)
        self._endpoint.release(shard.server, event.frame)
