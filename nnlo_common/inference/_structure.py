"""Structure of outputs: arrays by name, from a tensor, a tuple, a dictionary or a dataclass of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError

__all__ = ["SINGLE", "Named", "changed", "named_arrays"]

#: The name of a single output.
SINGLE = "prediction"
Named: TypeAlias = dict[str, npt.NDArray[Any]]


def changed(structure: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with each of its leaves changed.

    Example:
        >>> changed({"a": (1, 2)}, lambda leaf: leaf + 1)
        {'a': (2, 3)}
    """
    if isinstance(structure, np.ndarray):
        return change(structure)
    if isinstance(structure, Mapping):
        return {name: changed(one, change) for name, one in structure.items()}
    if isinstance(structure, tuple | list):
        parts = [changed(one, change) for one in structure]
        return type(structure)(*parts) if _names(structure) else type(structure)(parts)
    if is_dataclass(structure) and not isinstance(structure, type):
        return {one.name: changed(getattr(structure, one.name), change) for one in fields(structure)}
    return change(structure)


def named_arrays(structure: Any, whose: str, rows: int | None = None) -> Named:
    """Return the arrays of a structure by name: nested names are joined by "/", a single one is "prediction".

    Args:
        structure: of arrays.
        whose: names what returned it, for errors.
        rows: how many rows each array must have; None: any.

    Example:
        >>> list(named_arrays({"mass": np.zeros(3), "kind": (np.zeros(3), np.zeros(3))}, "the model"))
        ['mass', 'kind/0', 'kind/1']
    """
    found: Named = {}
    for name, leaf in _leaves(structure, ""):
        array = np.asarray(leaf)
        shown = name or SINGLE
        if array.dtype.kind not in "biufc":
            raise ConfigurationError(
                f"{whose} returned {type(leaf).__name__} as {shown!r}, which is not an array of numbers; "
                "return arrays, or a dictionary or tuple of them"
            )
        if rows is not None and (not array.ndim or len(array) != rows):
            raise ConfigurationError(
                f"{whose} returned {shown!r} of shape {array.shape} for {rows} samples; each output needs a "
                "row for each sample"
            )
        found[shown] = array
    if not found:
        raise ConfigurationError(f"{whose} returned {structure!r:.60}; return at least one array")
    return found


def _names(structure: Any) -> tuple[str, ...]:
    """Return the names of the parts of a named tuple; none of anything else."""
    return getattr(type(structure), "__match_args__", ()) if isinstance(structure, tuple) else ()


def _leaves(structure: Any, name: str) -> Iterator[tuple[str, Any]]:
    if structure is None:  # an output that is switched off
        return
    if isinstance(structure, Mapping):
        parts = list(structure.items())
    elif names := _names(structure):
        parts = list(zip(names, structure, strict=True))
    elif isinstance(structure, tuple | list):
        parts = [(str(index), one) for index, one in enumerate(structure)]
        if len(parts) == 1 and not name:
            yield from _leaves(structure[0], name)
            return
    elif is_dataclass(structure) and not isinstance(structure, type):
        parts = [(one.name, getattr(structure, one.name)) for one in fields(structure)]
    else:
        yield name, structure
        return
    for key, one in parts:
        yield from _leaves(one, f"{name}/{key}" if name else str(key))
