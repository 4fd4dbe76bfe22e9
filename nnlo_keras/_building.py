"""Models that have no variables before they have seen what their data is like."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_keras._fitting import batches_of

__all__ = ["build", "build_metrics"]


def build(model: Any, frame: Any) -> None:
    """Build what of a model is not built, as Keras does on torch and JAX when `fit` begins.

    On TensorFlow `fit` leaves it to the first batch, but what is exchanged must be known before.

    Args:
        model: the model.
        frame: that of something which `fit` has called, directly or not.
    """
    if keras.backend.backend() != "tensorflow" or _built(model):
        return
    try:
        model(_like_its_inputs(frame))
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} has layers that are not built, and to call it on what is like its data "
            f"failed ({type(error).__name__}: {error}); build it, or call it on a batch, before fit()"
        ) from error


def build_metrics(model: Any, frame: Any) -> None:
    """Build what a model is measured by, as Keras does on torch and JAX when `fit` begins.

    Args:
        model: the model.
        frame: that of something which `fit` has called, directly or not.
    """
    if keras.backend.backend() == "tensorflow":
        model._symbolic_build(data_batch=_spec(frame))


def _built(model: Any) -> bool:
    if type(model).call is keras.Model.call:
        return True  # it cannot be called, and only holds models that its training step calls
    own_build = type(model).build is not keras.Model.build
    return all(layer.built for layer in model._flatten_layers(include_self=own_build))


def _like_its_inputs(frame: Any) -> Any:
    """Tensors without values, like those of the data: a batch that was taken might not come again."""
    x, _, _ = keras.utils.unpack_x_y_sample_weight(_spec(frame))
    return keras.tree.map_structure(lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x)


def _spec(frame: Any) -> Any:
    """What a batch of the data looks like."""
    return batches_of(frame)._distributed_dataset.element_spec
