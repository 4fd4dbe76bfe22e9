"""Layout of a Keras model's variables in a flat vector, and the choice of those that are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import keras

from nnlo_common import ConfigurationError, Layout, Segment
from nnlo_common.plugin import padded
from nnlo_keras._compat import has_no_value_yet, layers_of, made_to_be_trained, value_of

__all__ = ["averaged", "layout_of", "memory_of"]

# float32 holds every value of these.
_EXACT = ("float32", "float16", "bfloat16")


def layout_of(variables: Sequence[keras.Variable]) -> Layout:
    """Lay Keras variables out in a flat vector, each on a cache line of its own.

    Back ends take a piece of memory over without a copy only where it starts on a cache line. At least one
    number is left behind each variable, for a mark. A variable that is given twice gets one place.

    Args:
        variables: in the order of the vector, e.g. `model.trainable_variables`.

    Returns:
        The segment table; 16-bit variables are float32 in the vector.

    Raises:
        ConfigurationError: a variable that float32 cannot hold, or one that has no value yet.

    Example:
        >>> layer = keras.layers.Dense(3, name="last")
        >>> layer.build((None, 8))
        >>> [(segment.name, segment.offset) for segment in layout_of(layer.weights).segments]
        [('last/kernel', 0), ('last/bias', 32)]
    """
    segments: list[Segment] = []
    first: dict[int, Segment] = {}
    taken: set[str] = set()
    offset = 0
    for variable in variables:
        _check(variable)
        shape = tuple(variable.shape)
        name, size, memory = _unused(variable.path, taken), prod(shape), memory_of(variable)
        owner = first.get(memory)
        place = offset if owner is None else owner.offset
        tied_to = None if owner is None else owner.name
        segments.append(Segment(name, shape, variable.dtype, place, size, tied_to))
        if owner is None:
            first[memory] = segments[-1]
            offset += padded(size)
    return Layout(tuple(segments), offset)


def averaged(model: keras.Model, trained: Sequence[keras.Variable] | None = None) -> list[keras.Variable]:
    """Return what a model learns without an optimizer: moving statistics and other floats of its layers.

    Left out are integers, the states of seed generators, metrics and optimizers, and frozen weights: what
    was made to be trained and is not changes on no rank. Weights that are neither frozen nor an optimizer's
    are changed by the training step itself, if at all, e.g. to the average of others.

    Args:
        model: a built model.
        trained: which variables the optimizers train; None: all that can be.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="norm")])
        >>> [variable.path for variable in averaged(model)]
        ['norm/moving_mean', 'norm/moving_variance']
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
            f"{name} is float64, which float32 would round; build its layer with dtype='float32', or call "
            "keras.config.set_floatx('float32') before you make the model"
        )
    if variable.dtype not in _EXACT:
        raise ConfigurationError(
            f"{name} is {variable.dtype}; only float32, float16 and bfloat16 variables are exchanged: "
            "leave it out"
        )


def memory_of(variable: keras.Variable) -> int:
    """What tells variables that are one from those that are two.

    TensorFlow and torch let two Keras variables wrap one of their own. JAX's arrays cannot be written to, so
    that it means nothing there if two variables have the same.
    """
    return id(variable if keras.backend.backend() == "jax" else value_of(variable))


def _unused(path: str, taken: set[str]) -> str:
    """Tell variables apart whose layers have the same name."""
    name, number = path, 1
    while name in taken:
        number += 1
        name = f"{path} ({number})"
    taken.add(name)
    return name
