"""Error for a back end of Keras that is not installed; imports nothing of Keras."""

from __future__ import annotations

import importlib.util

from nnlo_common import ConfigurationError, MissingExtraError

__all__ = ["without_back_end"]

_BACK_ENDS = ("torch", "tensorflow", "jax")


def without_back_end(missing: str | None) -> Exception | None:
    """Return the error for a module that Keras has not found; None: it is no back end.

    Args:
        missing: the module's name.
    """
    if missing not in _BACK_ENDS:
        return None
    here = [name for name in _BACK_ENDS if name != missing and importlib.util.find_spec(name) is not None]
    if not here:
        return MissingExtraError(
            "Keras without any back end", "torch", "torch", "; then export KERAS_BACKEND=torch"
        )
    return ConfigurationError(
        f"Keras is to run on {missing}, which is not installed; choose a back end that is: "
        f"export KERAS_BACKEND={' or '.join(here)}"
    )
