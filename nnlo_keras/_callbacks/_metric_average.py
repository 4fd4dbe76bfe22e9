"""The same metrics on all ranks."""

from __future__ import annotations

from typing import Any

from nnlo_common.plugin import EpochMeanQuery
from nnlo_keras._callbacks._rank_callback import RankCallback, numbers

__all__ = ["MetricAverage"]


class MetricAverage(RankCallback):
    """At the end of each epoch makes the metrics of all ranks the mean over the workers.

    Callbacks behind it in the list, and the history, see the means, weighted by the samples that each worker
    has trained on (by batches, where a training step of your own does not update Keras's loss); what the
    centre's rank has validated stays as it is. Workers wait for each other at the end of each epoch, which
    they do not without it; they do not wait for the validation. Give it on all ranks. Alone it does nothing.

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
        """Put the means in place of this rank's metrics."""
        if self.team is None or self.distribute is None:
            return
        self.end_exchanges(epoch, logs)
        values = numbers(logs) if self.trains else {}
        weight = self.samples_in_epoch or self.distribute.batches_in_epoch
        query = EpochMeanQuery(epoch=self._epochs, values=values, weight=weight)
        self._epochs += 1
        if logs is not None:
            logs.update(self.team.ask(query).means)

    def before_end(self) -> None:
        """Keep nobody waiting who goes on for longer."""
        if self.team is not None:
            self.team.ask(EpochMeanQuery(epoch=None, values={}, weight=0))
