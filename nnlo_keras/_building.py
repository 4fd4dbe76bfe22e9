"""Models that have no variables before they have seen what their data is like."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common import ConfigurationError

__all__ = ["build"]


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


def _built(model: Any) -> bool:
    if type(model).call is keras.Model.call:
        return True  # it cannot be called, and only holds models that its training step calls
    own_build = type(model).build is not keras.Model.build
    return all(layer.built for layer in model._flatten_layers(include_self=own_build))


def _like_its_inputs(frame: Any) -> Any:
    """Tensors without values, like those of the data: a batch that was taken might not come again."""
    while "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    data = frame.f_locals["epoch_iterator"]._distributed_dataset.element_spec
    x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
    return keras.tree.map_structure(lambda spec: keras.KerasTensor(tuple(spec.shape), spec.dtype.name), x)
