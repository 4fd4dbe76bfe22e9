"""Parts of the ranks of a group: one worker with servers, or all ranks of a training without servers."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._rule import GroupRule
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.base._spans import span
from nnlo_common.base._state_tree import State, require
from nnlo_common.protocol import (
    QUERY_NUMBERS,
    Averages,
    Broadcasts,
    EpochMeans,
    Means,
    Notes,
    QueryService,
    check_weight,
)
from nnlo_common.protocol._query_messages import (
    Answer,
    AnswerT,
    LastRoundQuery,
    LedgerQuery,
    Query,
    read_answer,
    read_query,
    written,
)
from nnlo_common.training._collectives import BufferCounts
from nnlo_common.training._group_rank import GroupRank, Meeting
from nnlo_common.training._rank_parts import LocalStep, TrainingReport
from nnlo_common.training._stall_detector import date_and_time
from nnlo_common.training._worker_rank import WorkerRank

__all__ = ["GroupTrainer", "GroupWorkerRank"]

_LOG = logging.getLogger(__name__)


class GroupWorkerRank(WorkerRank):
    """One rank of a group that is a worker: each runs the same state machine, see `_group_endpoints`.

    Before each exchange with the servers all ranks of the group meet, so that one at another point of its
    loop is named instead of waited for without an end.

    Args:
        group: this rank's side of the group.
        parameters: the worker's.
        rest: see `WorkerRank`.
    """

    def __init__(self, group: GroupRank, parameters: FlatVector, *rest: Any, **options: Any) -> None:
        super().__init__(*rest, **options)
        self._group, self._parameters = group, parameters
        self._losses: list[str] = []
        group.when_lost(self._go_on_without)

    def _go_on_without(self, dead: Sequence[int]) -> None:
        for rank in dead:
            line = f"rank {rank} has died; the others of its group go on"
            self._losses.append(f"{line}, at {date_and_time()}")
            if self._group.leads:
                _LOG.warning("nnlo: %s. Ranks left: %d", line, len(self._group.group.ranks))

    def report(self) -> TrainingReport:
        """Return the steps made, and who has died in this group."""
        return replace(super().report(), lost=tuple(self._losses))

    def start(self) -> None:
        """Join; return once the centre has arrived."""
        self._group.meet(Meeting.BEGIN)
        super().start()

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Make one step with the group's mean gradient, with the exchange due in it.

        Args:
            weight: this rank's part of the group's weight in a mean over workers.
            local_step: moves the parameters, if given.
        """
        total = float(self._group.meet(Meeting.STEP, weight)[:, 0].sum())
        self._group.tell_finite(self._worker.gradient.vector)
        super().step(total, local_step)

    def begin_epoch(self) -> bool:
        """Begin an epoch; return whether that has moved the parameters."""
        self._group.meet(Meeting.BEGIN_EPOCH)
        return super().begin_epoch()

    def end_epoch(self) -> None:
        """Report the end of the epoch to the servers."""
        self._group.meet_alike(Meeting.END_EPOCH, self._parameters.vector)
        super().end_epoch()

    def last_round(self) -> None:
        """Contribute the steps since the last round, if the algorithm trains in rounds."""
        self._group.meet(Meeting.LAST_ROUND)
        super().last_round()

    def look(self, into: Vector) -> None:
        """Copy the current centre into `into`."""
        self._group.meet(Meeting.LOOK)
        super().look(into)

    def view(self, into: Vector) -> None:
        """Copy the centre into `into` once all have finished the epoch."""
        self._group.meet(Meeting.LOOK)
        super().view(into)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask the query service: each rank for itself, but the lead for all where leases are concerned."""
        if not isinstance(query, LedgerQuery):
            return super().ask(query)
        self._group.meet(Meeting.LEASE)
        self._group.need_all()  # each has its part of a lease: when one dies, others get the whole lease
        if self._group.index == 0:
            answer: Answer = super().ask(query)
            self._group.bytes_of_lead(written(answer, np.zeros(QUERY_NUMBERS, np.float32)).tobytes())
            return cast("AnswerT", answer)
        vector = np.array(np.frombuffer(self._group.bytes_of_lead(), np.float32))
        found: Any = read_answer(query.answered_by(), vector, "what the lead has heard of leases")
        return cast("AnswerT", found)

    def pause(self, *, between: bool = False) -> bool:
        """Wait until all workers are at a batch boundary; False: the pause was cancelled."""
        self._group.meet(Meeting.PAUSE)
        return super().pause(between=between)

    def state(self) -> State:
        """Return all that the next step depends on; exact in a pause."""
        sums = self._group.reducer.state()
        return {"worker_rank": super().state(), "group_samples": self._group.samples, "sums": sums}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before `start`."""
        require("a rank of a group", state, worker_rank=Mapping, group_samples=int, sums=np.ndarray)
        self._group.reducer.load(state["sums"])
        self._group.samples = state["group_samples"]
        super().load(state["worker_rank"])

    def count_samples(self, total: int) -> None:
        """Count the samples of this rank; the servers hear of those of the whole group."""
        self._samples = total
        self._worker.count_samples(self._group.samples)

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`, then leave."""

        def last_together() -> None:
            last()
            # Once the lead has left, the servers answer no more queries of this group.
            self._group.meet_alike(Meeting.LEAVE, self._parameters.vector)

        super().finish(last_together)


class _Told(enum.IntFlag):
    """What a rank tells the others of its group in each step."""

    STOP = enum.auto()
    SAVE = enum.auto()
    WRITTEN = enum.auto()


class GroupTrainer:
    """One rank of a training without servers: every rank steps the optimizer with the mean gradient.

    Queries are answered without a server, too: all ranks ask together, and each hears all queries and works
    out all answers, so that the answering state is the same on all.

    Attributes:
        pause_requested: a rank wants to save; all ranks see it after the same step.
        all_written: all ranks have written their part of a checkpoint; all see it after the same step.
        role: the role it has taken over from the first rank; empty until that has died.
        on_taking_over: called when it does.

    Args:
        group: this rank's side of the group of all ranks.
        parameters: its parameters; those of the lead are the start.
        gradient: the mean gradient.
        optimizer: moves the parameters; None if something else does.
        averages: averages the buffers.
        rule: makes each step in place of the optimizer, if the algorithm has such a rule.
        numbers: the most numbers that a query carries after its JSON.
        hosts: the hosts of all ranks.
    """

    due = False
    moves = True
    gathered = 0
    told_rate = 0.0

    def __init__(
        self,
        group: GroupRank,
        parameters: FlatVector,
        gradient: FlatVector,
        optimizer: VectorOptimizer | None,
        *,
        averages: Averages,
        rule: GroupRule | None = None,
        numbers: int = 0,
        hosts: Sequence[str] = (),
    ) -> None:
        self._group, self._parameters, self._gradient = group, parameters, gradient
        self._rule, self._progress_before = rule, 0.0
        group.norms = None if rule is None else rule.norms
        self._optimizer = optimizer
        self._rank, ranks = group.group.ranks[group.index], group.group.ranks
        self._copies = Broadcasts(ranks, ranks[0])
        parts = Means(ranks), Means(ranks, LastRoundQuery), averages, Notes(), EpochMeans(ranks)
        self._parts = *parts, self._copies
        self._handlers = QueryService(self._rank, 0, ranks, self._parts).handlers
        self._averages, self._hosts = averages, hosts
        self.role, self._losses = "", list[str]()
        self.on_taking_over: list[Callable[[], object]] = []
        self._first = ranks[0]  # leads as long as it lives
        group.when_lost(self._go_on_without)
        self._room: Vector = np.zeros(QUERY_NUMBERS + numbers, np.float32)
        self._steps = self._samples = 0
        self._tells = _Told(0)
        self.stopped = self.pause_requested = self.all_written = self._loaded = False

    def _go_on_without(self, dead: Sequence[int]) -> None:
        """Go on without these ranks; the first of the others is the lead from now on."""
        left = self._group.group.ranks
        self._copies.source = left[0]
        for part in self._parts:
            for rank in dead:
                part.gone(rank, lost=True)
        takes_over = self._group.leads and not self.role and self._rank != self._first
        for rank in dead:
            line = f"rank {rank} on {self._hosts[rank]} has died; the others go on"
            self._losses.append(f"{line}, at {date_and_time()}")
            if self._group.leads:
                now = f"; rank {self._rank} leads now" if takes_over else ""
                _LOG.warning("nnlo: %s. Ranks left: %d%s", line, len(left), now)
        if takes_over:
            self.role = "lead"
            for call in self.on_taking_over:
                call()

    def start(self) -> None:
        """Begin at the lead's parameters."""
        self._group.meet(Meeting.BEGIN)
        if not self._loaded:
            self._group.broadcast(self._parameters.vector)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that live."""
        return self._group.leads

    def abandon(self) -> None:
        """Leave without having started."""
        self._group.group.close()

    def step(self, weight: float, local_step: LocalStep | None = None) -> None:
        """Step the optimizer; the training stops with this step if the lead wants to."""
        weights, told = self._group.meet(Meeting.STEP, weight, self._tells).T
        check_weight(self._group.group.ranks[0], float(weights.sum()))
        self._group.tell_finite(self._gradient.vector)
        with span("apply", "the optimizer"):
            if self._rule is not None:
                brought = weights > 0  # the others had no batch left
                squares = [one for one, has in zip(self._group.squares, brought, strict=True) if has]
                x, gradient = self._parameters.vector, self._gradient.vector
                self._rule.step(x, gradient, squares, float(weights[brought].mean()))
            elif local_step is not None:
                local_step()
            elif self._optimizer is not None:
                self._optimizer.step(self._parameters.vector, self._gradient.vector)
        self._steps += 1
        self._hear(told)

    def begin_epoch(self) -> bool:
        """Begin an epoch; it never moves the parameters."""
        self._hear(self._group.meet(Meeting.BEGIN_EPOCH, 0, self._tells)[:, 1])
        return False

    def end_epoch(self) -> None:
        """Check that all ranks have the same parameters."""
        self._group.meet_alike(Meeting.END_EPOCH, self._parameters.vector)
        self._progress_before = 0.0 if self._rule is None else self._rule.progress

    @property
    def progress(self) -> tuple[int, int]:
        """The progress of all ranks, and of this epoch, in samples."""
        if self._rule is None:
            return 0, 0
        return int(self._rule.progress), int(self._rule.progress - self._progress_before)

    def last_round(self) -> None:
        """Do nothing: no steps are left over."""

    def point(self) -> Vector:
        """Return the parameters, or the point ahead of them."""
        ahead: Callable[[Vector], Vector] | None = getattr(self._optimizer, "gradient_point", None)
        return self._parameters.vector if ahead is None else ahead(self._parameters.vector)

    def stop(self) -> None:
        """End the training on all ranks with the next step; only the lead decides it."""
        self._tells |= _Told.STOP

    def look(self, into: Vector) -> None:
        """Copy the parameters into `into`."""
        np.copyto(into, self._parameters.vector)

    def view(self, into: Vector) -> None:
        """Copy the parameters into `into`, once all ranks are there."""
        self._group.meet(Meeting.LOOK)
        self.look(into)

    def ask(self, query: Query[AnswerT]) -> AnswerT:
        """Ask together with all other ranks.

        Raises:
            ConfigurationError: nothing answers such a query without a server.
        """
        if type(query) not in self._handlers:
            raise ConfigurationError(
                f"{type(query).__name__} needs a server, but servers=0 trains without one; use servers=1"
            )
        self._group.meet(Meeting.ASK)
        answer: Answer | None = None
        brought = self._group.gather_bytes(written(query, self._room).tobytes())
        for index, data in enumerate(brought):
            vector, rank = np.array(np.frombuffer(data, np.float32)), self._group.group.ranks[index]
            asked = read_query(self._handlers, vector, f"the query from rank {rank}")
            for to, found in self._handlers[type(asked)](rank, asked):
                answer = found if to == self._rank else answer
        if answer is None:
            raise ConfigurationError(
                "the ranks of this training asked for different things at the same time; call evaluate(), "
                "mean() and the like on all ranks, in the same order"
            )
        found_here: Any = answer
        return cast("AnswerT", found_here)

    def want_pause(self) -> None:
        """Ask all ranks to pause at the same batch boundary, after the next step."""
        self._tells |= _Told.SAVE

    def tell_written(self) -> None:
        """Tell the others, in the next steps, that this rank has written its part of a checkpoint."""
        self._tells |= _Told.WRITTEN

    def take_together(self, data: bytes) -> list[bytes]:
        """Return what all ranks bring to a checkpoint (collective)."""
        self._group.meet(Meeting.PAUSE)
        self.all_written = False
        self._tells &= ~_Told.WRITTEN
        return self._group.gather_bytes(data)

    def pause(self, *, between: bool = False) -> bool:  # noqa: ARG002 - servers count them
        """Wait for the others."""
        self._group.meet(Meeting.PAUSE)
        self.pause_requested = False
        self._tells &= ~_Told.SAVE
        return True

    def state(self) -> State:
        """Return all that the next step depends on."""
        return {
            "parameters": self._parameters.vector.copy(),
            "optimizer": None if self._optimizer is None else self._optimizer.state(),
            "rule": None if self._rule is None else self._rule.state(),
            "progress_before": self._progress_before,
            "averages": self._averages.state(),
            "steps": self._steps,
            "samples": self._samples,
            "sums": self._group.reducer.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; call it before `start`."""
        optimizer = type(None) if self._optimizer is None else Mapping
        parts = {"parameters": self._parameters.vector, "optimizer": optimizer, "averages": Mapping}
        rule = type(None) if self._rule is None else Mapping
        numbers = {"steps": int, "samples": int, "progress_before": float, "sums": np.ndarray}
        require("a rank of a group", state, rule=rule, **numbers, **parts)
        self._load_center(state)
        self._averages.load(state["averages"])
        self._steps, self._samples = state["steps"], state["samples"]
        self._group.reducer.load(state["sums"])

    def load_center(self, epochs: int, buffers: BufferCounts | None) -> None:  # noqa: ARG002 - as a server's
        """Resume after `epochs` epochs from the parameters as they are now; call it before `start`.

        Args:
            epochs: finished epochs.
            buffers: the model's buffers and their update counts, if it has any.
        """
        self._loaded = True
        if buffers is not None:
            self._averages.restart(*buffers)

    def load_for_others(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a rank of a group of another size; call it before `start`."""
        self._load_center(state)
        self._averages.load(state["averages"], others=True)

    def _load_center(self, state: Mapping[str, Any]) -> None:
        """Restore what all ranks have alike, as a server's centre and its optimizer."""
        if self._rule is not None:
            self._rule.load(state["rule"])
        self._progress_before = state["progress_before"]
        if self._optimizer is not None:
            self._optimizer.load(state["optimizer"])
        np.copyto(self._parameters.vector, state["parameters"])
        self._loaded = True

    def report(self) -> TrainingReport:
        """Return the steps made."""
        rule = self._rule
        return TrainingReport(
            steps=self._steps,
            samples=self._samples,
            gain=None if rule is None else rule.gain_report(),
            progress=None if rule is None else rule.progress,
            lost=tuple(self._losses),
        )

    def finish(self, last: Callable[[], object] = lambda: None) -> None:
        """Call `last`, then leave."""
        last()
        self._group.meet_alike(Meeting.LEAVE, self._parameters.vector)
        self._group.group.close()

    def _hear(self, told: npt.NDArray[np.float64]) -> None:
        ranks = [_Told(int(one)) for one in told]
        self.stopped = self.stopped or _Told.STOP in ranks[0]  # the lead decides
        self.pause_requested = self.pause_requested or any(_Told.SAVE in one for one in ranks)
        self.all_written = all(_Told.WRITTEN in one for one in ranks)

    # -- what a session asks of a worker -----------------------------------------------------------------

    def use_gradient(self, gradient: FlatVector) -> None:
        """Take the next gradient from another vector."""
        self._gradient = gradient

    def count_samples(self, total: int) -> None:
        """Set the number of samples that this rank has taken so far."""
        self._samples = total

    def due_within(self, steps: int) -> bool:  # noqa: ARG002 - as on a worker
        """Whether one of the next steps exchanges with a centre: none does."""
        return False

    def pass_step(self) -> None:
        """Count a step made elsewhere."""
        self._steps += 1

    def add_weight(self, weight: float) -> None:
        """Do nothing: no mean over workers follows."""

    def configure(self, values: Vector) -> None:
        """Do nothing: the optimizer steps here, with its own options."""

    def set_local_rate(self, rate: float) -> None:
        """Do nothing: only yours steps the parameters."""
