"""How a callback gets at the `fit` that calls it: its list of callbacks, and what it does for each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

__all__ = ["container_of", "serving"]


def container_of(frame: Any) -> Any:
    """Return the list of callbacks that has called what runs in `frame`; None if none has."""
    while frame is not None:
        container = frame.f_locals.get("self")
        if isinstance(container, keras.callbacks.CallbackList):
            return container
        frame = frame.f_back
    return None


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
