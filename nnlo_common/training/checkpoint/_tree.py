"""States as bytes: arrays in an npz, the rest as JSON inside it; loading never runs code."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._limited_formats import DEEPEST, MOST_DIGITS, npz_arrays, parsed_json

__all__ = ["packed_tree", "unpacked_tree"]

_TREE = "tree"  # the entry of the npz that holds the JSON
_ARRAY = "array:"  # in the JSON, in place of an array
_TEXT = "text:"  # before every text, so that none is mistaken for an array


def packed_tree(tree: Mapping[str, Any]) -> bytes:
    """Return a tree of numbers, texts and arrays as bytes; floats keep every bit, tuples become lists.

    Raises:
        ConfigurationError: a value is of another type.

    Example:
        >>> unpacked_tree(packed_tree({"clock": 3, "x": np.ones(2), "name": None}))
        {'clock': 3, 'x': array([1., 1.]), 'name': None}
    """
    arrays: dict[str, Any] = {}
    text = json.dumps(_taken_apart(tree, arrays, "the state", DEEPEST - 1))
    arrays[_TREE] = np.frombuffer(text.encode(), np.uint8)
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked_tree(data: bytes) -> dict[str, Any]:
    """Return the tree that was packed.

    Raises:
        ConfigurationError: the bytes are not a packed tree.
    """
    try:
        arrays = npz_arrays(data)
        tree = _put_together(parsed_json(arrays[_TREE].tobytes()), arrays)
    except (ValueError, KeyError) as error:
        raise ConfigurationError(f"a saved state cannot be read ({error}); is it damaged?") from error
    if not isinstance(tree, dict):
        raise ConfigurationError(
            f"a saved state cannot be read (it is a {type(tree).__name__}, not a mapping); is it damaged?"
        )
    return tree


def _taken_apart(value: Any, arrays: dict[str, Any], where: str, levels: int) -> Any:
    """Return a value with names in place of arrays; refuse what `unpacked_tree` would not read."""
    if not levels or (isinstance(value, int) and abs(value) >= 10**MOST_DIGITS):
        raise ConfigurationError(
            f"{where:.200} is nested more than {DEEPEST} levels deep, or a number of more than {MOST_DIGITS} "
            "digits, which cannot be saved"
        )
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        name = f"{len(arrays)}"
        arrays[name] = value
        return _ARRAY + name
    if isinstance(value, str):
        return _TEXT + value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            key: _taken_apart(item, arrays, f"{where}[{key!r}]", levels - 1) for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_taken_apart(item, arrays, f"{where}[{i}]", levels - 1) for i, item in enumerate(value)]
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which cannot be saved; "
        "use only numbers, texts, arrays, lists and mappings with texts for keys"
    )


def _put_together(value: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        kind, rest = value[: len(_TEXT)], value[len(_TEXT) :]
        return rest if kind == _TEXT else arrays[value.removeprefix(_ARRAY)]
    if isinstance(value, list):
        return [_put_together(item, arrays) for item in value]
    if isinstance(value, dict):
        return {key: _put_together(item, arrays) for key, item in value.items()}
    return value
