"""A worker's exchanges with the centre, between the batches of its `fit`: when, and of what.

What the training step itself must not do is here: input and output would not go into a compiled one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common._flat import Vector
from nnlo_common._team import Team
from nnlo_keras._callbacks._companion import numbers
from nnlo_keras._model import Weights
from nnlo_keras._rates import Rates
from nnlo_keras._wrapper import Mode, Wrapper

__all__ = ["Exchanging"]


class Exchanging:
    """Counts a worker's batches, and exchanges when it is time to.

    Args:
        team: this rank's place among several.
        weights: the model's.
        wrappers: of its optimizers; of one kind, with the same options.
        rates: what the server tells of learning rates.
        undisturbed: whether nobody else sees the weights between batches.

    Attributes:
        in_epoch: how many batches this epoch has had.
    """

    def __init__(
        self, team: Team, weights: Weights, wrappers: Sequence[Wrapper], rates: Rates, *, undisturbed: bool
    ) -> None:
        self._team, self._weights, self._wrappers, self._rates = team, weights, wrappers, rates
        self._sums = wrappers[0].mode is Mode.ACCUMULATE
        self._attaches = undisturbed and self._sums
        self.in_epoch = self._summed = 0  # batches; and of them since the last push
        self._batch = -1  # the last one of this epoch
        self._open = False  # whether the epoch has not ended
        self._before: Vector | None = None  # the weights as an epoch's first batch begins

    def state(self) -> dict[str, Any]:
        """Return where this worker is in its epoch."""
        gradient = None
        if self._summed:
            self._weights.collect()
            gradient = self._weights.gradient.vector.copy()
        return {"in_epoch": self.in_epoch, "summed": self._summed, "gradient": gradient}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned, once the epoch has begun."""
        self.in_epoch, self._summed = state["in_epoch"], state["summed"]
        if state["gradient"] is not None:
            self._weights.resume(state["gradient"])

    def begin_epoch(self) -> None:
        """Begin an epoch, with all workers."""
        self._batch, self._summed, self.in_epoch, self._open = -1, 0, 0, True
        self._team.begin_epoch()
        if self._attaches:
            self._weights.attach()

    def note_weights(self) -> None:
        """Note the weights that an epoch begins with, where the training step is not to change them."""
        if self._sums:
            self._before = self._weights.parameters.vector.copy()

    def end_batch(self, batch: int, *, idle: bool) -> None:
        """Exchange, if it is time to.

        Args:
            batch: the number of the last one; with `steps_per_execution` not each is told of.
            idle: whether there was no data for it.
        """
        if self._before is not None:
            self._refuse_changes(self._before)
        done, self._batch = batch - self._batch, batch
        if idle:
            return
        self.in_epoch += done
        if self._team.stopped:
            return
        self._team.take(done)
        if self._sums:
            self._add(done)
        else:
            self._step(done)
        self._rates.hear()

    def end_epoch(self, epoch: int, logs: Any) -> None:
        """Send what is left, and what the metrics are; once, whoever calls it first."""
        if not self._open:
            return
        self._open = False
        if self._summed:
            self._push()
        self._weights.detach()
        values = numbers(logs) if self.in_epoch else {}  # nothing was left for this worker
        self._team.ask({"ask": "note", "epoch": epoch, "values": values, "weight": self.in_epoch or 1})
        self._team.end_epoch()

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

    def _step(self, done: int) -> None:
        """Exchange weights that the training step has stepped."""
        team, due = self._team, False
        for _ in range(done - 1):
            due |= team.due
            team.pass_step()
        if due or team.due:
            self._weights.absorb()
            team.step(1.0, lambda: None)
        else:
            team.pass_step()

    def _add(self, done: int) -> None:
        """Push gradients that the training step has added up."""
        first = self._wrappers[0]
        self._summed += done
        if self._summed >= first.every:
            self._push()
        if first.algorithm.optimizer_runs == "nowhere":
            for one in self._wrappers:
                # Nothing steps the optimizer; its schedule goes by this worker's batches.
                one.inner_optimizer.iterations.assign_add(done)

    def _push(self) -> None:
        self._summed = 0
        self._team.step(1.0, self._scale_gradient)
        self._weights.clear()

    def _scale_gradient(self) -> None:
        if self._wrappers[0].follows:
            self._team.set_local_rate(self._wrappers[0].current_rate)
        for wrapper, place in zip(self._wrappers, self._weights.places, strict=True):
            if wrapper.algorithm.optimizer_runs == "nowhere":  # the learning rate goes into the gradient
                self._weights.gradient.vector[place] *= np.float32(wrapper.current_rate)
