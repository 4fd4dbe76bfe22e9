"""Building of models and metrics that have no variables before they know their data."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_keras import _compat

__all__ = ["build", "build_metrics"]


def build(model: Any) -> None:
    """Build the model's unbuilt layers, as Keras does on torch and JAX when `fit` begins.

    On TensorFlow `fit` builds them with the first batch, but the exchange needs all variables before. Call it
    from a callback.
    """
    if keras.backend.backend() != "tensorflow" or _built(model):
        return
    try:
        model(_symbolic_inputs())
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} has layers that are not built, and building them from the shapes of the "
            f"data failed ({type(error).__name__}: {error}); build it, or call it on a batch, before fit()"
        ) from error


def build_metrics(model: Any) -> None:
    """Build the model's metrics, as Keras does on torch and JAX when `fit` begins."""
    if keras.backend.backend() == "tensorflow":
        _compat.build_metrics(model, _spec())


def _built(model: Any) -> bool:
    if type(model).call is keras.Model.call:
        return True  # it has no call(): it only holds models that its training step calls
    own_build = type(model).build is not keras.Model.build
    return all(layer.built for layer in _compat.layers_of(model, itself=own_build))


def _symbolic_inputs() -> Any:
    """Return symbolic tensors with the data's shapes; a real batch taken here might be lost to training."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(_spec())
    return keras.tree.map_structure(lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x)


def _spec() -> Any:
    """Return the shapes and types of a batch."""
    return _compat.spec_of(_compat.data_of_fit())
