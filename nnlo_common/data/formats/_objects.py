"""Columns in memory, or in any object that has a length and whose slices are arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array
from nnlo_common.data.formats._format import NUMBERS, TEXTS, OpenedFile
from nnlo_common.data.formats._table import Column, TableFormat, _TableFile

__all__ = ["Objects"]

_ROWS = 1024  # of a piece
_PLACE = "the given columns"


class Objects(TableFormat):
    """Reads slices of objects.

    Args:
        columns: objects by name.
    """

    title, suffixes, one = "columns in memory", (), "a dictionary of columns"

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = {name: _one_type(one) for name, one in columns.items()}

    def _table(self, path: str) -> _ObjectTable:  # noqa: ARG002 - there is no path
        return _ObjectTable(self._columns)

    def open(self, path: str, locking: bool | None) -> OpenedFile:  # noqa: ARG002
        """Return a reader of them."""
        return _TableFile(path, self._table(path))


class _ObjectTable:
    """Objects as a table.

    Args:
        objects: by name.
    """

    encoded, groups = "", dict[str, Sequence[str]]()

    def __init__(self, objects: Mapping[str, Any]) -> None:
        if not objects or not all(isinstance(name, str) for name in objects):
            raise ConfigurationError(
                f"a dictionary of {sorted(map(repr, objects))} has no columns; give objects by name"
            )
        lengths = {}
        for name, one in objects.items():
            try:
                lengths[name] = len(one)
            except TypeError:
                raise ConfigurationError(
                    f"{_PLACE}: {name!r} is a {type(one).__name__} without a length; give an array, or an "
                    "object with a length whose slices are arrays"
                ) from None
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigurationError(
                f"{_PLACE} have unequal lengths: {listed}; each needs a row for a sample"
            )
        self._objects = objects
        self.columns = {name: _column(one) for name, one in objects.items()}
        length = next(iter(lengths.values()))
        self.starts = [*range(0, length, _ROWS), length]

    def decode(self, name: str, piece: int) -> Array:
        """Return a slice."""
        first, last = self.starts[piece : piece + 2]
        try:
            found = np.asarray(self._objects[name][first:last])
        except Exception as error:
            raise ConfigurationError(f"[{first}:{last}] raised {type(error).__name__}: {error}") from error
        kind = self.columns[name].dtype
        if kind is not None and kind.kind in NUMBERS and not np.can_cast(found.dtype, kind, "same_kind"):
            raise ConfigurationError(
                f"its rows are {found.dtype}, but the first is {kind}, which would change them; give an "
                "object whose slices have one type"
            )
        return found

    def whole(self, name: str) -> Array | None:
        """Return an object that is an array; None: its slices are."""
        one = self._objects[name]
        return one if isinstance(one, np.ndarray) else None

    def close(self) -> None:
        """Leave the objects open: they are the user's."""


def _one_type(column: Any) -> Any:
    """Return a list as an array of the type that all its rows have together; anything else as it is."""
    if not isinstance(column, list | tuple):
        return column
    try:
        found = np.asarray(column)
    except Exception:  # it says so where it is read
        return column
    # One long text would make all of an array's as long.
    return np.asarray(column, object) if found.dtype.kind in TEXTS else found


def _column(one: Any) -> Column:
    shape, dtype = getattr(one, "shape", None), getattr(one, "dtype", None)
    if not (isinstance(shape, tuple) and isinstance(dtype, np.dtype)):  # a list, or a tensor
        try:
            row = np.asarray(one[0:1])
        except Exception as error:
            return Column(refused=f"cannot be sliced ({type(error).__name__}: {error})")
        shape, dtype = row.shape, row.dtype
    return Column(dtype, tuple(shape[1:]))
