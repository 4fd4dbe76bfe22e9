"""Callbacks that scripts for Horovod know: first weights, means of metrics, a rate that begins low."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import EpochMeanQuery, Session, whole_number
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback, numbers
from nnlo_keras._compat import schedule_of, synchronise
from nnlo_keras._model_optimizers import wrappers_in
from nnlo_keras._wrapper import wrapper_of

__all__ = ["Broadcast", "MetricAverage", "WarmUp"]

# -- the same start on all ranks ------------------------------------------------------------------------


class Broadcast(RankCallback):
    """Copies the first server's model and optimizer to all ranks when the training begins.

    Trainable weights come from the centre anyway. This adds the other floats: moving statistics, frozen
    weights, and the wrapped optimizer's momenta and other slots, learning rate and iterations. So a model
    loaded or trained before on the first rank only starts equal everywhere. Other integers, the states of
    seed generators and a loss scale are not copied. Add it on all ranks. In a process alone it does nothing.

    Example:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((4, 1))
        >>> fitted = model.fit(x, x, callbacks=[Broadcast()], verbose=0)
    """

    meets = meets_at_start = True

    def after_start(self, distribute: Driver | None) -> None:
        """Receive the first server's state, or send it."""
        super().after_start(distribute)
        if self.team is not None:
            _share(self.model, self.team)


def _share(model: Any, team: Session) -> None:
    """Copy the first server's state except the trainable weights to all ranks (collective).

    Raises:
        ConfigurationError: the models or optimizers do not have the same variables.
    """
    optimizers = [wrapper.inner_optimizer for wrapper in wrappers_in(model).values()]
    variables = _floats(model, optimizers)
    arrays = [np.asarray(keras.ops.convert_to_numpy(variable), np.float32) for variable in variables]
    shapes = json.dumps([array.shape for array in arrays]).encode()
    mine: dict[str, Any] = {
        "variables": len(arrays),
        "shapes": hashlib.blake2b(shapes, digest_size=8).hexdigest(),
    }
    mine["iterations"] = [int(keras.ops.convert_to_numpy(one.iterations)) for one in optimizers]
    first = team.copied(mine)
    # All ranks compare before any continues: a rank that differs aborts the training for all.
    if (first["variables"], first["shapes"]) != (mine["variables"], mine["shapes"]):
        raise ConfigurationError(
            f"rank {team.rank} has {mine['variables']} variables to receive in its model and optimizer, but "
            f"the first server sends {first['variables']}, or the shapes differ; make the same model and "
            "optimizer on all ranks"
        )
    vector = np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(0, np.float32)
    team.copied({}, vector)
    if team.serves and team.role == "server 0":
        return
    start = 0
    for variable, array in zip(variables, arrays, strict=True):
        piece = vector[start : start + array.size]
        variable.assign(np.array(piece.reshape(array.shape)))  # a copy: JAX would keep the vector's memory
        start += array.size
    for optimizer, iterations in zip(optimizers, first["iterations"], strict=True):
        optimizer.iterations.assign(iterations)


def _floats(model: Any, optimizers: list[Any]) -> list[Any]:
    """Return all float variables that do not come from the centre anyway."""
    of_optimizers = [variable for optimizer in optimizers for variable in optimizer.variables]
    return [one for one in [*model.non_trainable_weights, *of_optimizers] if "float" in one.dtype]


# -- the same metrics on all ranks ----------------------------------------------------------------------


class MetricAverage(RankCallback):
    """Replaces the metrics of all ranks by the mean over the workers at the end of each epoch.

    Callbacks after it in the list, and the history, see the means, weighted by the samples that each worker
    has trained on (by batches if a custom training step does not update Keras's loss). Validation metrics of
    the centre's rank stay unchanged. With it, workers wait for each other at the end of each epoch, but not
    for the validation. Add it on all ranks. In a process alone it does nothing.

    Example:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((8, 1))
        >>> history = model.fit(x, x, callbacks=[MetricAverage()], verbose=0).history
        >>> list(history)
        ['loss']
    """

    meets = True

    def before_start(self, role: str) -> None:
        """Count from the first epoch of this training."""
        super().before_start(role)
        self._epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Replace this rank's metrics by the means."""
        if self.team is None or self.distribute is None or not self.team.member.servers:
            return  # without servers, the metrics are the same on all ranks already
        self.end_exchanges(epoch, logs)
        values = numbers(logs) if self.trains else {}
        weight = (self.samples_in_epoch or self.distribute.batches_in_epoch) if self.trains else 0
        query = EpochMeanQuery(epoch=self._epochs, values=values, weight=weight)
        self._epochs += 1
        if logs is not None:
            logs.update(self.team.ask(query).means)

    def before_end(self) -> None:
        """Withdraw from further means, so that workers with more epochs do not wait for this rank."""
        if self.team is not None and self.team.member.servers:
            self.team.ask(EpochMeanQuery(epoch=None, values={}, weight=0))


# -- a learning rate that begins low --------------------------------------------------------------------


class _Warming(NamedTuple):
    """A warm-up: the rate at its end, and the one that it has set last."""

    end: float
    set: float


#: The last warm-up of each innermost optimizer: a later `fit` finds it with a rate on its way up.
_WARMING: WeakKeyDictionary[Any, _Warming] = WeakKeyDictionary()


class WarmUp(RankCallback):
    """Raises the learning rate, batch by batch, to the rate that the optimizer was compiled with.

    Batch i of a worker, counted from 0, has the rate r (start + (1 - start) min(1, i/n)); n is the number of
    batches in `epochs` epochs of this worker, or `steps`. It acts where the optimizer runs: the centre is
    stepped with the rate that the sending worker has reached. While warming up it overrides other callbacks
    that set the rate; then they take over. r does not depend on the number of workers: compile with a rate
    that suits yours. (Goyal et al. 2017, arXiv:1706.02677, section 2.2) Where progress ends epochs (see
    `Steady`), it follows progress: `epochs` are worth those of one process, and `steps` its batches.

    A resumed training (`Checkpoint`, `fit(initial_epoch=...)`) continues warming up where it was, to the
    same rate unless another was set meanwhile.

    Args:
        epochs: length of the warm-up; may be part of an epoch.
        steps: length of the warm-up in batches, in place of epochs.
        start: fraction of the rate to begin with.

    Example:
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(1.0), "mse")
        >>> rates = []
        >>> see = keras.callbacks.LambdaCallback(
        ...     on_train_batch_begin=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
        ... )
        >>> x = np.zeros((5, 1))
        >>> fitted = model.fit(x, x, batch_size=1, callbacks=[WarmUp(steps=4, start=0.5), see], verbose=0)
        >>> rates
        [0.5, 0.625, 0.75, 0.875, 1.0]
    """

    def __init__(self, epochs: float = 1.0, *, steps: int | None = None, start: float = 0.1) -> None:
        super().__init__()
        if not 0 < epochs < math.inf:
            raise ConfigurationError(f"WarmUp(epochs={epochs!r}) is not possible: it must be above 0")
        if not 0 <= start <= 1:
            raise ConfigurationError(f"WarmUp(start={start!r}) is not possible: it must be from 0 to 1")
        self.epochs, self.start = epochs, start
        self.steps = None if steps is None else whole_number("steps", steps, 1)

    def set_model(self, model: Any) -> None:
        """Record the compiled rate, before anything loads or sets another."""
        super().set_model(model)
        optimizer = _innermost(model.optimizer)
        rate = _rate_of(optimizer)
        before = _WARMING.get(optimizer, _Warming(float(rate), float(rate)))
        # An optimizer may keep it with fewer digits.
        self._on_its_way = before.end != before.set and rate.dtype.type(before.set) == rate
        self._rate = before.end if self._on_its_way else float(rate)

    def before_start(self, role: str) -> None:
        """Compute the number of batches of the warm-up."""
        super().before_start(role)
        steps = self.params.get("steps")
        if self.steps is None and steps is None:
            raise ConfigurationError(
                f"WarmUp(epochs={self.epochs!r}) does not know how many batches an epoch of this data has; "
                "pass steps_per_epoch to fit(), or use WarmUp(steps=...)"
            )
        self._total: float = self.epochs * steps if self.steps is None else self.steps
        self._before: float = 0
        self._in_epoch: float = 0
        self._warm: bool | None = None  # set as the first epoch begins

    def after_start(self, distribute: Driver | None) -> None:
        """Count batches of one process where progress ends epochs."""
        super().after_start(distribute)
        if self.steps is not None and self._made is not None and self.team is not None:
            self._total = self.steps / self.team.share[1]

    def begin_to_serve(self) -> None:
        """Leave the rate to the workers that are left."""
        self._warm = self._let_go = True

    @property
    def _made(self) -> float | None:
        """The batches of an epoch of this worker that its progress is worth; None: they are counted."""
        steps = self.params.get("steps")
        made = None if self.distribute is None or not steps else self.distribute.epoch_made
        return None if made is None else made * steps

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batches of the previous epochs."""
        steps = self.params.get("steps")
        self._before = self._before + self._in_epoch if steps is None else epoch * steps
        self._in_epoch = 0
        if self._warm is None:  # if already warm on resuming, keep the rate that other callbacks have set
            over = self._before > self._total and not self._on_its_way
            self._warm = not self.trains or over
            self._let_go = self._warm

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Set the rate of this batch."""
        if not self._warm:
            made = self._made
            self._set((self._before + (batch if made is None else made)) / self._total)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batch."""
        made = self._made
        self._in_epoch = batch + 1 if made is None else made

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Let other callbacks take over after the warm-up."""
        if self._let_go:
            return
        self.end_exchanges(epoch, logs)
        if not self._warm:
            done = self._before + self._in_epoch
            if done >= self._total:
                self._set(done / self._total)
            return
        # The server has the rate by now. A worker that kept sending it would override the server's.
        self._let_go = True
        wrapper = wrapper_of(self.model.optimizer)
        if wrapper is not None and wrapper.rate_set == self._rate:
            wrapper.rate_set = None

    def _set(self, done: float) -> None:
        self._warm = done >= 1
        synchronise(self.model)
        part = 1.0 if self._warm else self.start + (1 - self.start) * done
        self.model.optimizer.learning_rate = part * self._rate
        _WARMING[_innermost(self.model.optimizer)] = _Warming(self._rate, part * self._rate)


def _innermost(optimizer: Any) -> Any:
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def _rate_of(optimizer: Any) -> Any:
    """Return an optimizer's rate as it is kept, or refuse a schedule."""
    if (schedule := schedule_of(optimizer)) is not None:
        raise ConfigurationError(
            f"WarmUp() found the schedule {type(schedule).__name__} as the learning rate of "
            f"{type(optimizer).__name__}; a schedule warms up by itself, e.g. "
            "keras.optimizers.schedules.CosineDecay(..., warmup_target=..., warmup_steps=...)"
        )
    return np.asarray(keras.ops.convert_to_numpy(optimizer.learning_rate))
