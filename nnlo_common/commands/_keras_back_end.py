"""Back end that Keras will run on, found without loading Keras."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_OPTIONS, parsed_json

__all__ = ["chosen_back_end", "installed_back_ends"]


def chosen_back_end(env: Mapping[str, str]) -> str:
    """Return the back end that the user has chosen by a variable or in Keras' file; empty: none.

    Args:
        env: the variables of the process.

    Example:
        >>> chosen_back_end({"KERAS_BACKEND": "jax"})
        'jax'
    """
    if name := env.get("KERAS_BACKEND"):
        return name
    file = Path(env.get("KERAS_HOME", "~/.keras")).expanduser() / "keras.json"
    try:
        name = parsed_json(read_whole(file, LARGEST_OPTIONS)).get("backend")
    except (OSError, ValueError, AttributeError):
        return ""
    # Keras writes this file at its first import, so its default "tensorflow" is not a choice.
    return name if isinstance(name, str) and name != "tensorflow" else ""


def installed_back_ends() -> list[str]:
    """Return the back ends that are installed, the lightest to begin with first."""
    return [name for name in ("torch", "tensorflow", "jax") if importlib.util.find_spec(name) is not None]
