"""The part of a server: it holds one shard of the centre, and the first server runs the query service."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common.algorithms._noise_scale import NoiseScale
from nnlo_common.base._errors import ConfigurationError, DivergedError, PeerLostError
from nnlo_common.base._flat_vector import FlatVector, Vector, looks_finite, telling_places
from nnlo_common.base._state_tree import State, require
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    AWAITED,
    Averages,
    Event,
    Kind,
    Lost,
    Means,
    Message,
    QueryClient,
    QueryService,
    Received,
    Server,
    Shard,
    Standing,
    Told,
)
from nnlo_common.training._event_loop import Periodic, perform, serve
from nnlo_common.training._lease_service import Leasing
from nnlo_common.training._roles import LocalStep, TrainingReport
from nnlo_common.training._stall_detector import LOOK_EVERY_S, StallDetector

__all__ = ["ServerRank"]

_CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)
_OF_STEPS = (*_CONTRIBUTIONS, Kind.LOCK)
_ALIKE = "call evaluate() and mean() on all ranks alike, not behind a question for the rank or the role"
_NO_NUMBERS: Vector = np.zeros(0, np.float32)


class ServerRank:
    """Holds one shard of the centre; between epochs its parameters are the whole centre.

    Args:
        endpoint: this rank's door.
        server: the state machine; its centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        place: which part of them the server holds.
        others: the shards that other servers hold.
        queries: the query service, on the first server; on the others a query client who asks it.
        stall_detector: who is heard when.
        drop: ends a rank that stalls, if it can be ended while the others go on; says whether.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        parameters: FlatVector,
        place: slice,
        others: Sequence[Shard],
        *,
        queries: QueryService | QueryClient,
        stall_detector: StallDetector,
        drop: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self._endpoint, self._server, self._parameters, self._queries = endpoint, server, parameters, queries
        self._others = {shard.index: shard for shard in others}
        self._epochs = self._views = self._pulls = 0
        self._telling = telling_places(parameters.layout, place)
        self._missing: set[int] = set()
        self._meeting = ""  # what this server waits in for all workers to do the same, between epochs
        self._stall_detector, self._drop = stall_detector, drop
        self._dropped: set[int] = set()
        self._losses: list[str] = []
        self._watches = [Periodic(self._look, LOOK_EVERY_S)]
        self._may_pause = self._in_epoch = False
        server.pauses.allowed = self._all_may_pause
        self._pauses = 0
        #: Called when all workers pause, before anything else is handled.
        self.on_pause: Callable[[], object] | None = None
        #: Called now and then while this rank serves, unless it waits for an answer.
        self.on_look: Callable[[], object] | None = None
        self._asking = False

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

    @property
    def due(self) -> bool:
        """A server makes no steps."""
        return False

    def due_within(self, steps: int) -> bool:  # noqa: ARG002
        """A server makes no steps."""
        return False

    @property
    def gathered(self) -> int:
        """A server makes no steps."""
        return 0

    def add_weight(self, weight: float) -> None:
        """Do nothing: a server contributes nothing."""

    def last_round(self) -> None:
        """Take the other servers' parts of the centre once more, as the last round has left them."""
        self._assemble(after_epoch=self._epochs)

    def use_gradient(self, gradient: FlatVector) -> None:
        """Do nothing: a server has none."""

    def pass_step(self) -> None:
        """Do nothing."""

    def end_epoch(self) -> None:
        """Serve until every worker that is still there has finished one more epoch."""
        self._epochs += 1
        self._may_pause = self._in_epoch = True
        self._answer_pauses()
        self._serve(self._epoch_over)
        self._may_pause = self._in_epoch = False
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
        self._meeting = "view"
        self._serve(lambda: self._server.peers.have_viewed(self._views))
        self._meeting = ""
        self.look(into)

    def ask(
        self, content: Mapping[str, Any], numbers: Vector | None = None
    ) -> tuple[Mapping[str, Any], Vector]:
        """Ask the query service, and serve until the answer is there."""
        queries = self._queries
        if isinstance(queries, QueryService):
            self._meeting = content["ask"]
            perform(self._endpoint, queries.ask_here(content, numbers))
            self._serve(lambda: queries.own is not None)
            self._meeting = ""
            assert queries.own is not None  # it has been waited for
            return queries.own.content, _NO_NUMBERS if queries.own.numbers is None else queries.own.numbers
        perform(self._endpoint, [next(queries.ask(content, numbers))])
        self._asking = True
        self._serve(lambda: queries.answer is not None)
        self._asking = False
        assert queries.answer is not None  # it has been waited for
        return queries.answer

    @property
    def told_rate(self) -> float:
        """The learning rate that workers are told; 0: none."""
        return self._server.rate

    def tell_rate(self, rate: float) -> None:
        """Tell workers a learning rate, with all replies from now on; 0: none any more."""
        self._server.set_rate(rate)

    def configure(self, values: Vector) -> None:
        """Do nothing: a server contributes nothing."""

    @property
    def pause_requested(self) -> bool:
        """A server is not asked: it is told when all workers pause."""
        return False

    def want_pause(self) -> None:
        """Ask all workers for a pause, in the next reply to each; only the first server's word counts."""
        self._server.pauses.wanted = True
        self._let_wait(may_wait=False)

    def pause(self) -> bool:
        """Serve, between epochs, until all workers pause."""
        pauses, self._may_pause = self._server.pauses.made, True
        self._answer_pauses()
        self._serve(lambda: self._server.pauses.made > pauses)
        self._may_pause = False
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

    def answer(self, call: Callable[[int, Mapping[str, Any]], Mapping[str, Any]]) -> None:
        """Have questions about checkpoints answered; on the first server, where they are asked."""
        told = self._queries.counters["checkpoint"] if isinstance(self._queries, QueryService) else None
        if isinstance(told, Told):
            told.call = call

    def state(self) -> State:
        """Return everything that the next commit depends on; exact in a pause."""
        averages = self._queries.counters["average"] if isinstance(self._queries, QueryService) else None
        return {
            "server": self._server.state(),
            "averages": averages.state() if isinstance(averages, Averages) else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned; call it before `start`."""
        require("a server's part", state, server=Mapping, averages=type(state.get("averages")))
        self._server.load(state["server"])
        self._go_on(state)

    def load_for_others(self, state: Mapping[str, Any]) -> None:
        """Go on with the centre of `state`, but with other workers; call it before `start`."""
        self._server.load_for_others(state["server"])
        self._go_on(state, others=True)

    def set_local_rate(self, rate: float) -> None:
        """Do nothing: a server makes no steps of its own."""

    def count_samples(self, total: int) -> None:
        """Do nothing: a server takes no samples."""

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
        """Serve until every worker has left; `last` is done before this rank's door closes."""
        queries, rank = self._queries, self._server.rank
        if isinstance(queries, QueryService):
            perform(self._endpoint, queries.gone(rank))
        else:
            self.ask({"ask": "leave"})
        self._serve(lambda: self._server.finished)
        self._assemble(for_good=True)
        last()
        if isinstance(queries, QueryService):
            self._serve(lambda: queries.present == {rank})
        else:
            self.ask({"ask": "goodbye"})
        self._endpoint.close()

    def _go_on(self, state: Mapping[str, Any], *, others: bool = False) -> None:
        # Between two epochs of the workers a server has ended, and assembled, as many as all of them.
        self._epochs = self._pulls = min(peer.epochs for peer in self._server.peers.values())
        for other_server in self._server.other_servers:
            self._server.other_servers[other_server] = self._pulls
        averages = self._queries.counters["average"] if isinstance(self._queries, QueryService) else None
        if isinstance(averages, Averages) and state["averages"] is not None:
            averages.load(state["averages"], others=others)

    def _all_may_pause(self) -> bool:
        """Whether this server is at the place of the script where those are who ask to pause.

        Who asks after the end of an epoch pauses when this server has ended it, too.
        """
        return self._may_pause and not (self._in_epoch and self._server.peers.have_finished(self._epochs))

    def _answer_pauses(self) -> None:
        """Let those pause who have asked before this server got there."""
        perform(self._endpoint, self._server.answer_pauses())
        self._look_for_pause()

    def _serve(self, until: Callable[[], bool]) -> None:
        self._stall_detector.begin()
        serve(self._endpoint, self._handle, until, self._watches)

    def _look(self) -> None:
        """Name workers that stall, and give up those who have for too long."""
        if self.on_look is not None and not self._asking:
            self.on_look()
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
        asked = isinstance(self._queries, QueryService) and self._queries.has_asked(rank)
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
            if event.message.kind is Kind.LEAVE and isinstance(self._queries, QueryService):
                self._queries.present.discard(event.message.sender)
                perform(self._endpoint, self._queries.gone(event.message.sender))
        elif event.message.shard == self._queries.shard:
            receive = (
                self._queries.handle if isinstance(self._queries, QueryService) else self._queries.receive
            )
            perform(self._endpoint, receive(event))
        else:
            self._take_shard(event)

    def _look_for_pause(self) -> None:
        if self._server.pauses.made > self._pauses:
            self._pauses = self._server.pauses.made
            self._let_wait(may_wait=True)
            if self.on_pause is not None:
                self.on_pause()

    def _let_wait(self, *, may_wait: bool) -> None:
        """Have workers wait for what others may leave behind of an epoch, or not."""
        leasing = self._queries.counters["lease"] if isinstance(self._queries, QueryService) else None
        if isinstance(self._queries, QueryService) and isinstance(leasing, Leasing):
            perform(self._endpoint, self._queries.tell(leasing.let_wait(may_wait=may_wait)))

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
        if self._meeting in ("view", "mean") and message.kind in _OF_STEPS and not self._server.stopping:
            peer = self._server.peers.get(message.sender)
            if self._meeting == "mean" or (peer is not None and peer.views < self._views):
                raise ConfigurationError(
                    f"rank {self._server.rank} waits for all ranks in evaluate() or mean() after epoch "
                    f"{self._epochs}, but rank {message.sender} has gone on training; {_ALIKE}"
                )

    def _epoch_over(self) -> bool:
        means = self._queries.counters["mean"] if isinstance(self._queries, QueryService) else None
        if isinstance(means, Means):
            for rank, part in means.waiting.items():
                if part.get("epochs", self._epochs) < self._epochs:
                    raise ConfigurationError(
                        f"rank {rank} waits for all ranks in evaluate() or mean() after epoch "
                        f"{part['epochs']}, but rank {self._server.rank} has gone on to the next; {_ALIKE}"
                    )
        return self._server.peers.have_finished(self._epochs)

    def _lost(self, event: Lost) -> None:
        if event.rank in self._server.peers:
            others = set(self._server.peers.awaited()) - {event.rank}
            if self._server.peers[event.rank].standing in AWAITED:
                self._losses.append(self._stall_detector.report_death(event.rank, len(others)))
            perform(self._endpoint, self._server.handle(event))
            self._look_for_pause()  # all others may have waited for this one
            if isinstance(self._queries, QueryService):
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
