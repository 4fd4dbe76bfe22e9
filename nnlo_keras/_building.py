"""Models that have no variables before they have seen what their data is like."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_keras import _compat

__all__ = ["build", "build_metrics"]


def build(model: Any) -> None:
    """Build what of a model is not built, as Keras does on torch and JAX when `fit` begins.

    On TensorFlow `fit` leaves it to the first batch, but what is exchanged must be known before. Call it from
    what `fit` calls.
    """
    if keras.backend.backend() != "tensorflow" or _built(model):
        return
    try:
        model(_like_its_inputs())
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} has layers that are not built, and to call it on what is like its data "
            f"failed ({type(error).__name__}: {error}); build it, or call it on a batch, before fit()"
        ) from error


def build_metrics(model: Any) -> None:
    """Build what a model is measured by, as Keras does on torch and JAX when `fit` begins."""
    if keras.backend.backend() == "tensorflow":
        _compat.build_metrics(model, _spec())


def _built(model: Any) -> bool:
    if type(model).call is keras.Model.call:
        return True  # it cannot be called, and only holds models that its training step calls
    own_build = type(model).build is not keras.Model.build
    return all(layer.built for layer in _compat.layers_of(model, itself=own_build))


def _like_its_inputs() -> Any:
    """Tensors without values, like those of the data: a batch that was taken might not come again."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(_spec())
    return keras.tree.map_structure(lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x)


def _spec() -> Any:
    """What a batch of the data looks like."""
    return _compat.spec_of(_compat.data_of_fit())
