"""Server rank: holds one shard of the centre, and serves it while workers train."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from nnlo_common.base._errors import ConfigurationError, DivergedError, PeerLostError, warn
from nnlo_common.base._flat_vector import FlatVector, Vector, looks_finite, telling_places
from nnlo_common.base._state_tree import State, require
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import (
    AWAITED,
    Action,
    Answers,
    Averages,
    Broadcasts,
    EpochMeans,
    Event,
    Kind,
    Leasing,
    Lost,
    Means,
    Message,
    Notes,
    QueryClient,
    QueryService,
    Received,
    Server,
    Shard,
    Standing,
)
from nnlo_common.protocol._query_messages import AnswerT, GoodbyeQuery, LastRoundQuery, LeaveQuery, Query
from nnlo_common.training._collectives import BufferCounts
from nnlo_common.training._rank_parts import LocalStep, Periodic, TrainingReport, perform, serve
from nnlo_common.training._server_load import Bottleneck
from nnlo_common.training._stall_detector import LOOK_EVERY_S, StallDetector
from nnlo_common.training._state_copies import LOOK_FOR_COPIES_S, StateCopies

__all__ = ["ALIKE", "ServerRank", "TrainingQueries"]

# -- query service of a training, on its first server --------------------------------------------------

#: Advice for ranks that wait for each other in different collectives.
ALIKE = "call evaluate() and mean() on all ranks, not under `if rank == ...` or `if role == ...`"


class TrainingQueries(QueryService):
    """Answers the queries of a training's ranks.

    Attributes:
        averages: the averages of the workers' buffers.

    Args:
        servers: the ranks of the servers; the service runs on the first.
        workers: the ranks that train.
        leads: the first rank of each worker, which leases samples for it; None: each worker is one rank.
        shard: the number of the channel.
        averages: the averages of the workers' buffers.
        patient: a worker waits for leases that others may still give back.
    """

    def __init__(
        self,
        servers: Iterable[int],
        workers: Iterable[int],
        shard: int,
        averages: Averages,
        *,
        leads: Iterable[int] | None = None,
        patient: bool,
    ) -> None:
        first, *others = servers
        workers = list(workers)
        ranks = [first, *others, *workers]
        self.averages, self._means = averages, Means(ranks)
        self._leasing, self._notes = Leasing(workers if leads is None else leads, patient=patient), Notes()
        rounds, copies = Means(ranks, LastRoundQuery), Broadcasts(ranks, first)
        parts = self._means, rounds, averages, self._notes, EpochMeans(workers), copies, self._leasing
        super().__init__(first, shard, ranks, parts)

    def copy(self) -> State:
        """Return what another rank needs to go on with these queries."""
        parts = self.averages.state(), self._leasing.state(), self._notes.state()
        return dict(zip(("averages", "leases", "notes"), parts, strict=True))

    def load_copy(self, state: Mapping[str, Any]) -> None:
        """Go on from a `copy`, once `take_over` has been called."""
        self.averages.load(state["averages"])
        self._leasing.load(state["leases"])
        self._notes.load(state["notes"])

    @property
    def in_mean(self) -> bool:
        """Whether the server itself waits for all ranks' parts of a mean."""
        return self.rank in self._means.waiting

    def refuse_absence(self, epochs: int) -> None:
        """Raise if a rank waits for a mean after an epoch that the server has passed: a deadlock."""
        for rank, part in self._means.waiting.items():
            if part.epochs is not None and part.epochs < epochs:
                raise ConfigurationError(
                    f"rank {rank} waits for all ranks in evaluate() or mean() after epoch {part.epochs}, "
                    f"but rank {self.rank} continued with the next epoch; {ALIKE}"
                )

    def left(self, rank: int) -> list[Action]:
        """Record that a worker has left and sends no more queries."""
        self.present.discard(rank)
        return self.gone(rank)

    def let_wait(self, *, may_wait: bool) -> list[Action]:
        """Set whether workers may wait for leases that others may give back."""
        return self.tell(self._leasing.let_wait(may_wait=may_wait))


_LOG = logging.getLogger(__name__)

_CONTRIBUTIONS = (Kind.EXCHANGE, Kind.PUSH, Kind.COMMIT)
_NEVER = 0  # an epoch that all have finished, so no pause completes
_OF_STEPS = (*_CONTRIBUTIONS, Kind.LOCK)


class Keeper(Protocol):
    """Saves a server's state."""

    def all_pause(self) -> None:
        """Save now: all workers pause, and no event has been handled since."""

    def settle(self) -> None:
        """Report finished writes; called periodically while the server serves and awaits no answer."""


class ServerRank:
    """Holds one shard of the centre; between epochs its parameters are the whole centre.

    It is one class because it is one loop: what is late, lost, due or asked is decided between two events.

    Args:
        endpoint: this rank's endpoint.
        server: the state machine; its centre is a view of `parameters`.
        parameters: the model's parameters on this rank.
        place: the part of them that the server holds.
        others: the shards of the other servers.
        queries: sends queries to the query service.
        service: the query service, on the first server.
        stall_detector: records when each worker was heard.
        drop: takes a stalled rank out of the job if the others can continue; returns whether they can.
        groups: the ranks of each worker, leads first; all of them may ask, and they leave together.
        spares: the ranks that may take over, in this order.

    Attributes:
        keeper: saves the server's state; None: checkpoints are off.
        service: the query service, on the first server.
        on_divergence: called before an error about numbers that are not finite.
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
        groups: Sequence[Sequence[int]] = (),
        spares: Sequence[int] = (),
    ) -> None:
        self._endpoint, self._server, self._parameters = endpoint, server, parameters
        self._queries = queries
        self.service = service
        self._others = {shard.index: shard for shard in others}
        self._epochs = self._views = self._pulls = 0
        self._telling = telling_places(parameters.layout, place)
        self._missing: set[int] = set()
        self._asked_for = 0, False  # the epochs after which they are, and whether they are the last
        self._in_view = False  # between epochs, waiting for all workers to view the centre
        self._leaving = self._told_of_leaving = False
        self._left_after = math.inf  # the number of epochs of the worker that left first
        self._stall_detector, self._drop = stall_detector, drop
        self._groups = {lead: (lead, *others) for lead, *others in groups}
        self._dropped: set[int] = set()
        self._gone_members: set[int] = set()  # of groups that go on without them
        self._losses: list[str] = []
        self._bottleneck = Bottleneck(servers=len(others) + 1, tells=service is not None)
        self._watches = [Periodic(self._look, LOOK_EVERY_S)]
        self._spares = tuple(spares)
        self._copies: StateCopies | None = None
        if spares and service is not None:
            server.other_servers |= dict.fromkeys(spares, math.inf)  # nobody waits until a spare has pulled
            self._begin_copies()
        server.pauses.before_epoch = _NEVER
        server.before_taking = self._refuse_nan
        self._pauses = 0
        self.keeper: Keeper | None = None
        self.on_divergence: Callable[[str], object] = str
        self._of = ""  # whose last worker an error means

    def _begin_copies(self) -> None:
        """Keep a copy of the state on a spare from now on."""
        rank, channel = self._server.rank, self._queries.shard + 1
        self._copies = StateCopies(self._endpoint, rank, self._spares, channel, take=self._copy)
        self._watches.append(Periodic(self._copies.look, LOOK_FOR_COPIES_S))

    def _copy(self) -> State:
        assert self.service is not None  # only the first server has spares
        return {"server": self._server.copy(), "queries": self.service.copy()}

    def start(self) -> None:
        """Serve until every worker has asked to join, so that all ranks get here together."""
        self.wait_until(lambda: self._server.peers.gathered)

    def abandon(self) -> None:
        """Leave without having started."""
        self._endpoint.close()

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:  # noqa: ARG002
        """Raise: a server gets no batches."""
        raise ConfigurationError(
            f"rank {self._server.rank} made a step, but it serves the centre; make steps only inside the "
            "loop over batches"
        )

    def begin_epoch(self) -> bool:
        """Do nothing: the epoch is served when it ends."""
        return False

    def last_round(self) -> None:
        """Pull the other servers' shards again, after the last round."""
        self._assemble(after_epoch=self._epochs)

    def end_epoch(self) -> None:
        """Serve until every remaining worker has finished one more epoch."""
        self._epochs += 1
        # A pause requested after this epoch's end completes only when this server has ended the epoch, too.
        self._let_pause(before_epoch=self._epochs)
        self._bottleneck.begin()
        self.wait_until(self._epoch_over)
        peers = self._server.peers.values()
        self._bottleneck.end([one.waited for one in peers if one.epochs >= self._epochs])
        self._server.pauses.before_epoch = _NEVER
        self._assemble()

    def point(self) -> Vector:
        """Return the centre."""
        return self._parameters.vector

    @property
    def stopped(self) -> bool:
        """Whether replies ask workers to end."""
        return self._server.stopping

    def stop(self) -> None:
        """Ask each worker to end, in the next reply to it."""
        self._server.stopping = True

    def look(self, into: Vector) -> None:
        """Copy this rank's version of the centre into `into`."""
        np.copyto(into, self._parameters.vector)

    def view(self, into: Vector) -> None:
        """Serve until every worker has viewed the centre at this epoch's end, and copy it into `into`."""
        self._views += 1
        self._in_view = True
        self.wait_until(lambda: self._server.peers.have_viewed(self._views))
        self._in_view = False
        self.look(into)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service, and serve until the answer arrives."""
        perform(self._endpoint, self._queries.ask(query))
        self.wait_until(lambda: self._queries.answer is not None)
        answer: Any = self._queries.answer
        return cast("AnswerT", answer)

    @property
    def told_rate(self) -> float:
        """The learning rate sent to workers; 0: none."""
        return self._server.rate

    def tell_rate(self, rate: float) -> None:
        """Send workers a learning rate with all replies from now on; 0: stop sending one."""
        self._server.set_rate(rate)

    def want_pause(self) -> None:
        """Ask each worker for a pause in its next reply; workers obey only the first server."""
        self._server.pauses.wanted = True
        self._let_wait(may_wait=False)

    def pause(self) -> bool:
        """Serve, between epochs, until all workers pause."""
        pauses = self._server.pauses.made
        self._let_pause(before_epoch=math.inf)
        self.wait_until(lambda: self._server.pauses.made > pauses)
        self._server.pauses.before_epoch = _NEVER
        return True

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all workers, and that since the first worker has ended its last epoch."""
        made, server = self._server.rule.progress, self._server
        return int(made), int(made - server.progress_at[-1])

    @property
    def pauses(self) -> int:
        """The number of pauses this server has seen."""
        return self._pauses

    def saving(self) -> set[int]:
        """Return the other ranks that save: those of the workers in training, and the other servers."""
        return self._with_standing(Standing.TRAINING) | {shard.server for shard in self._others.values()}

    def workers(self) -> set[int]:
        """Return the ranks of all workers."""
        return self._with_standing(*Standing)

    @property
    def stalls(self) -> tuple[str, ...]:
        """A line for each worker that was silent for longer than usual."""
        return tuple(self._stall_detector.stalls)

    def lost(self) -> set[int]:
        """Return the ranks of the workers that have died."""
        return self._with_standing(Standing.LOST)

    def _with_standing(self, *standings: Standing) -> set[int]:
        """Return the ranks of the workers that stand so; a group ends with its first rank."""
        leads = (lead for lead, peer in self._server.peers.items() if peer.standing in standings)
        ranks = {rank for lead in leads for rank in self._groups.get(lead, (lead,))}
        return ranks - self._gone_members

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Serve until `condition` holds."""
        self._stall_detector.begin()
        serve(self._endpoint, self._handle, condition, self._watches)

    def tell(self, answers: Answers) -> None:
        """Send answers of the query service."""
        assert self.service is not None  # only the first server calls this
        perform(self._endpoint, self.service.tell(answers))

    def state(self) -> State:
        """Return all that the next commit depends on; exact in a pause."""
        averages = None if self.service is None else self.service.averages.state()
        return {"server": self._server.state(), "averages": averages}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before `start`."""
        require("a server's part", state, server=Mapping, averages=type(state.get("averages")))
        self._server.load(state["server"])
        self._go_on(state)

    def load_center(self, epochs: int, buffers: BufferCounts | None) -> None:
        """Resume after `epochs` epochs from the parameters as they are now; call it before `start`.

        Args:
            epochs: finished epochs.
            buffers: the model's buffers and their update counts, if it has any.
        """
        self._server.begin_after(epochs)
        self._epochs = self._pulls = epochs
        if self.service is not None and buffers is not None:
            self.service.averages.restart(*buffers)

    def load_for_others(self, state: Mapping[str, Any]) -> None:
        """Restore the centre of `state` with other workers; call it before `start`."""
        self._server.load_for_others(state["server"])
        self._go_on(state, others=True)

    def watch(self, call: Callable[[], object], every_s: float) -> None:
        """Call a function periodically while this rank serves, beside those of earlier calls."""
        self._watches.append(Periodic(call, every_s))

    def report(self) -> TrainingReport:
        """Return the shard's report."""
        staleness, peers = self._server.staleness, self._server.peers.values()
        count = sum(staleness.values())
        mean = sum(stale * times for stale, times in staleness.items()) / count if count else 0.0
        return TrainingReport(
            samples=sum(peer.samples for peer in peers),
            exchanges=count,
            dropped=sum(peer.dropped for peer in peers),
            mean_staleness=mean,
            noise_scale=self._server.rule.noise_in_samples(),
            gain=(gain := self._server.rule.gain_report()),
            progress=None if gain is None else self._server.rule.progress,
            lost=tuple(self._losses),
        )

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Serve until every worker has left; call `last` while this rank can still be asked."""
        self._leaving = True
        self.ask(LeaveQuery())
        self.wait_until(lambda: self._server.finished)
        self._assemble(for_good=True)
        last()
        if self._copies is not None:
            self._copies.stop()
            self.wait_until(lambda: self._copies is None or self._copies.idle)
            self._copies.end()
        self.ask(GoodbyeQuery())
        self.wait_until(lambda: self.service is None or not self.service.present)
        self._endpoint.close()

    def _go_on(self, state: Mapping[str, Any], *, others: bool = False) -> None:
        # Between epochs, a server has ended and assembled as many epochs as the slowest worker.
        self._epochs = self._pulls = min(peer.epochs for peer in self._server.peers.values())
        for shard in self._others.values():
            self._server.other_servers[shard.server] = self._pulls
        if self.service is not None and state["averages"] is not None:
            self.service.averages.load(state["averages"], others=others)

    def _let_pause(self, *, before_epoch: float) -> None:
        """Allow a pause until all have finished `before_epoch` epochs; some workers may wait for it."""
        self._server.pauses.before_epoch = before_epoch
        perform(self._endpoint, self._server.answer_pauses())
        self._look_for_pause()

    def _look(self) -> None:
        """Warn of stalled workers, and drop those past `stall_timeout_s`."""
        if self.keeper is not None and not self._queries.busy:
            self.keeper.settle()
        for rank in self._stall_detector.look(self._is_awaited):
            if rank not in self._dropped:
                self._dropped.add(rank)
                if not self._drop(rank):
                    raise PeerLostError(
                        rank,
                        f"was silent longer than stall_timeout_s ({self._stall_detector.last(rank)}), and "
                        "the others cannot continue without it, so the job aborts. See what that rank waits "
                        "for",
                    )
                self._continue_without(rank)

    def _continue_without(self, rank: int) -> None:
        """Treat a dropped worker as dead; it may wake, and then it hears that it was dropped."""
        others = set(self._server.peers.awaited()) - {rank}
        silence_s, line = self._stall_detector.report_drop(rank, len(others))
        self._losses.append(line)
        self._endpoint.abandon(rank)
        perform(self._endpoint, self._server.drop(rank, silence_s))
        self._look_for_pause()  # all others may have waited for this one
        if self.service is not None:
            perform(self._endpoint, self.service.drop(rank, silence_s))
        self._refuse_solitude(rank)

    def _is_awaited(self, rank: int) -> bool:
        """Whether the next message must come from this worker."""
        peer = self._server.peers[rank]
        asked = self.service is not None and self.service.has_asked(rank)
        return peer.standing in AWAITED and not peer.unanswered and not asked

    def _assemble(self, *, for_good: bool = False, after_epoch: int | None = None) -> None:
        """Exchange shards with the other servers, so that the parameters are the whole centre.

        Args:
            for_good: this server will not pull again, however many epochs others still make.
            after_epoch: wait until all have finished this many epochs; None: one more than last time.
        """
        self._pulls += 1
        self._missing = set(self._others)
        self._asked_for = self._pulls if after_epoch is None else after_epoch, for_good
        self._ask_for_missing()
        self.wait_until(self._assembled)

    def _ask_for_missing(self) -> None:
        """Ask the other servers for the shards that are missing."""
        epochs, for_good = self._asked_for
        for index in sorted(self._missing):
            request = Message(Kind.PULL, self._server.rank, epochs, shard=index, mark=for_good)
            self._endpoint.send(self._others[index].server, request)

    def _assembled(self) -> bool:
        return not self._missing and self._server.pulled_by_other_servers(self._pulls)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            self._lost(event)
            return
        if event.message.sender in self._dropped:
            service = self.service if event.message.shard == self._queries.shard else None
            perform(self._endpoint, (service or self._server).handle(event))
            return
        self._stall_detector.heard(event.message)
        if event.message.shard == self._server.shard:
            self._refuse_absence(event.message)
            self._warn_of_leaving(event.message)
            self._bottleneck.begin_work()
            perform(self._endpoint, self._server.handle(event))
            self._bottleneck.end_work()
            self._look_for_pause()
            if event.message.kind is Kind.LEAVE:
                self._left(event.message.sender)
        elif event.message.shard == self._queries.shard:
            perform(self._endpoint, self._queries.handle(event))
        elif self._copies is not None and event.message.kind is Kind.ACK:
            self._copies.acknowledged(event)
        else:
            self._take_shard(event)

    def _left(self, sender: int) -> None:
        """Note that a worker has left: the query service waits for it no more."""
        for rank in self._groups.get(sender, (sender,)):
            if self.service is not None:
                perform(self._endpoint, self.service.left(rank))

    def _look_for_pause(self) -> None:
        if self._server.pauses.made > self._pauses:
            self._pauses = self._server.pauses.made
            self._let_wait(may_wait=True)
            if self.keeper is not None:
                self.keeper.all_pause()

    def _let_wait(self, *, may_wait: bool) -> None:
        """Set whether workers may wait for leases that others may give back."""
        if self.service is not None:
            perform(self._endpoint, self.service.let_wait(may_wait=may_wait))

    def _refuse_nan(self, message: Message) -> None:
        vector = message.vector if message.kind in _CONTRIBUTIONS else None
        if vector is None or vector.size != self._server.rule.center.size:
            return  # the state machine checks these
        if not looks_finite(vector, self._telling):
            text = (
                f"rank {message.sender} sent NaN or infinity to the centre at its step {message.clock}: its "
                "loss has diverged. The centre was not changed. Try a smaller learning rate, clip the "
                "gradients, or look for NaN in the data"
            )
            self.on_divergence(text)
            raise DivergedError(text)

    def _refuse_absence(self, message: Message) -> None:
        """Raise if a worker makes steps while this server waits for it in a collective: a deadlock."""
        in_mean = self.service is not None and self.service.in_mean
        if (self._in_view or in_mean) and message.kind in _OF_STEPS and not self._server.stopping:
            peer = self._server.peers.get(message.sender)
            if in_mean or (peer is not None and peer.views < self._views):
                raise ConfigurationError(
                    f"rank {self._server.rank} waits for all ranks in evaluate() or mean() after epoch "
                    f"{self._epochs}, but rank {message.sender} continued training; {ALIKE}"
                )

    def _warn_of_leaving(self, message: Message) -> None:
        """Warn, once, that a worker trains in an epoch for which another rank's loop is over.

        Without epochs nobody can tell: in a loop of its own each rank leaves when it is done.
        """
        peers, sender = self._server.peers, message.sender
        if message.kind is Kind.LEAVE:
            self._left_after = min(self._left_after, peers[sender].epochs)
        if message.kind not in _OF_STEPS or self._told_of_leaving or self._server.stopping:
            return
        done = peers[sender].epochs
        if self._leaving and 0 < self._epochs <= done:
            gone, epochs = self._server.rank, self._epochs
            found = (
                "A server gets no batch in its loop: that is not the end of the training, and what it has "
                "evaluated or saved since is not the trained model"
            )
        elif 0 < done >= self._left_after:
            gone = min(rank for rank, peer in peers.items() if peer.standing is Standing.LEFT)
            epochs, found = peers[gone].epochs, "It takes no part in what follows"
        else:
            return
        self._told_of_leaving = True
        if self.service is not None:  # one server tells
            warn(
                f"rank {gone} has left the training after epoch {epochs}, but rank {sender} trains in epoch "
                f"{done + 1}. {found}. Loop over as many epochs on all ranks, or end the training on all of "
                "them with optimizer.stop()"
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
            self._refuse_solitude(event.rank)
        elif any(event.rank in group for group in self._groups.values()):
            self._gone_members.add(event.rank)
            perform(self._endpoint, self._queries.handle(event))
        elif any(event.rank == shard.server for shard in self._others.values()):
            raise PeerLostError(event.rank, "its part of the centre is lost")
        elif event.rank in self._spares:
            self._without_spare(event)

    def _without_spare(self, event: Lost) -> None:
        """Go on without a spare that has died."""
        self._spares = tuple(one for one in self._spares if one != event.rank)
        left = f"spares left: {len(self._spares)}" if self._spares else "the server's death now ends the job"
        _LOG.warning("nnlo: rank %d, a spare, has died; %s", event.rank, left)
        if self._copies is not None:
            self._copies.without(event.rank)
        perform(self._endpoint, self._server.forget_server(event.rank))
        perform(self._endpoint, self._queries.handle(event))

    def _refuse_solitude(self, rank: int) -> None:
        """Raise if `rank`, which is lost, was the last worker."""
        if all(peer.standing is Standing.LOST for peer in self._server.peers.values()):
            was = "was dropped" if rank in self._dropped else "has died"
            raise PeerLostError(rank, f"the last worker{self._of} {was}")

    def _take_shard(self, event: Received) -> None:
        shard = self._others[event.message.shard]
        assert event.message.vector is not None  # the reply to a pull is a CENTER
        self._server.stopping |= event.message.stop  # a stop on one server stops all
        np.copyto(self._parameters.vector[shard.place], event.message.vector)
        self._missing.discard(shard.index)
        self._endpoint.release(shard.server, event.frame)
