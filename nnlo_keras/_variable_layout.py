"""Layout of a Keras model's variables in a flat vector, and the choice of those that are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from nnlo_common import ConfigurationError, Layout
from nnlo_common.plugin import laid_out
from nnlo_keras._compat import has_no_value_yet, layers_of, made_to_be_trained, value_of

__all__ = ["averaged", "layout_of", "memory_of"]

# Types whose values float32 represents exactly.
_EXACT = ("float32", "float16", "bfloat16")


def layout_of(variables: Sequence[keras.Variable]) -> Layout:
    """Lay Keras variables out in a flat vector, each on its own cache line.

    Back ends use foreign memory without a copy only if it starts on a cache line. At least one number after
    each variable stays free, for a mark. A variable given twice gets one place.

    Args:
        variables: in the order of the vector, e.g. `model.trainable_variables`.

    Returns:
        The segment table; 16-bit variables are float32 in the vector.

    Raises:
        ConfigurationError: a variable cannot be held in float32, or has no value yet.

    Example:
        >>> layer = keras.layers.Dense(3, name="last")
        >>> layer.build((None, 8))
        >>> [(segment.name, segment.offset) for segment in layout_of(layer.weights).segments]
        [('last/kernel', 0), ('last/bias', 32)]
    """
    taken: set[str] = set()
    for variable in variables:
        _check(variable)
    return laid_out(
        ((_unused(one.path, taken), one.shape, one.dtype, memory_of(one)) for one in variables), padded=True
    )


def averaged(model: keras.Model, trained: Sequence[keras.Variable] | None = None) -> list[keras.Variable]:
    """Return the variables that a model learns without an optimizer: moving statistics and other floats.

    Left out are integers, the states of seed generators, metrics and optimizers, and frozen weights (created
    trainable, but not trained: they change on no rank). Included are weights that are neither frozen nor an
    optimizer's: the training step itself may change them, e.g. to an average of others.

    Args:
        model: a built model.
        trained: the variables that the optimizers train; None: all trainable ones.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])
        >>> [variable.name for variable in averaged(model)]
        ['moving_mean', 'moving_variance']
    """
    to_be_trained = {id(variable) for layer in layers_of(model) for variable in made_to_be_trained(layer)}
    statistics = [
        variable
        for variable in model.non_trainable_weights
        if "float" in variable.dtype and id(variable) not in to_be_trained
    ]
    if trained is None:
        return statistics
    owned = {memory_of(variable) for variable in trained}
    return [*statistics, *(one for one in model.trainable_variables if memory_of(one) not in owned)]


def _check(variable: keras.Variable) -> None:
    name = f"the variable {variable.path!r}"
    if has_no_value_yet(variable):
        raise ConfigurationError(f"{name} has no value yet; build the model before you exchange it")
    if variable.dtype == "float64":
        raise ConfigurationError(
            f"{name} is float64, but is exchanged as float32, which would round it; build its layer with "
            "dtype='float32', or call keras.config.set_floatx('float32') before you make the model"
        )
    if variable.dtype not in _EXACT:
        raise ConfigurationError(
            f"{name} is {variable.dtype}, but only float32, float16 and bfloat16 variables can be exchanged; "
            "leave it out"
        )


def memory_of(variable: keras.Variable) -> int:
    """Return an identity that is equal for variables that share memory.

    On TensorFlow and torch two Keras variables can wrap one framework variable. JAX arrays are immutable, so
    there two variables with the same array are still separate.
    """
    return id(variable if keras.backend.backend() == "jax" else value_of(variable))


def _unused(path: str, taken: set[str]) -> str:
    """Make a path unique: layers may have the same name."""
    name, number = path, 1
    while name in taken:
        number += 1
        name = f"{path} ({number})"
    taken.add(name)
    return name
