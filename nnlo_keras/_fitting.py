"""Access to the running `fit` from a callback: its list of callbacks, and its function for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

__all__ = ["batches_of", "container_of", "samples_counted", "serving", "synchronise"]


def container_of(frame: Any) -> Any:
    """Return the list of callbacks that has called what runs in `frame`; None if none has."""
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return container
        frame = frame.f_back
    return None


def batches_of(frame: Any) -> Any:
    """Return what the `fit` loops over that has called what runs in `frame`; None if none has."""
    while frame is not None and "epoch_iterator" not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["epoch_iterator"]


def synchronise(model: Any) -> None:
    """On JAX let the variables hold what `fit` has in their place during an epoch."""
    sync = getattr(model, "jax_state_sync", None)
    if sync is not None:
        sync()


def samples_counted(model: Any) -> int:
    """Return how many samples the mean loss of this epoch is of; 0 where Keras does not count them."""
    count = getattr(getattr(model, "_loss_tracker", None), "count", None)
    return 0 if count is None else int(keras.ops.convert_to_numpy(count))


def serving(serve: Callable[[], dict[str, float]], model: Any) -> Callable[..., Any]:
    """Return what `fit` calls for each batch of a rank that serves; `serve` returns the metrics."""
    if keras.backend.backend() != "jax":
        return lambda iterator: serve()
    parts = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")

    def serve_with_state(state: Any, iterator: Any) -> Any:  # noqa: ARG001 - the data is not looked at
        # JAX's fit takes the values out of the variables for an epoch; who serves needs them there.
        model._jax_state = dict(zip(parts, state, strict=True))
        model.jax_state_sync()
        return serve(), model._get_jax_state(**dict.fromkeys(parts, True))

    return serve_with_state
