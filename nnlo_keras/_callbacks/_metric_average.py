"""MetricAverage: the same metrics on all ranks."""

from __future__ import annotations

from typing import Any

from nnlo_common.plugin import EpochMeanQuery
from nnlo_keras._callbacks._rank_callback import RankCallback, numbers

__all__ = ["MetricAverage"]


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
        weight = self.samples_in_epoch or self.distribute.batches_in_epoch
        query = EpochMeanQuery(epoch=self._epochs, values=values, weight=weight)
        self._epochs += 1
        if logs is not None:
            logs.update(self.team.ask(query).means)

    def before_end(self) -> None:
        """Withdraw from further means, so that workers with more epochs do not wait for this rank."""
        if self.team is not None and self.team.member.servers:
            self.team.ask(EpochMeanQuery(epoch=None, values={}, weight=0))
