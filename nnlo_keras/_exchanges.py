"""A worker's exchanges with the centre, between the batches of its `fit`: when, and of what.

What the training step itself must not do is here: input and output would not go into a compiled one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import NoteQuery, Session, Vector
from nnlo_keras._batch_sizes import BatchSizes
from nnlo_keras._callbacks._rank_callback import numbers
from nnlo_keras._rates import Rates
from nnlo_keras._weights import Weights
from nnlo_keras._wrapper import StepMode, Wrapper

__all__ = ["Exchanges"]


class Exchanges:
    """Counts a worker's batches, and exchanges when it is time to.

    Args:
        team: this rank's place among several.
        weights: the model's.
        wrappers: of its optimizers; of one kind, with the same options.
        rates: what the server tells of learning rates.
        sizes: of the batches.
        undisturbed: whether nobody else sees the weights between batches.

    Attributes:
        in_epoch: how many batches this epoch has had.
    """

    def __init__(
        self,
        team: Session,
        weights: Weights,
        wrappers: Sequence[Wrapper],
        rates: Rates,
        sizes: BatchSizes,
        *,
        undisturbed: bool,
    ) -> None:
        self._team, self._weights, self._wrappers, self._rates = team, weights, wrappers, rates
        self._sizes = sizes
        self._sums = wrappers[0].mode is StepMode.ACCUMULATE
        self._still = self._sums and not wrappers[0].moves_locally  # weights change by exchanges only
        self._attaches = undisturbed and self._still
        self._each = wrappers[0].algorithm.local_optimizer() is not None  # moves them here, in each step
        self._first = getattr(team.algorithm, "order", "") == "paper"
        if self._each and sizes.per_execution > 1:
            raise ConfigurationError(
                f"{type(wrappers[0]).__name__} needs the gradient of each batch, but compile() was given "
                f"steps_per_execution={sizes.per_execution}; leave that out"
            )
        self.in_epoch = 0
        self._weight = 0.0  # of the batches since the last contribution
        self._batch = -1  # the last one of this epoch
        self._open = False  # whether the epoch has not ended
        self._before: Vector | None = None  # the weights as an epoch's first batch begins
        self._begun: Vector | None = None  # the weights as an execution begins, where they are exchanged

    def state(self) -> dict[str, Any]:
        """Return where this worker is in its epoch."""
        gradient = None
        if self._sums and self._team.gathered:
            self._weights.collect()
            gradient = self._weights.gradient.vector.copy()
        return {"in_epoch": self.in_epoch, "weight": self._weight, "gradient": gradient}

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned, once the epoch has begun."""
        self.in_epoch, self._weight = state["in_epoch"], state["weight"]
        if state["gradient"] is not None:
            self._weights.resume(state["gradient"])

    def begin_epoch(self) -> None:
        """Begin an epoch, with all workers."""
        self._batch, self.in_epoch, self._open = -1, 0, True
        self._sizes.begin_epoch()
        self._team.begin_epoch()
        if self._attaches:
            self._weights.attach()

    def begin_batch(self) -> None:
        """Note the weights that an execution begins with, where they matter."""
        if self._still and self.in_epoch == 0:
            self._before = self._weights.parameters.vector.copy()
        if self._first and not self._sums and self._team.worker.due_within(self._sizes.per_execution):
            self._weights.absorb()
            self._begun = self._weights.parameters.vector.copy()

    def end_batch(self, batch: int, *, idle: bool) -> None:
        """Exchange, if it is time to.

        Args:
            batch: the number of the last one; with `steps_per_execution` not each is told of.
            idle: whether there was no data for it.
        """
        if self._before is not None:
            self._refuse_changes(self._before)
        first, self._batch = self._batch + 1, batch
        done = 0 if idle else self._sizes.batches(first, batch)
        self.in_epoch += done
        if self._team.stopped or not done:
            return
        self._team.take(done)
        self._weight += self._sizes.samples(first, done) if self._team.algorithm.weighs else done
        for _ in range(done - 1):
            self._team.pass_step()
        if self._each or self._team.due:
            self._step()
        else:
            self._team.pass_step()
        if self._wrappers[0].algorithm.optimizer_runs == "nowhere":
            self._weights.synchronise()
            for one in self._wrappers:
                # Nothing steps the optimizer; its schedule goes by this worker's batches.
                one.inner_optimizer.iterations.assign_add(done)
        self._begun = None
        self._rates.hear()

    def end_epoch(self, epoch: int, logs: Any, *, last: bool) -> None:
        """Contribute what is left, and tell what the metrics are; once, whoever calls it first.

        Args:
            epoch: its number.
            logs: the metrics.
            last: whether no other follows.
        """
        if not self._open:
            return
        self._open = False
        left = self._sums and self._team.gathered > 0
        if left:
            self._weights.collect()
            self._change_gradient()
            self._team.worker.add_weight(self._taken_weight())
        values = numbers(logs) if self.in_epoch else {}  # nothing was left for this worker
        self._team.ask(NoteQuery(epoch=epoch, values=values, weight=self.in_epoch or 1))
        self._team.end_epoch()
        self._weights.detach()
        if left:
            self._weights.clear()
        if last:
            self.last_round()

    def last_round(self) -> None:
        """Bring what was trained since the last round into the centre; once, with all ranks."""
        if self._weight:
            self._team.worker.add_weight(self._taken_weight())
        self._team.last_round()

    def _refuse_changes(self, before: Vector) -> None:
        """Refuse a training step that changes weights by itself: the next exchange would undo it, unsaid.

        It is looked for once in each epoch, which costs next to nothing.
        """
        self._before = None
        if changed := self._weights.changed_since(before):
            raise ConfigurationError(
                f"the weight {changed!r} was changed within the training step or by a callback, but only "
                "the optimizer on the server is to change it here, and the next exchange would undo that; to "
                "clip weights give the layer a kernel_constraint, or take an algorithm whose optimizer runs "
                "on workers, such as LocalSGD"
            )

    def _step(self) -> None:
        """Exchange, for all batches since the last time."""
        if self._sums:
            self._team.step(self._taken_weight(), self._change_gradient)
            if self._each or not self._team.gathered:
                self._weights.clear()
        elif self._first:
            self._exchange_as_begun()
        else:
            self._team.step(self._taken_weight(), lambda: None)

    def _exchange_as_begun(self) -> None:
        """Exchange the weights that the execution began with, and add what it has moved them by."""
        assert self._begun is not None  # begin_batch has seen that an exchange is due
        vector = self._weights.parameters.vector
        self._weights.absorb()
        moved = vector - self._begun
        np.copyto(vector, self._begun)

        def move() -> None:
            np.add(vector, moved, out=vector)

        self._team.step(self._taken_weight(), lambda: None, move)

    def _taken_weight(self) -> float:
        weight, self._weight = self._weight, 0.0
        return weight or 1.0

    def _change_gradient(self) -> None:
        for wrapper, place in zip(self._wrappers, self._weights.places, strict=True):
            if wrapper.algorithm.optimizer_runs == "nowhere":  # the learning rate goes into the gradient
                self._weights.gradient.vector[place] *= np.float32(wrapper.current_rate)
