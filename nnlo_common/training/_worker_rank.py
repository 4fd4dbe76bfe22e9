"""Worker rank: computes gradients and exchanges with the servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from nnlo_common.algorithms._rule import GradientSum
from nnlo_common.base._errors import PeerLostError
from nnlo_common.base._flat_vector import Apart, FlatVector, Vector
from nnlo_common.base._state_tree import State, require
from nnlo_common.cluster.transport._endpoint import Endpoint
from nnlo_common.protocol import Action, Activity, Kind, QueryClient, Received, Wait, Worker
from nnlo_common.protocol._query_messages import AnswerT, GoodbyeQuery, Query
from nnlo_common.training._rank_parts import LocalStep, TrainingReport, work
from nnlo_common.training._stall_detector import ServerWatch

__all__ = ["WorkerRank"]


class WorkerRank:
    """Computes gradients and exchanges with the servers.

    Args:
        endpoint: this rank's endpoint.
        worker: the state machine.
        queries: sends queries to the query service.
        hosts: the host of each server.
        stall_timeout_s: how long the servers wait for a silent worker; see `ServerWatch`.
        tells: warn of silent servers.
        on_drop: called when the servers have dropped this rank, before the error is raised.
        asking: the endpoint for queries, if it is another.
        says_goodbye: tell the query service on leaving; its server is not one that this rank leaves.
        spares: the ranks that may take over from a server, among `hosts`.
        drop: takes a silent server out of the job; returns whether the others go on.

    Attributes:
        on_moving: called when the parameters have moved because another rank serves now.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        worker: Worker,
        queries: QueryClient,
        hosts: Mapping[int, str],
        *,
        stall_timeout_s: float | None = None,
        tells: bool = True,
        on_drop: Callable[[], object] = lambda: None,
        asking: Endpoint | None = None,
        says_goodbye: bool = False,
        spares: Collection[int] = (),
        drop: Callable[[int], bool] = lambda rank: False,
    ) -> None:
        self._endpoint, self._worker, self._queries = endpoint, worker, queries
        self._asking, self._says_goodbye = asking, says_goodbye
        self._servers, self._spares, self._on_drop = set(hosts), set(spares), on_drop
        self._gone: set[int] = set()
        self.on_moving: Callable[[], object] = lambda: None
        self._watch = ServerWatch(
            hosts,
            self._awaited,
            stall_timeout_s=stall_timeout_s,
            tells=tells,
            drop=drop if spares else lambda rank: False,
        )
        self._steps = self._samples = 0
        self._clock, self._began_s, self._waited_s = time.perf_counter, 0.0, 0.0  # since the first step
        self._first = True  # of an epoch; the servers may validate before they answer this step

    def start(self) -> None:
        """Join; return once the centre has arrived."""
        self._work(self._worker.join(), "the begin of the training")

    def refuse_heirs(self) -> None:
        """Let the death of a server end the training, whoever could take its place."""
        self._spares = set()

    def abandon(self) -> None:
        """Leave without having started."""
        self._endpoint.close()

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step, with the exchange due in it."""
        self._worker.set_weight(weight)
        due, began_s = self._worker.due, self._clock()
        self._work(self._worker.step(local_step), "the first step of an epoch" if self._first else "a step")
        if self._first:
            self._began_s, self._waited_s = self._clock(), 0.0
        elif due:
            self._waited_s += self._clock() - began_s
        self._first = False
        self._steps += 1

    @property
    def may_leave_apart(self) -> bool:
        """Whether nothing reads the next gradient in its vector, so that it may leave from elsewhere."""
        leaves = all(one.ahead(0) is not None for one in self._worker.shard_clients)
        return leaves and self._worker.local is None

    @property
    def losses(self) -> int:
        """How many servers have died; what has left for them is lost."""
        return len(self._gone)

    def send_ahead(self, start: int, apart: Apart = ()) -> None:
        """Begin to send the next step's gradient, which is made behind `start` and changes no more there.

        Args:
            start: the place in the gradient.
            apart: what of it lies outside of the vector.
        """
        for shard, vector, made in self._worker.ahead(start):
            first, stop = shard.place.start, shard.place.stop
            inside = [
                (slice(place.start - first, place.stop - first), numbers)
                for place, numbers in apart
                if first <= place.start < stop
            ]
            self._endpoint.send_ahead(shard.server, shard.index, vector, made, inside)

    def withdraw(self) -> None:
        """Let what was sent ahead count for nothing: the gradient has changed, or no step follows."""
        for shard, _, _ in self._worker.ahead():
            self._endpoint.withdraw(shard.server, shard.index)

    def begin_epoch(self) -> bool:
        """Begin an epoch at the end of the last one; return whether that has moved the parameters."""
        moves, self._first = self._worker.refreshes, True
        self._work(self._worker.begin_epoch(), "the begin of an epoch")
        return moves

    @property
    def due(self) -> bool:
        """Whether the next step must be made; otherwise it may be passed."""
        return self._worker.due

    @property
    def moves(self) -> bool:
        """Whether the next step moves the parameters, by an exchange or by an optimizer of the algorithm."""
        return self._worker.due or self._worker.local is not None

    def sum_by(self, make: Callable[[], GradientSum]) -> None:
        """Add up gradients by this sum in place of the algorithm's own, if nothing else needs each one."""
        first, *others = self._worker.shard_clients
        if first.rule.sums and not others and self._worker.local is None:
            first.rule.sum_by(make())

    def due_within(self, steps: int) -> bool:
        """Whether one of the next steps exchanges."""
        return self._worker.due_within(steps)

    @property
    def gathered(self) -> int:
        """The number of steps since the last contribution."""
        return self._worker.gathered

    def add_weight(self, weight: float) -> None:
        """Add the weight of passed steps to the next contribution."""
        self._worker.add_weight(weight)

    def last_round(self) -> None:
        """Contribute the steps since the last round, if the algorithm trains in rounds."""
        self._work(self._worker.last_round(), "the last round of an epoch")

    def use_gradient(self, gradient: FlatVector) -> None:
        """Take the next gradient from another vector; the current one may still be sending."""
        self._worker.use_gradient(gradient)

    def pass_step(self) -> None:
        """Count a step that does not exchange."""
        self._worker.pass_step()
        self._steps += 1

    def end_epoch(self) -> None:
        """Report the end of the epoch to the servers."""
        seconds = self._clock() - self._began_s
        self._worker.tell_wait(0.0 if self._first or seconds <= 0 else self._waited_s / seconds)
        self._work(self._worker.finish_epoch(), "the end of an epoch")

    def point(self) -> Vector:
        """Return the parameters, or the point ahead of them."""
        return self._worker.gradient_point()

    @property
    def stopped(self) -> bool:
        """Whether a server has asked to end, in its latest reply."""
        return self._worker.stop_requested

    def stop(self) -> None:
        """Do nothing: this rank sees its own parameters, not the centre."""

    def look(self, into: Vector) -> None:
        """Copy the current centre into `into`; this does not affect the training."""
        self._work(self._worker.look(into), "the current centre")

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` once all have finished the epoch."""
        self._work(self._worker.look(into, when_all_are_there=True), "the centre at the end of an epoch")

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service, and wait for the answer."""
        self._work(self._answered(query), f"the answer to {type(query).__name__}", self._asking)
        answer: Any = self._queries.answer
        return cast("AnswerT", answer)

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all workers as the first server has last told it, and of this epoch, in samples."""
        return self._worker.progress

    @property
    def told_rate(self) -> float:
        """The learning rate in the first server's latest reply; 0: none."""
        return self._worker.rate

    @property
    def pause_requested(self) -> bool:
        """Whether the first server has asked for a pause at the next batch boundary."""
        return self._worker.pause_requested

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False: the pause was cancelled."""

        def granted() -> None:
            self._queries.record.saves += between

        self._work(self._worker.pause(granted), "the pause of all workers")
        return self._worker.paused

    def state(self) -> State:
        """Return all that the next step depends on; exact in a pause."""
        return {"worker": self._worker.state(), "steps": self._steps, "samples": self._samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before `start`."""
        require("a worker's part", state, worker=Mapping, steps=int, samples=int)
        self._worker.load(state["worker"])
        self._steps = state["steps"]
        self.count_samples(state["samples"])

    def begin_after(self, epochs: int) -> None:
        """Note that the servers count these epochs as finished; call it before `start`."""
        self._worker.begin_after(epochs)

    def configure(self, values: Vector) -> None:
        """Send the servers options for this worker's later contributions."""
        self._work(self._worker.configure(values), "new options")

    def set_local_rate(self, rate: float) -> None:
        """Set the learning rate of the optimizer that moves this worker's parameters."""
        if self._worker.local is not None:
            self._worker.local.learning_rate = rate

    def count_samples(self, total: int) -> None:
        """Send, with later messages, the number of samples this worker has taken so far."""
        self._samples = total
        self._worker.count_samples(total)

    def report(self) -> TrainingReport:
        """Return the steps made."""
        return TrainingReport(steps=self._steps, samples=self._samples)

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`, then leave."""
        last()
        self._work(self._worker.leave(), "the end of the training")
        if self._says_goodbye:
            self.ask(GoodbyeQuery())
        self._endpoint.close()

    def _answered(self, query: Query[Any]) -> Activity:
        yield from self._queries.ask(query)
        while self._queries.busy:
            yield Wait()

    def _work(self, activity: Activity, what: str, endpoint: Endpoint | None = None) -> None:
        self._watch.begin(what)
        work(endpoint or self._endpoint, self._deliver, activity, self._lost, self._watch, what=what)

    def _lost(self, rank: int, error: PeerLostError | None) -> None:
        """Go on after the death of a server with the spare that takes over; raise if there is none."""
        if rank in self._gone or (error is None and rank not in self._servers):
            return
        if rank not in self._servers or not self._spares:
            raise error or PeerLostError(rank, "a server of the centre has died")
        self._gone.add(rank)
        self._work(self._going_on_without(rank), "another server")
        if not self._worker.keeps_own:
            self.on_moving()

    def _going_on_without(self, rank: int) -> Activity:
        yield from self._worker.go_on_without(rank)
        service = self._worker.shard_clients[0].shard.server
        if rank == self._queries.service:
            yield from self._queries.return_to(service)
            while self._queries.returning:
                yield Wait()

    def _awaited(self) -> set[int]:
        """Return the servers that must answer next."""
        awaited = {one.shard.server for one in self._worker.shard_clients if one.unanswered or one.absorbing}
        return awaited | ({self._queries.service} if self._queries.busy else set())

    def _deliver(self, event: Received) -> list[Action]:
        if event.message.kind is Kind.DROPPED:
            self._on_drop()
        if event.message.shard == self._queries.shard:
            return self._queries.handle(event)
        return self._worker.deliver(event)
