"""Broadcast: the same start on all ranks."""

from __future__ import annotations

from nnlo_keras._callbacks._driver import Driver
from nnlo_keras._callbacks._equal_variables import share
from nnlo_keras._callbacks._rank_callback import RankCallback

__all__ = ["Broadcast"]


class Broadcast(RankCallback):
    """Copies the first server's model and optimizer to all ranks when the training begins.

    Trainable weights come from the centre anyway. This adds the other floats: moving statistics, frozen
    weights, and the wrapped optimizer's momenta and other slots, learning rate and iterations. So a model
    loaded or trained before on the first rank only starts equal everywhere. Other integers, the states of
    seed generators and a loss scale are not copied. Add it on all ranks. In a process alone it does nothing.

    Example:
        >>> import keras
        >>> import numpy as np
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
            share(self.model, self.team)
