"""Flat float32 vector of Keras variables, with a fast copy there and back for each back end.

`get_weights` and `set_weights` take up to 70 times as long as copying the vector. The fast way, and what
works without a copy, differ between back ends: see `benchmarks/keras_flat_variables.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import keras

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common.plugin import Vector
from nnlo_keras._variable_layout import layout_of

__all__ = ["FlatVariables", "flat_variables", "memory_of"]


class FlatVariables(Protocol):
    """Copies the values of variables into a flat vector and back.

    It touches only the segments of the vector, never the gaps between them.

    Attributes:
        aliased: whether the vector *is* the memory of some variables: always with torch, with tensorflow from
            `attach` to `detach`. If not, they are separate: after `read` and after `write` either may be
            overwritten without changing the other.
    """

    @property
    def aliased(self) -> bool:
        """Whether some variables are views of the vector."""

    def read(self) -> None:
        """Copy the variables into the vector."""

    def write(self) -> None:
        """Copy the vector into the variables."""

    def attach(self) -> None:
        """Make variables views of the vector from now on, where possible.

        Until `detach` no other code may keep values that it reads from the variables, or write to them.
        """

    def detach(self) -> None:
        """End `attach`: separate the vector and the variables again, where possible."""


def flat_variables(
    variables: Sequence[keras.Variable], flat: FlatVector, model: keras.Model | None = None
) -> FlatVariables:
    """Tie variables to a flat vector, on the back end in use, and read them once.

    The tie is to the memory that `flat.vector` has now, even if the vector moves later.

    Args:
        variables: in the order of the vector.
        flat: the vector, laid out by `layout_of(variables)`.
        model: the owner of the variables. JAX needs it to read and write while `fit` runs; a callback has it
            as `self.model`.

    Raises:
        ConfigurationError: the vector is laid out for other variables, or the back end is not supported.

    Example:
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> flat = FlatVector(layout_of(model.trainable_variables))
        >>> way = flat_variables(model.trainable_variables, flat, model)
        >>> flat.vector[:] = 0.5
        >>> way.write()
        >>> model.get_weights()[0].tolist()
        [[0.5], [0.5]]
    """
    variables = list(variables)
    if difference := layout_of(variables).difference(flat.layout):
        raise ConfigurationError(
            f"the vector is not laid out for these variables: {difference}; make it with "
            "FlatVector(layout_of(variables))"
        )
    made = _made(variables, flat, model)
    made.read()
    return made


def memory_of(variable: keras.Variable, model: keras.Model | None = None) -> Callable[[], Vector]:
    """Return a function that returns a float32 variable's own memory; drop the array before the next step.

    On tensorflow the array may be kept: a step that changes the variable gives it new memory.

    Args:
        variable: a tensorflow or jax variable.
        model: the owner of the variable; see `flat_variables`.
    """
    if keras.backend.backend() == "tensorflow":
        from nnlo_keras._flat_variables import _tensorflow

        return _tensorflow.memory_of(variable)
    from nnlo_keras._flat_variables import _jax

    return _jax.memory_of(variable, model)


def _made(variables: list[keras.Variable], flat: FlatVector, model: keras.Model | None) -> FlatVariables:
    # Each of these modules imports its framework, so import only the one in use.
    match keras.backend.backend():
        case "tensorflow":
            from nnlo_keras._flat_variables._tensorflow import TensorFlowVariables

            return TensorFlowVariables(variables, flat)
        case "torch":
            from nnlo_keras._flat_variables._torch import TorchVariables

            return TorchVariables(variables, flat)
        case "jax":
            from nnlo_keras._flat_variables._jax import JaxVariables

            return JaxVariables(variables, flat, model)
        case other:
            raise ConfigurationError(
                f"Keras runs on the back end {other!r}; set KERAS_BACKEND to tensorflow, torch or jax"
            )
