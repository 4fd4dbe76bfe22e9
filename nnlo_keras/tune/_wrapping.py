"""Wrap the optimizer of a model that was compiled with a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import ALGORITHMS
from nnlo_keras import _wrappers
from nnlo_keras._model_optimizers import any_wrapper_in
from nnlo_keras._wrapper import Wrapper

__all__ = ["Wrap", "wrap_in", "wrapping"]

Wrap: TypeAlias = Callable[[Any], Wrapper]

_BY_NAME: dict[str, Wrap] = {name: _wrappers.wrapper(one) for name, one in ALGORITHMS.items()}


def wrapping(asked: str | Wrap | None) -> Wrap | None:
    """Return the function that wraps an optimizer, given as itself or by the algorithm's name.

    Example:
        >>> wrapping("easgd").__name__
        'EASGD'
    """
    if asked is None or (callable(asked) and not isinstance(asked, str)):
        return asked
    if asked not in _BY_NAME:
        raise ConfigurationError(
            f"distribute={asked!r} is not known: use {', '.join(map(repr, sorted(_BY_NAME)))}, or a function "
            "that wraps an optimizer, e.g. lambda optimizer: nnlo_keras.EASGD(optimizer, every=5)"
        )
    return _BY_NAME[asked]


def wrap_in(model: Any, wrap: Wrap) -> None:
    """Wrap the optimizer that a model was compiled with."""
    if (found := any_wrapper_in(model)) is not None:
        raise ConfigurationError(
            f"distribute= was given, but the model's optimizer is already a {type(found).__name__}; "
            "leave one of the two out"
        )
    optimizer = model.optimizer
    if optimizer is None:
        raise ConfigurationError(
            "distribute= was given, but the model is not compiled; compile it in build()"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # Keras's own, under mixed_float16
        config = optimizer.get_config() | {"inner_optimizer": wrap(optimizer.inner_optimizer)}
        model.optimizer = keras.optimizers.LossScaleOptimizer(**config)
    else:
        model.optimizer = wrap(optimizer)
