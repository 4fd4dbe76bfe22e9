"""Broadcast: the same start on all ranks."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Session
from nnlo_keras._callbacks._rank_callback import Driver, RankCallback
from nnlo_keras._model_optimizers import wrappers_in

__all__ = ["Broadcast"]


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
