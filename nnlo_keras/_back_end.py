"""Errors for a back end that Keras cannot run on, or has not been told in time; imports nothing of Keras."""

from __future__ import annotations

import importlib.util
import os

from nnlo_common import ConfigurationError, MissingExtraError

__all__ = ["told_too_late", "unknown_back_end", "without_back_end"]

_BACK_ENDS = ("torch", "tensorflow", "jax")
#: Back ends on which Keras runs a model, and trains none.
_WITHOUT_TRAINING = ("numpy", "openvino")
_VARIABLE = "KERAS_BACKEND"


def without_back_end(missing: str | None) -> Exception | None:
    """Return the error for a module that Keras has not found; None: it is no back end.

    Args:
        missing: the module's name.
    """
    if missing not in _BACK_ENDS + _WITHOUT_TRAINING:
        return None
    here = _installed(but=missing)
    if not here:
        return MissingExtraError(
            "Keras without any back end", "torch", "torch", "; then export KERAS_BACKEND=torch"
        )
    return ConfigurationError(
        f"Keras is to run on {missing}, which is not installed; choose a back end that is: {_to_type(here)}"
    )


def unknown_back_end() -> Exception | None:
    """Return the error for a back end that Keras does not have; None: it has the chosen one."""
    chosen = os.environ.get(_VARIABLE, "")
    if not chosen or chosen in _BACK_ENDS + _WITHOUT_TRAINING:
        return None
    return ConfigurationError(
        f"{_VARIABLE}={chosen} is no back end of Keras; choose one: {_to_type(_installed() or [*_BACK_ENDS])}"
    )


def told_too_late(running: str) -> str:
    """Return a warning if Keras was imported before its back end was chosen; empty if it runs on that.

    Args:
        running: the back end on which Keras runs.
    """
    chosen = os.environ.get(_VARIABLE, "")
    if not chosen or chosen == running:
        return ""
    return (
        f"{_VARIABLE} was set to {chosen} after `import keras`, so Keras runs on {running}; set it before "
        f"the first import of keras: export {_VARIABLE}={chosen}"
    )


def _installed(but: str | None = None) -> list[str]:
    return [name for name in _BACK_ENDS if name != but and importlib.util.find_spec(name) is not None]


def _to_type(names: list[str]) -> str:
    return f"export {_VARIABLE}={' or '.join(names)}"
