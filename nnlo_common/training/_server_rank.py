"""Server rank: holds one shard of the centre, and serves it while workers train."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

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
    Send,
    Server,
    Shard,
    Standing,
    shards_without,
)
from nnlo_common.protocol._query_messages import AnswerT, GoodbyeQuery, LeaveQuery, Query
from nnlo_common.training._collectives import BufferCounts
from nnlo_common.training._early_leavers import CONTRIBUTIONS, OF_STEPS, EarlyLeavers
from nnlo_common.training._rank_parts import LocalStep, Periodic, TrainingReport, perform, serve
from nnlo_common.training._server_load import Bottleneck
from nnlo_common.training._spare_calls import SpareCalls
from nnlo_common.training._stall_detector import LOOK_EVERY_S, StallDetector, date_and_time
from nnlo_common.training._state_copies import LOOK_FOR_COPIES_S, StateCopies
from nnlo_common.training._training_queries import ALIKE, TrainingQueries

__all__ = ["ServerRank"]

_LOG = logging.getLogger(__name__)

_NEVER = 0  # an epoch that all have finished, so no pause completes


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
        shards: all shards, each with the rank that serves it and those that may take over.
        queries: sends queries to the query service.
        service: the query service, on the first server.
        stall_detector: records when each worker was heard.
        drop: takes a stalled rank out of the job if the others can continue; returns whether they can.
        groups: the ranks of each worker, leads first; all of them may ask, and they leave together.
        hosts: the hosts of all ranks that may serve, where there are spares.

    Attributes:
        keeper: saves the server's state; None: checkpoints are off.
        service: the query service, on the first server.
        on_divergence: called before an error about numbers that are not finite.
        spare_calls: calls spares to train in the places of dead workers.
        script_state: what the script here leaves to that of the rank that takes this one's place.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        server: Server,
        parameters: FlatVector,
        shards: Sequence[Shard],
        *,
        queries: TrainingQueries | QueryClient,
        service: TrainingQueries | None,
        stall_detector: StallDetector,
        drop: Callable[[int], bool] = lambda rank: False,
        groups: Sequence[Sequence[int]] = (),
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self._endpoint, self._server, self._parameters = endpoint, server, parameters
        self._queries = queries
        self.service = service
        if service is not None:
            service.follow(server)
        self._shards = {shard.index: shard for shard in shards}
        self._hosts = dict(hosts or {})
        self._epochs = self._views = 0
        self._telling = telling_places(parameters.layout, self._shards[server.shard].place)
        self._missing: set[int] = set()  # shards
        self._asked_for = 0, False  # the epochs after which they are, and whether they are the last
        self._pulls: dict[int, tuple[int, bool]] = {}  # by shard: what was asked for and is not answered
        self._had: set[int] = set()  # shards that are here for good
        self._gone: set[int] = set()  # dead ranks
        self._away: set[int] = set()  # spares that have left, and take nobody's place
        self._served = False  # all has been served, and all is here: other deaths do not matter any more
        self._resumed = False
        self._in_view = False  # between epochs, waiting for all workers to view the centre
        self._leaving, self._leavers = False, EarlyLeavers(server)
        self._stall_detector, self._drop = stall_detector, drop
        self._groups = {lead: (lead, *others) for lead, *others in groups}
        self._dropped: set[int] = set()
        self._gone_members: set[int] = set()  # of groups that go on without them
        self._losses: list[str] = []
        self._bottleneck = Bottleneck(servers=len(shards), tells=service is not None)
        self._watches = [Periodic(self._look, LOOK_EVERY_S)]
        self.script_state: State | None = None
        self._copies: StateCopies | None = None
        if self._shards[server.shard].server == server.rank:
            self._begin_copies()
        server.pauses.before_epoch = _NEVER
        server.before_taking = self._refuse_nan
        self._pauses = 0  # completed here
        self._between = False  # waits for a pause between two epochs
        self.keeper: Keeper | None = None
        self.on_divergence: Callable[[str], object] = str
        self.spare_calls = SpareCalls(
            endpoint,
            server,
            shards=lambda: self._shards,
            service=lambda: self.service,
            moved=self._look_for_pause,
        )
        self._of = ""  # whose last worker an error means

    def _begin_copies(self) -> None:
        """Keep a copy of the state on a spare from now on, if there is one."""
        spares = [one for one in self._shards[self._server.shard].spares if one not in self._away]
        if spares:
            rank, channel = self._server.rank, self._queries.shard + 1
            self._copies = StateCopies(self._endpoint, rank, spares, channel, take=self._copy)
            self._watches.append(Periodic(self._copies.look, LOOK_FOR_COPIES_S))

    def _copy(self) -> State:
        queries = None if self.service is None else self.service.copy()
        script, lost = self.script_state, [*self._losses]
        return {"server": self._server.copy(), "queries": queries, "script": script, "lost": lost}

    @property
    def sends_copies(self) -> bool:
        """Whether a rank that may take this one's place gets copies of the state."""
        return self._copies is not None

    def refuse_heirs(self) -> None:
        """Send no more copies: nobody takes this rank's place."""
        if self._copies is not None:
            self._copies.stop()

    @property
    def _others(self) -> dict[int, Shard]:
        """The shards of the other servers."""
        return {index: one for index, one in self._shards.items() if one.server != self._server.rank}

    @property
    def _standing_by(self) -> set[int]:
        """The spares that live and do not serve."""
        return {spare for shard in self._shards.values() for spare in shard.spares}

    @property
    def server(self) -> Server:
        """The state machine."""
        return self._server

    def start(self) -> None:
        """Serve until every worker has asked to join, so that all ranks get here together."""
        self.wait_until(lambda: self._server.peers.gathered)
        if self._resumed:  # its own shard only, and perhaps no epoch is left to assemble all after
            self._assemble()

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
        self._assemble()

    def end_epoch(self) -> None:
        """Serve until every remaining worker has finished one more epoch."""
        if self.service is not None:
            # Not at the end of the last epoch: a spare that trains already would miss a pause that follows.
            self.tell(self.service.places.decide(self._epochs))
        self._epochs += 1
        # A pause requested after this epoch's end completes only when this server has ended the epoch, too.
        self._let_pause(before_epoch=self._epochs)
        self._bottleneck.begin()
        self.wait_until(self._epoch_over)
        self.spare_calls.call(self._epochs)
        peers = self._server.peers.values()
        self._bottleneck.end([one.waited for one in peers if one.epochs >= self._epochs])
        self._server.pauses.before_epoch = _NEVER
        self._assemble()

    def end_epochs(self) -> None:
        """Call no spare any more: the scripts begin no epoch after this one."""
        self.spare_calls.allowed = False
        if self.service is not None:
            self.spare_calls.keep()
            self.tell(self.service.places.decide(math.inf))  # or it would wait for the next epoch

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
        self.end_epochs()

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
        # A pause may come while this rank waits for an answer.
        self.wait_until(lambda: not self._queries.busy)
        earlier = self._queries.answer
        perform(self._endpoint, self._queries.ask(query))
        self.wait_until(lambda: self._queries.answer is not None)
        answer: Any = self._queries.answer
        if earlier is not None:
            self._queries.answer = earlier
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

    def pause(self, *, between: bool = False) -> bool:
        """Serve, between epochs, until all workers pause."""
        return self._pause(None, between=between)

    def _pause(self, number: int | None, *, between: bool) -> bool:
        """Serve until the pause with this number is over; None: the next one."""
        pauses = self._server.pauses
        completed, self._between = pauses.completed, between
        self._let_pause(before_epoch=math.inf)
        self.wait_until(lambda: pauses.completed > completed if number is None else pauses.made >= number)
        pauses.before_epoch, self._between = _NEVER, False
        if isinstance(self._queries, QueryClient):
            self._queries.record.saves += between
        return True

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all workers, and that since the first worker has ended its last epoch."""
        made, server = self._server.rule.progress, self._server
        return int(made), int(made - server.progress_at[-1])

    @property
    def pauses(self) -> int:
        """The number of the last pause, as the first server counts them."""
        return self._server.pauses.made

    def saving(self) -> set[int]:
        """Return the other ranks that save: those of the workers in training, and the other servers."""
        return self._with_standing(Standing.TRAINING) | {shard.server for shard in self._others.values()}

    def workers(self) -> set[int]:
        """Return the ranks of all workers, but for those that serve by now."""
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
        return ranks - self._gone_members - self._server.turned

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Serve until `condition` holds."""
        self._stall_detector.begin()
        serve(self._endpoint, self._handle, condition, self._watches)
        self._server.rule.settle()

    def tell(self, answers: Answers) -> None:
        """Send answers of the query service."""
        assert self.service is not None  # only the first server calls this
        perform(self._endpoint, self.service.tell(answers))

    def state(self) -> State:
        """Return all that the next commit depends on; exact in a pause."""
        state: State = {"server": self._server.state(), "averages": None}
        if self.service is not None:
            averages = self.service.averages
            state["averages"] = averages.renamed(averages.state(), self._server.saved_as)
        return state

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
        self._begin_after(epochs)
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
        if self.service is not None:
            self.tell(self.service.places.decide(math.inf))
        self.ask(LeaveQuery())
        self.wait_until(lambda: self._server.finished)
        self._assemble(for_good=True)
        last()
        self._end_copies()
        self._leave()
        self.wait_until(lambda: self.service is None or not self.service.present)
        self._endpoint.close()

    def _end_copies(self) -> None:
        """Let those that may take this rank's place go: nobody needs it any more."""
        service, rank = self.service, self._server.rank
        if service is not None and self._copies is not None:  # other servers ask for their last means
            self.wait_until(lambda: service.present <= {rank, *self._shards[self._server.shard].spares})
        if self._copies is not None:
            self._copies.stop()
            self.wait_until(lambda: self._copies is None or self._copies.idle)
            self._copies.end()

    def _go_on(self, state: Mapping[str, Any], *, others: bool = False) -> None:
        self._resumed = True
        # Between epochs, a server has ended and assembled as many epochs as the slowest worker.
        self._begin_after(min(peer.epochs for peer in self._server.peers.values()))
        if self.service is not None and state["averages"] is not None:
            self.service.averages.load(state["averages"], others=others)

    def _begin_after(self, epochs: int) -> None:
        """Begin where this server and all others have assembled so many epochs."""
        self._epochs, self._asked_for = epochs, (epochs, False)
        if self._others:
            self._server.other_servers = dict.fromkeys(self._server.other_servers, epochs)

    def _leave(self) -> None:
        """Tell all that this server needs nothing any more, whoever dies."""
        self._served, rank = True, self._server.rank
        stands_by = rank in self._standing_by
        for shard in self._others.values():
            # Those that may serve before this rank does.
            earlier = shard.spares[: shard.spares.index(rank) if rank in shard.spares else None]
            for one in (shard.server, *earlier) if stands_by else earlier:
                serves = one == shard.server  # then a goodbye follows, where it answers queries
                leave = Message(Kind.LEAVE, rank, 0, shard=shard.index, mark=serves, stop=stands_by)
                perform(self._endpoint, [Send(one, leave)])
        first = self._shards[0].server
        if first not in self._away:  # as after the death of the one that answered
            perform(self._endpoint, self._queries.ask(GoodbyeQuery()))
        self.wait_until(
            lambda: (
                self._queries.answer is not None
                or first in self._gone
                or self._shards[0].server in self._away
            )
        )

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
        self._without_heir(rank)
        self._refuse_solitude(rank)

    def _is_awaited(self, rank: int) -> bool:
        """Whether the next message must come from this worker."""
        peer = self._server.peers[rank]
        asked = self.service is not None and self.service.has_asked(rank)
        return peer.standing in AWAITED and not peer.unanswered and not asked

    def _assemble(self, *, for_good: bool = False) -> None:
        """Exchange shards with the other servers, so that the parameters are the whole centre.

        Args:
            for_good: this server will not pull again, however many epochs others still make.
        """
        self._missing = set(self._others) - self._had
        self._asked_for = self._epochs + for_good, for_good
        for index in sorted(self._missing):
            self._ask_for(index)
        self.wait_until(self._assembled)

    def _ask_for(self, index: int) -> None:
        """Ask another server for its shard, once it has answered what it was asked for before."""
        if index not in self._pulls:
            epochs, for_good = self._pulls[index] = self._asked_for
            request = Message(Kind.PULL, self._server.rank, epochs, shard=index, mark=for_good)
            perform(self._endpoint, [Send(self._shards[index].server, request)])

    def _assembled(self) -> bool:
        epochs, for_good = self._asked_for
        serving = {shard.server for shard in self._others.values()}
        if for_good:  # then spares, too, have all of them, and no server leaves before
            return not self._missing and self._server.pulled_by(serving | self._standing_by, math.inf)
        return not self._missing and self._server.pulled_by(serving, epochs)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Lost):
            self._lost(event)
            return
        if event.message.sender in self._dropped:
            service = self.service if event.message.shard == self._queries.shard else None
            perform(self._endpoint, (service or self._server).handle(event))
            return
        self._stall_detector.heard(event.message)
        if event.message.needs_no_more:
            self._stood_by(event.message)
            perform(self._endpoint, self._server.handle(event))
        elif event.message.kind is Kind.TURN:
            self._turned(event)
        elif event.message.kind in (Kind.CALL, Kind.PLACE):
            self._endpoint.release(event.message.sender, event.frame)
            self.spare_calls.hear(event.message, self._gone)
            if event.message.kind is Kind.PLACE:
                self._stall_detector.watch(event.message.sender, self._hosts[event.message.sender])
        elif event.message.shard == self._server.shard:
            self._refuse_absence(event.message)
            self._warn_of_leaving(event.message)
            self._bottleneck.begin_work()
            perform(self._endpoint, self._server.handle(event))
            self._bottleneck.end_work()
            self._look_for_pause()
            joins = event.message.kind is Kind.JOIN and event.message.sender in self._server.places
            if joins and event.message.sender in self._standing_by:  # it was a spare
                self._seated(event.message.sender)
            if event.message.kind is Kind.LEAVE:
                self._left(event.message.sender)
        elif event.message.shard == self._queries.shard:
            perform(self._endpoint, self._queries.handle(event))
            self.spare_calls.dismiss_leavers()
        elif event.message.kind is Kind.ACK:
            self._acknowledged(event)
        else:
            self._take_shard(event)

    def _turned(self, event: Received) -> None:
        """Go on with a worker that serves another shard, or stands by to."""
        sender = event.message.sender
        trained = not self._server.peers[sender].gone
        perform(self._endpoint, self._server.handle(event))
        if trained and self.service is not None:
            perform(self._endpoint, self.service.retire(sender))
        self._look_for_pause()
        self._refuse_solitude(sender)

    def _seated(self, spare: int) -> None:
        """Note that a spare trains in the place of a dead worker, and can serve no more."""
        server = self._server
        self._shards = {one.index: one.without_spare(spare) for one in self._shards.values()}
        if self._copies is not None:
            self._copies.without(spare)
        self._stall_detector.watch(spare, self._hosts[spare])
        self._tell_place(spare, server.peers[spare].epochs)

    def _tell_place(self, spare: int, epochs: int) -> None:
        """Say once, on the first server, whose place a spare takes after so many epochs."""
        server, place = self._server, self._server.places[spare]
        worker = [rank for rank in server.peers if rank not in server.places].index(place)
        text = f"rank {spare} on {self._hosts[spare]} takes the place of worker {worker} (rank {place})"
        if self.service is not None and not any(line.startswith(text) for line in self._losses):
            self._losses.append(f"{text} from epoch {epochs + 1} on")
            _LOG.warning("nnlo: %s", self._losses[-1])

    def _left(self, sender: int) -> None:
        """Note that a worker has left: the query service waits for it no more."""
        for rank in self._groups.get(sender, (sender,)):
            if self.service is not None and self._knows(rank):  # it may serve
                perform(self._endpoint, self.service.gone(rank))  # it says goodbye later
            elif self.service is not None:
                perform(self._endpoint, self.service.left(rank))

    def _stood_by(self, message: Message) -> None:
        """Note that a rank that stood by has left, if it has: it takes nobody's place, and no copies."""
        if message.stood_by:
            self._away.add(message.sender)
            if self._copies is not None:
                self._copies.without(message.sender)

    def _acknowledged(self, event: Received) -> None:
        if self._copies is None:
            self._endpoint.release(event.message.sender, event.frame)
        else:
            self._copies.acknowledged(event)

    def _look_for_pause(self) -> None:
        if self._server.pauses.completed > self._pauses:
            self._pauses = self._server.pauses.completed
            if self._between and self.service is not None:
                self.service.pauses.numbers.append(self._server.pauses.made)
            self._between = False
            self._let_wait(may_wait=True)
            if self.keeper is not None:
                self.keeper.all_pause()

    def _let_wait(self, *, may_wait: bool) -> None:
        """Set whether workers may wait for leases that others may give back."""
        if self.service is not None:
            perform(self._endpoint, self.service.let_wait(may_wait=may_wait))

    def _refuse_nan(self, message: Message) -> None:
        vector = message.vector if message.kind in CONTRIBUTIONS else None
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
        if (self._in_view or in_mean) and message.kind in OF_STEPS and not self._server.stopping:
            peer = self._server.peers.get(message.sender)
            if peer is not None and peer.epochs < self._epochs:
                return  # this rank was a worker, and ahead of this one
            if in_mean or (peer is not None and peer.views < self._views):
                raise ConfigurationError(
                    f"rank {self._server.rank} waits for all ranks in evaluate() or mean() after epoch "
                    f"{self._epochs}, but rank {message.sender} continued training; {ALIKE}"
                )

    def _warn_of_leaving(self, message: Message) -> None:
        """Warn of ranks that leave while others train."""
        left_after = self._epochs if self._leaving else 0
        self._leavers.look(message, left_after, tells=self.service is not None)

    def _epoch_over(self) -> bool:
        if self.service is not None:
            self.service.refuse_absence(self._epochs)
        return self._server.peers.have_finished(self._epochs)

    def _lost(self, event: Lost) -> None:
        if event.rank in self._server.peers.called():
            self.spare_calls.dismiss(event.rank)
        if event.rank in self._server.peers:
            others = set(self._server.peers.awaited()) - {event.rank}
            if self._server.peers[event.rank].standing in AWAITED:
                self._losses.append(self._stall_detector.report_death(event.rank, len(others)))
            perform(self._endpoint, self._server.handle(event))
            self._look_for_pause()  # all others may have waited for this one
            perform(self._endpoint, self._queries.handle(event))
            self._without_heir(event.rank)
            self._refuse_solitude(event.rank)
        elif any(event.rank in group for group in self._groups.values()):
            self._gone_members.add(event.rank)
            perform(self._endpoint, self._queries.handle(event))
        elif self._knows(event.rank):
            self._without(event.rank)

    def _knows(self, rank: int) -> bool:
        """Whether a rank serves, or may."""
        return rank in {shard.server for shard in self._shards.values()} | self._standing_by

    def _without(self, rank: int) -> None:
        """Go on without a dead server or spare: the next rank serves each shard that was its.

        Raises:
            PeerLostError: there is none.
        """
        before, spares = self._shards, self._standing_by
        self._gone.add(rank)
        self._shards = {one.index: one for one in shards_without([*before.values()], rank)}
        perform(self._endpoint, self._server.forget_server(rank))
        perform(self._endpoint, self._queries.handle(Lost(rank)))
        if self._copies is not None:
            for spare in before[self._server.shard].spares:
                if spare not in self._shards[self._server.shard].spares:
                    self._copies.without(spare)
        if rank in spares and self.service is not None:
            self._tell_of_spare(rank, [index for index, one in before.items() if rank in one.spares])
        self.spare_calls.keep()
        for index, shard in self._shards.items():
            if shard.server != before[index].server:
                self._go_on_with(shard, rank)

    def _go_on_with(self, shard: Shard, dead: int) -> None:
        """Go on with the rank that serves a shard in the place of a dead one."""
        self._pulls.pop(shard.index, None)
        if self._served or shard.server in self._away:
            return
        # It must hear how far this rank is, also if nothing is missing.
        if self._asked_for > (0, False) or shard.index in self._missing:
            self._ask_for(shard.index)
        if isinstance(self._queries, QueryClient) and self._queries.service == dead:
            perform(self._endpoint, self._queries.return_to(shard.server))
        if self.service is not None:
            self._losses.append(f"{self._replaced_by(shard, dead)}, at {date_and_time()}")
            self.spare_calls.tell_all([shard])

    def _replaced_by(self, shard: Shard, dead: int) -> str:
        role = "the server" if len(self._shards) == 1 else f"server {shard.index}"
        return (
            f"rank {dead} on {self._hosts[dead]}, {role}, has died; rank {shard.server} serves in its place"
        )

    def _without_heir(self, rank: int) -> None:
        """Go on without a dead worker that served by now, or would have, if it is one."""
        if self._knows(rank):
            self._without(rank)

    def _tell_of_spare(self, rank: int, shards: Sequence[int]) -> None:
        """Tell of the death of a rank that could have served these shards."""
        alone = [index for index, shard in sorted(self._shards.items()) if not shard.spares]
        if rank in self._server.peers:  # a worker
            one = len(self._shards) == 1
            place = "the server's place" if one else f"the place of server {shards[0]}"
            left = "the server's death now ends the job" if one else "its death now ends the job"
            if after := self._shards[shards[0]].spares:
                left = f"rank {after[0]} now would"
            _LOG.warning("nnlo: rank %d would have served in %s; %s", rank, place, left)
            return
        if not alone:
            left = f"spares left: {len(self._standing_by)}"
        elif len(self._shards) == 1:
            left = "the server's death now ends the job"
        else:
            left = f"the death of server {' or '.join(map(str, alone))} now ends the job"
        _LOG.warning("nnlo: rank %d, a spare, has died; %s", rank, left)

    def _refuse_solitude(self, rank: int) -> None:
        """Raise if `rank`, which is lost, was the last worker."""
        if all(peer.standing is Standing.LOST for peer in self._server.peers.values()):
            was = "was dropped" if rank in self._dropped else "has died"
            was = "serves in a dead server's place" if rank in self._server.turned else was
            raise PeerLostError(rank, f"the last worker{self._of} {was}")

    def _take_shard(self, event: Received) -> None:
        message, index = event.message, event.message.shard
        shard = self._shards.get(index)
        if shard is None or shard.server != message.sender or index not in self._pulls:
            self._endpoint.release(message.sender, event.frame)  # the last word of a dead one
            return
        assert message.vector is not None  # the reply to a pull is a CENTER
        self._server.stopping |= message.stop  # a stop on one server stops all
        asked = self._pulls.pop(index)
        if index in self._missing and asked == self._asked_for:
            np.copyto(self._parameters.vector[shard.place], message.vector)
            self._missing.discard(index)
            self._had |= {index} if asked[1] else set()
        self._endpoint.release(message.sender, event.frame)
        if index in self._missing:
            self._ask_for(index)
