"""Serving in place of training: a server's training function for `fit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from nnlo_keras._compat import give_state, taken_state

__all__ = ["serving"]


def serving(serve: Callable[[], dict[str, float]], model: Any) -> Callable[..., Any]:
    """Return a server's training function, which `fit` calls for each batch; `serve` returns the metrics."""
    if keras.backend.backend() != "jax":
        return lambda iterator: serve()

    def serve_with_state(state: Any, iterator: Any) -> Any:  # noqa: ARG001 - the data is not used
        # JAX's fit takes the values out of the variables for an epoch; serving needs them there.
        give_state(model, state)
        return serve(), taken_state(model)

    return serve_with_state
