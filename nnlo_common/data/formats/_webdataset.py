"""WebDataset: a tar of samples, each a few files that follow each other and differ in their ending only.

    0007.x.npy  0007.mask.npy  0007.cls     the sample 0007, of the columns x, mask and cls
    0008.x.npy  ...

Arrays are .npy files, numbers are text. The tar is not compressed, so that samples can be read in any order.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import readable_file
from nnlo_common.data._source import Array
from nnlo_common.data.formats._format import TEXT, TEXTS, shown
from nnlo_common.data.formats._numpy import array_header
from nnlo_common.data.formats._table import Column, TableFormat

__all__ = ["WebDataset"]

_ROWS = 256  # of a piece
_NUMBERS = ("cls", "cls2", "id", "index", "inx", "value")  # endings of files with a number as text
_LONGEST_NUMBER = 64
_BLOCK = 512  # of a tar
_MOST_COLUMNS = 1000


class WebDataset(TableFormat):
    """Reads the samples of an uncompressed tar."""

    title, suffixes, one = "WebDataset", (".tar",), "a tar of samples"

    def table(self, path: str) -> _Tar:
        """Open a file."""
        return _Tar(path)


class _PackedFile(NamedTuple):
    """Where a file of the tar lies.

    Attributes:
        begin: its first byte.
        size: in bytes.
    """

    begin: int
    size: int


class _Tar:
    """An open tar.

    Args:
        path: of the file.
    """

    groups: Mapping[str, Sequence[str]] = {}
    encoded = "a tar of small files"

    def __init__(self, path: str) -> None:
        self._path = path
        self._places: dict[str, list[_PackedFile]] = {}
        self._arrays: set[str] = set()  # the columns that are .npy files
        self._keys: list[str] = []
        self._file = readable_file(path)
        try:
            self._index()
            self.columns = {name: self._column(name, places) for name, places in self._places.items()}
        except BaseException:
            self._file.close()
            raise
        self.starts = [*range(0, len(self._keys), _ROWS), len(self._keys)]

    def decode(self, name: str, piece: int) -> Array:
        """Return one column of some samples."""
        first, last = self.starts[piece : piece + 2]
        column = self.columns[name]
        assert column.dtype is not None  # inspection has refused it
        texts = column.dtype.kind in TEXTS  # of any width
        rows = np.empty((last - first, *column.shape), TEXT if texts else column.dtype)
        for row, place in enumerate(self._places[name][first:last]):
            found = self._read(name, place)
            like = found.dtype.kind == column.dtype.kind if texts else found.dtype == column.dtype
            if not like or found.shape != column.shape:
                raise ConfigurationError(
                    f"its sample {self._keys[first + row]!r:.100} has {found.dtype} of {found.shape}, but "
                    f"the first one {column.dtype} of {column.shape}; samples must be alike"
                )
            rows[row] = found.tolist() if texts else found
        return rows

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _index(self) -> None:
        """Note where each file of each sample lies."""
        size = os.fstat(self._file.fileno()).st_size
        with tarfile.open(fileobj=self._file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # else each stays in memory
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse() or member.offset_data + member.size > size:
                    raise ConfigurationError(
                        f"{self._path}: {member.name!r:.100} is no whole, ordinary file; make the tar again"
                    )
                self._take(member.name, _PackedFile(member.offset_data, member.size))
            ends_at = tar.offset
        if os.pread(self._file.fileno(), _BLOCK, ends_at).strip(b"\0") or ends_at + _BLOCK > size:
            raise ConfigurationError(f"{self._path} is truncated: its end is missing; copy or make it again")
        self._check_whole()

    def _take(self, name: str, place: _PackedFile) -> None:
        folder, slash, base = name.rpartition("/")
        stem, dot, ending = base.partition(".")
        if base.startswith(".") or not dot:  # of the program that packed it
            return
        key, column = folder + slash + stem, ending.removesuffix(".npy")
        if not self._keys or self._keys[-1] != key:
            self._check_whole()
            self._keys.append(key)
        places = self._places.setdefault(column, [])
        if len(self._places) > _MOST_COLUMNS or len(places) != len(self._keys) - 1:
            raise self._incomplete()
        if ending != column or column == "npy":
            self._arrays.add(column)
        places.append(place)

    def _check_whole(self) -> None:
        """Refuse a sample that lacks a column."""
        if any(len(places) != len(self._keys) for places in self._places.values()):
            raise self._incomplete()

    def _incomplete(self) -> ConfigurationError:
        return ConfigurationError(
            f"{self._path}: the sample {self._keys[-1]!r:.100} has not the same files as those before it, "
            f"{shown([*self._places])}, once each; make the tar again, with the files of a sample in a row"
        )

    def _column(self, name: str, places: Sequence[_PackedFile]) -> Column:
        """Return what the first sample says of a column."""
        if name not in self._arrays and name not in _NUMBERS:
            return Column(refused=f"has .{name} files, which are not arrays; store arrays as NAME.npy")
        first = self._read(name, places[0])
        if first.dtype.hasobject:
            return Column(refused="holds Python objects, which could run code")
        return Column(first.dtype, first.shape)

    def _read(self, name: str, place: _PackedFile) -> Array:
        content = os.pread(self._file.fileno(), place.size, place.begin)
        if name not in self._arrays:
            text = content[: _LONGEST_NUMBER + 1].strip()
            if len(content) > _LONGEST_NUMBER:
                raise ValueError(f"{text[:20]!r}... is no number")
            number: Any = float(text) if name == "value" else int(text)
            return np.asarray(number, np.float64 if name == "value" else np.int64)
        file = io.BytesIO(content)
        dtype, shape, fortran = array_header(file)
        if dtype.hasobject:
            return np.empty(0, dtype)
        rest = content[file.tell() :]
        return np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")
