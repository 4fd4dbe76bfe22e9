"""The same start on all ranks."""

from __future__ import annotations

from nnlo_keras._callbacks._driver import Driver
from nnlo_keras._callbacks._equal_variables import share
from nnlo_keras._callbacks._rank_callback import RankCallback

__all__ = ["Broadcast"]


class Broadcast(RankCallback):
    """At the beginning gives all ranks what the first server's model and optimizer are.

    Trainable weights come from the centre in any case. This adds the other floats: moving statistics, frozen
    weights, and of the wrapped optimizer its momenta and other slots, its learning rate and its iterations.
    So a model that was loaded, or trained before, on the first rank only starts equal everywhere. Other
    integers, the states of seed generators and a loss scale stay each rank's own. Give it on all ranks. Alone
    it does nothing.

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
        """Take what the first server has, or give it."""
        super().after_start(distribute)
        if self.team is not None:
            share(self.model, self.team)
