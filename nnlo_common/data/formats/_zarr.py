"""Zarr folders with arrays, by zarr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array
from nnlo_common.data.formats._table import Column, TableFormat

__all__ = ["Zarr"]

#: The name of the array, if the folder is one.
ARRAY = "array"
_PIECE_BYTES = 2**20
_MOST = 10_000  # arrays that are looked at


class Zarr(TableFormat):
    """Reads arrays of a folder, some chunks at a time."""

    title, suffixes, one = "Zarr", (".zarr",), "a Zarr folder"
    folders, remote = True, True
    needs = ("zarr", "zarr")

    def table(self, path: str) -> _ZarrFolder:
        """Open a folder."""
        import zarr

        return _ZarrFolder(path, zarr.open(path, mode="r"))


class _ZarrFolder:
    """An open folder.

    Args:
        path: of the folder.
        found: what zarr has opened.
    """

    def __init__(self, path: str, found: Any) -> None:
        self._arrays: dict[str, Any] = {}
        self.groups: dict[str, Sequence[str]] = {}
        for name, one in [(ARRAY, found)] if hasattr(found, "shape") else self._below(found, ""):
            self._arrays[name] = one
            if len(self._arrays) > _MOST:
                raise ConfigurationError(f"{path} has more than {_MOST} arrays; name a folder inside it")
        for name in self._arrays:
            group = name.rpartition("/")[0]
            if group:
                self.groups[group] = sorted([*self.groups.get(group, ()), name])
        self.columns: Mapping[str, Column] = {name: _column(one) for name, one in self._arrays.items()}
        self.lengths = {name: int(one.shape[0]) for name, one in self._arrays.items() if one.shape}
        self.encoded = "Zarr" if any(map(_is_compressed, self._arrays.values())) else ""
        grain = max((self._grain(one) for one in self._arrays.values() if one.shape), default=1)
        length = max(self.lengths.values(), default=0)
        self.starts = [*range(0, length, grain), length]
        self._path = path

    def decode(self, name: str, piece: int) -> Array:
        """Return some rows of an array."""
        first, last = self.starts[piece : piece + 2]
        return np.asarray(self._arrays[name][first:last])

    def close(self) -> None:
        """Drop the arrays; nothing stays open."""
        self._arrays.clear()

    @staticmethod
    def _grain(array: Any) -> int:
        chunk = int(array.chunks[0]) or 1
        row_bytes = max(int(np.prod(array.shape[1:], dtype=float)) * array.dtype.itemsize, 1)
        return int(-(-max(_PIECE_BYTES // row_bytes, 1) // chunk) * chunk)

    def _below(self, group: Any, inside: str) -> Iterator[tuple[str, Any]]:
        for name, array in sorted(group.arrays()):
            yield f"{inside}{name}", array
        for name, below in sorted(group.groups()):
            yield from self._below(below, f"{inside}{name}/")


def _column(array: Any) -> Column:
    if not array.shape:
        return Column(refused="is one number, but needs a row for each sample")
    dtype = array.dtype
    if not isinstance(dtype, np.dtype):
        return Column(refused=f"has the type {dtype}")
    return Column(dtype, tuple(map(int, array.shape[1:])))


def _is_compressed(array: Any) -> bool:
    return bool(getattr(array, "compressors", ()) or getattr(array, "filters", ()))
