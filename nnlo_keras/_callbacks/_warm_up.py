"""WarmUp: a learning rate that begins low."""

from __future__ import annotations

import math
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import whole_number
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback
from nnlo_keras._compat import schedule_of, synchronise
from nnlo_keras._wrapper import wrapper_of

__all__ = ["WarmUp"]


class WarmUp(RankCallback):
    """Raises the learning rate, batch by batch, to the rate that the optimizer was compiled with.

    Batch i of a worker, counted from 0, has the rate r (start + (1 - start) min(1, i/n)); n is the number of
    batches in `epochs` epochs of this worker, or `steps`. It acts where the optimizer runs: the centre is
    stepped with the rate that the sending worker has reached. While warming up it overrides other callbacks
    that set the rate; then they take over. r does not depend on the number of workers: compile with a rate
    that suits yours. (Goyal et al. 2017, arXiv:1706.02677, section 2.2) Where progress ends epochs (see
    `Steady`), it follows progress: `epochs` are worth those of one process, and `steps` its batches.

    A resumed training (`Checkpoint`, `fit(initial_epoch=...)`) continues warming up where it was.

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
        self._rate = _rate_of(model.optimizer)

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
            self._warm = not self.trains or self._before > self._total
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


def _rate_of(optimizer: Any) -> float:
    """Return the rate of the innermost optimizer, or refuse a schedule."""
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if (schedule := schedule_of(optimizer)) is not None:
        raise ConfigurationError(
            f"WarmUp() found the schedule {type(schedule).__name__} as the learning rate of "
            f"{type(optimizer).__name__}; a schedule warms up by itself, e.g. "
            "keras.optimizers.schedules.CosineDecay(..., warmup_target=..., warmup_steps=...)"
        )
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
