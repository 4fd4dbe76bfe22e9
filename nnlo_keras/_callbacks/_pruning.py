"""Pruning: ends a trial of a search early if it does worse than others."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import launched
from nnlo_keras._callbacks._rank_callback import numbers

__all__ = ["Pruning"]


class Pruning(keras.callbacks.Callback):
    """Reports a metric to a trial of `nnlo_keras.optimize` after each epoch, and prunes the trial.

    The rank whose model is the centre reports and decides; when it prunes, the other ranks of its block are
    freed. An Optuna trial works as well.

    Args:
        trial: the objective's trial.
        monitor: the metric's name in the history.

    Example:
        >>> import keras, numpy, optuna
        >>> import nnlo_keras as nk
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> x = numpy.ones((4, 1))
        >>> def objective(trial):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     model.compile(optimizer="sgd", loss="mse")
        ...     history = model.fit(x, x, callbacks=[nk.Pruning(trial, "loss")], verbose=0)
        ...     return history.history["loss"][-1]
        >>> study = nk.optimize(optuna.create_study(), objective, n_trials=1)
        >>> list(study.trials[0].intermediate_values)
        [0]
    """

    def __init__(self, trial: Any, monitor: str = "val_loss") -> None:
        super().__init__()
        self._trial, self._monitor = trial, monitor

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Report, and raise Optuna's `TrialPruned` if the trial is to be pruned."""
        world = launched()
        if world is not None and world.rank:
            return  # only rank 0 validates; when it prunes, this rank is freed
        from optuna import TrialPruned

        found = numbers(logs)
        if self._monitor not in found:
            there = ", ".join(sorted(found)) or "no metric"
            raise ConfigurationError(
                f"Pruning(monitor={self._monitor!r}): this epoch has {there}; choose one of these, or pass "
                "validation_data to fit()"
            )
        self._trial.report(found[self._monitor], epoch)
        if self._trial.should_prune():
            raise TrialPruned(f"epoch {epoch}: {self._monitor} is {found[self._monitor]}")
