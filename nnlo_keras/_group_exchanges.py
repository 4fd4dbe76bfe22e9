"""Exchanges of a rank in a group: each batch makes a step with the group's mean gradient.

The training step only keeps its gradients. The mean is made between batches, on the main thread, because a
compiled step cannot wait for other ranks; what steps the weights runs there as a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras.optimizers import LossScaleOptimizer

from nnlo_common import ConfigurationError
from nnlo_common.plugin import AS_YOURS, GroupRank, Session, Vector, speaks
from nnlo_keras._callback_lists import last_of
from nnlo_keras._callbacks._rank_callback import numbers
from nnlo_keras._exchanges import BatchSizes, Exchanges, Rates
from nnlo_keras._model_optimizers import optimizers_of
from nnlo_keras._weights import KerasCenterOptimizer, Statistics, Weights
from nnlo_keras._wrapper import Wrapper

__all__ = ["GroupExchanges", "local_step_of", "refuse_in_groups"]


def refuse_in_groups(model: Any, wrappers: Sequence[Wrapper]) -> None:
    """Refuse what groups cannot have, on all ranks, before the training starts.

    Args:
        model: the model.
        wrappers: its wrapped optimizers.

    Raises:
        ConfigurationError: there is such a thing.
    """
    name, found = type(wrappers[0]).__name__, ""
    steps = BatchSizes.of(model, steps_matter=False).per_execution
    scaled = [one for one in optimizers_of(model).values() if isinstance(one, LossScaleOptimizer)]
    if len(wrappers) > 1 and scaled:
        found = (
            f"this model has {len(wrappers)} wrapped optimizers with a LossScaleOptimizer around them, but "
            "the ranks of a group agree on one scale; use mixed_bfloat16, which needs none"
        )
    elif steps > 1:
        found = (
            f"compile() was given steps_per_execution={steps}, but the mean over the group is made after "
            "each batch; leave steps_per_execution out"
        )
    if found:
        error = ConfigurationError(
            f"{name} with groups of ranks (group_size above 1, or servers=0): {found}, or leave group_size "
            "and servers=0 out"
        )
        error.collective = True  # all ranks run the same script
        raise error


def local_step_of(wrappers: Sequence[Wrapper], weights: Weights) -> Callable[[], object] | None:
    """Return what moves a rank's weights with the group's mean gradient; None: only exchanges move them."""
    whole, first = slice(0, weights.layout.size), wrappers[0]  # all are of one kind
    if first.steps_workers:
        mine = KerasCenterOptimizer(wrappers, weights, whole)
        return lambda: mine.step(weights.parameters.vector, weights.gradient.vector)
    if first.local_optimizer is not None:
        local = KerasCenterOptimizer(wrappers, weights, whole, [one.local_optimizer for one in wrappers])
        return lambda: local.step(weights.parameters.vector, _unscaled(wrappers, weights))
    return (lambda: _descend(wrappers, weights)) if first.local_rate else None


def _unscaled(wrappers: Sequence[Wrapper], weights: Weights) -> Vector:
    """Return the gradient without loss scales, which the centre's optimizers take out of their own."""
    gradient = weights.gradient.vector
    if any(wrapper.loss_scale_factor for wrapper in wrappers):
        gradient = gradient.copy()
        for wrapper, place in zip(wrappers, weights.places, strict=True):
            gradient[place] /= np.float32(wrapper.loss_scale_factor or 1)
    return gradient


def _descend(wrappers: Sequence[Wrapper], weights: Weights) -> None:
    """Make a step of plain SGD."""
    gradient, parameters = _unscaled(wrappers, weights), weights.parameters.vector
    for wrapper, owned in zip(wrappers, weights.places, strict=True):
        rate = wrapper.current_rate if wrapper.local_rate == AS_YOURS else wrapper.local_rate
        for index in weights.layout.inside(owned):  # not the marks between them
            place = weights.layout.segments[index].place
            parameters[place] -= np.float32(rate) * gradient[place]
    weights.constrain()
    weights.publish()


class GroupExchanges(Exchanges):
    """Makes the group's mean gradient after each batch, and a step with it.

    Args:
        team: this rank's session.
        weights: the model's weights.
        wrappers: the wrapped optimizers; all of one kind, with the same options.
        rates: receives the learning rates that the server sends.
        sizes: the batch sizes.
        model: the model.
    """

    def __init__(
        self,
        team: Session,
        weights: Weights,
        wrappers: Sequence[Wrapper],
        rates: Rates,
        *,
        sizes: BatchSizes,
        model: Any,
    ) -> None:
        super().__init__(team, weights, wrappers, rates, sizes, undisturbed=False)
        assert team.member.group is not None  # callers check it
        self._group: GroupRank = team.member.group
        self._steps_workers, self._model = wrappers[0].steps_workers, model
        self._marks = weights.gradient.layout.marks()
        # The policy mixed_float16 puts it around the wrapper.
        scales = isinstance(model.optimizer, LossScaleOptimizer)
        self._scaler: Any = model.optimizer if scales else None
        self._runs_together = team.member.servers == 0
        # `_weight` is the number of samples of this epoch, which checkpoints keep.

    def take_over(self, container: Any, callback: Any) -> list[Callable[[], object]]:
        """Put `callback` behind all others, which may stop the training; return functions that undo it.

        Without a server, the ends of epochs come before all other callbacks, which see the same metrics on
        all ranks.
        """
        restore = last_of(container, callback)
        if self._runs_together:
            container.callbacks = [_SharedMetrics(self), *container.callbacks]
        return restore

    def begin_epoch(self) -> None:
        """Begin an epoch together with the group."""
        super().begin_epoch()
        self._weight = 0.0

    def begin_batch(self) -> None:
        """Record the weights before the first batch of an epoch."""
        if self.in_epoch == 0:
            if self._steps_workers:
                self._weights.absorb_changes()
            self._before = self._weights.parameters.vector.copy()

    def end_batch(self, batch: int, *, idle: bool) -> None:
        """Make a step together with the group.

        Args:
            batch: number of the last batch.
            idle: whether the batch had no data, on all ranks of the group.
        """
        if self._before is not None:
            self._refuse_changes(self._before)
        first, self._batch = self._batch + 1, batch
        self.in_epoch += not idle
        self.agree()
        if self._team.stopped or idle:
            return
        self._team.take(1)
        samples = self._sizes.samples(first, 1)
        if self._repeats:
            samples = 0.0
        self._weight += samples
        if self._scaler is not None and self._overflown():
            return
        if self._steps_workers:
            self._weights.absorb_changes()  # by other callbacks
            self._weights.collect()
            self._make_mean(samples)
        self._team.step(samples, lambda: self._make_mean(samples))
        self._constrain()
        self.weight_in_epoch += self._group.weight
        self._weights.clear()
        if self._counts_here:
            self._weights.synchronise()
            for one in self._wrappers:
                one.inner_optimizer.iterations.assign_add(1)
        self._rates.receive()

    def _overflown(self) -> bool:
        """Drop the batch on all ranks if a rank's gradient was not finite, which has skipped its step."""
        self._weights.collect()
        made = bool(self._weights.gradient.vector[self._marks].any())
        self._weights.synchronise()
        scale = float(keras.ops.convert_to_numpy(self._scaler.dynamic_scale))
        ranks = self._group.compare(made, scale)
        if ranks[:, 0].all():
            return False
        # As in a process alone after such a batch; a rank without it may even have raised its scale.
        self._scaler.dynamic_scale.assign(float(ranks[:, 1].min()))
        self._scaler.step_counter.assign(0)
        self._weights.clear()
        return True

    def agree(self) -> None:
        """Stop together if a callback on any rank of the group has stopped; take the lead's rates."""
        for wrapper in self._wrappers:
            rate = wrapper.rate_set or 0.0
            stop, leads = self._group.agree(stop=bool(self._model.stop_training), rate=rate)
            if stop:
                self._model.stop_training = True
            if leads and leads != rate:
                self._weights.synchronise()
                wrapper.learning_rate = leads

    def end_epoch(self, epoch: int, logs: Any, *, last: bool) -> None:
        """End the epoch together with the group; a second call does nothing."""
        if not self._runs_together:
            super().end_epoch(epoch, logs, last=last)
        elif self._open:
            self._open = False
            self._team.end_epoch()
            self._team.take_buffers()

    def close_epoch(self) -> None:
        """Agree on the end, and on the learning rate, after all other callbacks."""
        self.agree()

    def last_round(self) -> None:
        """Commit the training since the last round to the centre."""
        self._team.last_round()

    def share(self, logs: Any) -> None:
        """Without a server: replace the metrics by the means over all ranks; add the lead's validation."""
        if logs is None:
            return
        found, leads = numbers(logs), speaks(self._team.role)
        trained = {name: value for name, value in found.items() if not name.startswith("val_")}
        held = {name: value for name, value in found.items() if name not in trained} if leads else {}
        logs.update(self._team.mean(trained, self._weight))
        logs.update(self._team.mean(held, float(leads)))

    def copy_from_lead(self, statistics: Statistics | None) -> None:
        """Without a server: give all ranks the lead's model, as other callbacks have left it at the end."""
        self._weights.absorb()
        self._group.copy_from_lead(self._weights.parameters.vector)
        self._weights.publish()
        if statistics is not None:
            statistics.gather()
            self._group.copy_from_lead(statistics.flat.vector)
            statistics.scatter()

    @property
    def _counts_here(self) -> bool:
        """Whether nothing steps the optimizer, so that this worker's batches count for its schedule."""
        return not self._steps_workers and self._wrappers[0].algorithm.optimizer_runs == "nowhere"

    def _make_mean(self, samples: float) -> None:
        """Replace the gradient of this rank's batch by the mean over the group."""
        if self._weights.twice():
            raise ConfigurationError(
                "an optimizer was applied more than once in a batch, but a group of ranks makes one step "
                "for each batch; apply it once, or leave group_size and servers=0 out"
            )
        gradient = self._weights.gradient.vector
        self._group.mean(gradient, samples, self._team.report().samples + 1)
        if self._counts_here:
            self._change_gradient()

    def _refuse_changes(self, before: Vector) -> None:
        """Refuse a training step that changes weights itself: the group's step comes after it."""
        self._before = None
        if changed := self._weights.changed_since(before):
            raise ConfigurationError(
                f"the weight {changed!r} was changed within the training step or by a callback at the end of "
                "a batch, but a group of ranks makes its step after that; to clip weights give the layer a "
                "kernel_constraint, or leave group_size and servers=0 out"
            )


class _SharedMetrics(keras.callbacks.Callback):
    """Ends epochs together, before all other callbacks see the metrics."""

    def __init__(self, exchanges: GroupExchanges) -> None:
        super().__init__()
        self._exchanges = exchanges

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Validate with the averaged statistics."""
        self._exchanges.end_epoch(0, None, last=False)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Give all ranks the same metrics."""
        self._exchanges.end_epoch(epoch, logs, last=False)
        self._exchanges.share(logs)
