"""Tables: files of columns that are stored in pieces of rows, such as row groups, baskets or chunks.

Such a format says which columns there are, where the pieces begin, and how one column of one piece is
decoded; what its readers have in common is here.
"""

from __future__ import annotations

import difflib
import math
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from nnlo_common.base._errors import ConfigurationError, MissingExtraError, NNLOError
from nnlo_common.base._file_access import readable_file
from nnlo_common.data._listing import without_tree
from nnlo_common.data._remote import importable
from nnlo_common.data._source import Array, Field
from nnlo_common.data.formats._format import (
    HOW,
    LARGEST_SAMPLE,
    NUMBERS,
    TEXT,
    TEXTS,
    FileInfo,
    OpenedFile,
    Ragged,
    as_configuration,
    joined_bounds,
    shown,
    wrong_path,
)

__all__ = ["Column", "Piece", "Table", "TableFormat", "fill_padded"]

# -- rows of unequal length, brought to one length -----------------------------------------------------


def fill_padded(rows: Ragged, pad: int, out: Array) -> None:
    """Fill an array with the first `pad` entries of each row, and zeros after them.

    Example:
        >>> out = np.empty((3, 2))
        >>> fill_padded(Ragged(np.arange(4.0), np.array([1, 0, 3])), 2, out)
        >>> out.tolist()
        [[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]]
    """
    content, counts = rows
    if len(counts) != len(out) or (counts < 0).any() or counts.sum() != len(content):
        raise ConfigurationError(
            f"the counts of {len(counts)} rows, {int(counts.sum())} entries in all, do not fit {len(out)} "
            f"rows of {len(content)} entries"
        )
    place = np.arange(pad)
    there = place < counts[:, None]
    first = np.cumsum(counts) - counts
    out[...] = 0
    out[there] = content[(first[:, None] + place)[there]]


# Bytes of decoded pieces that an open file keeps, besides the last one of each column.
_KEPT_BYTES = 2**26
_MOST_ROWS = 2**48

#: One column of one piece.
Piece: TypeAlias = Array | Ragged


@dataclass(frozen=True, slots=True)
class Column:
    """A column as a file declares it.

    Attributes:
        dtype: of its numbers or texts; None: it has none.
        shape: of a sample, or of one entry of a ragged column.
        ragged: whether its rows have unequal lengths.
        refused: why it cannot be trained on; empty: it can.
    """

    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    ragged: bool = False
    refused: str = ""


class Table(Protocol):
    """An open file.

    It may also have ``bounds(name, piece)``, which returns the least and the largest number of a column in a
    piece, if they are known without decoding it; ``whole(name)``, which returns a column as one array, if it
    is in memory or mapped into it; and ``lengths``, the rows of each column, if some have fewer than all.
    """

    @property
    def columns(self) -> Mapping[str, Column]:
        """The columns by name, in the order of the file."""

    @property
    def starts(self) -> Sequence[int]:
        """The first row of each piece, and the number of all rows at the end."""

    @property
    def encoded(self) -> str:
        """How it is compressed or encoded; empty: it is not."""

    @property
    def groups(self) -> Mapping[str, Sequence[str]]:
        """Names that stand for several columns."""

    def decode(self, name: str, piece: int) -> Piece:
        """Return one column of one piece."""

    def close(self) -> None:
        """Close the file."""


class TableFormat:
    """What formats of tables have in common.

    A format has `title`, `suffixes`, `one` (e.g. "a Parquet file"), `begins`, `remote`, `folders` (whether
    its files are folders), `needs` (package and extra), and `table`, which opens a file.
    """

    title: str
    suffixes: Sequence[str]
    one: str
    begins = b""
    remote = False
    folders = False
    needs: tuple[str, str] | None = None

    def table(self, path: str) -> Table:
        """Open a file, which exists; it may raise anything."""
        raise NotImplementedError

    def inspect(self, path: str, names: Sequence[str], locking: bool | None) -> FileInfo:  # noqa: ARG002
        """Return what is known of these columns without reading samples."""
        table = self._table(path)
        try:
            wanted = [self._columns_of(path, table, name) for name in names]
            columns = [name for inside in wanted for name in inside]
            fields = tuple(_field(path, name, table.columns[name]) for name in columns)
            starts = table.starts
            length = _length(path, {name: _rows(table, name) for name in columns})
            grain = max((b - a for a, b in pairwise(starts)), default=1) or 1
            return FileInfo(
                path=path,
                length=length,
                fields=fields,
                grain=grain,
                groups=tuple(
                    len(table.groups[name]) if name in table.groups and name not in table.columns else None
                    for name in names
                ),
                encoded=bool(table.encoded),
                ragged=frozenset(name for name in columns if table.columns[name].ragged),
                how=table.encoded,
                piece_bytes=grain * min((field.row_bytes for field in fields), default=0)
                if table.encoded
                else 0,
            )
        finally:
            table.close()

    def open(self, path: str, locking: bool | None) -> OpenedFile:  # noqa: ARG002
        """Open a file."""
        return _TableFile(path, self._table(path))

    def names(self, path: str, locking: bool | None) -> list[str]:  # noqa: ARG002
        """Return the names of its columns."""
        table = self._table(path)
        try:
            return list(table.columns)
        finally:
            table.close()

    def _table(self, path: str) -> Table:
        place = without_tree(path)
        if not (self.remote and "://" in path):
            exists = os.path.isdir if self.folders else os.path.isfile
            if not exists(place):
                raise ConfigurationError(f"{place} {self._wrong(place)}")
            if not os.access(place, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
                raise ConfigurationError(
                    f"{place} may not be read by this user (no permission); ask its owner for access "
                    "(chmod a+r)"
                )
        try:
            table = self.table(path)
        except ImportError as error:
            if isinstance(error, NNLOError) or self.needs is None:
                raise
            if not importable(self.needs[0]):
                raise MissingExtraError(f"reading {self.title} files", *self.needs) from None
            raise ConfigurationError(  # a package that this one needs for this file only
                f"{place} cannot be opened here ({' '.join(str(error).split())[:200]}); install or renew that"
            ) from None
        except Exception as error:  # the libraries raise any type of exception for damaged files
            raise self._unreadable(place, error) from None
        starts = list(table.starts)
        if starts[0] != 0 or sorted(starts) != starts or starts[-1] > _MOST_ROWS:
            table.close()
            raise ConfigurationError(
                f"{path} is damaged: its parts begin at rows {shown([*map(str, starts)])}"
            )
        return table

    def _wrong(self, path: str) -> str:
        if self.folders and Path(path).is_file():
            return f"is a file; {self.one} is a folder"
        return wrong_path(path, self.one, self.suffixes[0])

    def _unreadable(self, path: str, error: Exception) -> NNLOError:
        if isinstance(error, NNLOError):
            return error
        if "://" in path:
            text = " ".join(str(error).split())[:200] or type(error).__name__
            return ConfigurationError(
                f"{path} cannot be opened here ({type(error).__name__}: {text}); correct the name, look "
                "whether you may read it, or copy it first by stage_to= and copy_command="
            )
        if not self.folders:
            if Path(path).stat().st_size == 0:
                return ConfigurationError(
                    f"{path} is empty (0 bytes); the program that wrote it failed, so make it again"
                )
            with readable_file(path) as file:
                beginning = file.read(12)
            if self.begins and not beginning.startswith(self.begins):
                return ConfigurationError(
                    f"{path} is not {self.one}: it begins with {beginning!r}; convert it or leave it out"
                )
        return as_configuration(path, error)

    def _columns_of(self, path: str, table: Table, name: str) -> Sequence[str]:
        if name in table.columns:
            return [name]
        if name in table.groups:
            return table.groups[name]
        near = difflib.get_close_matches(name, list(table.columns), 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigurationError(
            f"{path} has no {name!r}; it has {shown([*table.columns])}.{meant} Name its columns by {HOW}"
        )


def _rows(table: Table, name: str) -> int:
    rows: int = getattr(table, "lengths", {}).get(name, table.starts[-1])
    return rows


def _length(path: str, lengths: Mapping[str, int]) -> int:
    """Return the length that all these columns have."""
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigurationError(
            f"{path} has columns of unequal lengths: {listed}; each needs a row for each sample: make the "
            "file again, or name other columns"
        )
    return next(iter(lengths.values()))


def _field(path: str, name: str, column: Column) -> Field:
    """Return shape and type of a column's samples; refuse data that cannot be trained on."""
    dtype = column.dtype
    if not column.refused and dtype is not None and dtype.kind in TEXTS:
        dtype = TEXT
    if column.refused or dtype is None or dtype.kind not in NUMBERS + TEXT.kind or dtype.itemsize > 8:
        what = column.refused or f"has the type {dtype}"
        raise ConfigurationError(
            f"{path}: {name} {what}, which cannot be trained on; make the file with float32 or an integer "
            "type, or name another column"
        )
    if 0 in column.shape:
        raise ConfigurationError(
            f"{path}: {name} has empty samples, of shape {column.shape}; name another column"
        )
    sample = math.prod(column.shape) * dtype.itemsize
    if sample > LARGEST_SAMPLE:
        raise ConfigurationError(
            f"{path}: a sample of {name}, of shape {column.shape}, has {sample / 2**30:.0f} GiB, more than "
            f"{LARGEST_SAMPLE / 2**30:.0f}; are rows and columns exchanged? Make the file with a row for "
            "each sample"
        )
    return Field(name, column.shape, dtype.newbyteorder("="))


class _TableFile:
    """An open table that keeps the pieces decoded last.

    Args:
        path: of the file.
        table: the file.
    """

    def __init__(self, path: str, table: Table) -> None:
        self._path, self._table, self._starts = path, table, list(table.starts)
        self._pieces: OrderedDict[tuple[str, int], Piece] = OrderedDict()

    def read(self, name: str, first: int, last: int, out: Array) -> None:
        """Read the rows [first, last) of a column into an array."""
        at = 0
        for piece, begin, end in self._parts(first, last):
            found = self._piece(name, piece)
            assert not isinstance(found, Ragged)  # inspection has told it
            if found.shape[1:] != out.shape[1:]:
                raise ConfigurationError(f"its samples have the shape {found.shape[1:]}, not {out.shape[1:]}")
            out[at : at + end - begin] = found[begin:end]
            at += end - begin

    def ragged(self, name: str, first: int, last: int) -> Ragged:
        """Return the rows [first, last) of a ragged column."""
        contents, counts = [], []
        for piece, begin, end in self._parts(first, last):
            found = self._piece(name, piece)
            assert isinstance(found, Ragged)  # inspection has told it
            ends = np.cumsum(found.counts)
            low, high = (0 if row == 0 else int(ends[row - 1]) for row in (begin, end))
            contents.append(found.content[low:high])
            counts.append(found.counts[begin:end])
        return Ragged(np.concatenate(contents), np.concatenate(counts))

    def bounds(self, name: str, first: int, last: int) -> tuple[float, float] | None:
        """Return the least and the largest number of a column in the pieces of these rows; None: unknown."""
        look = getattr(self._table, "bounds", None)
        return (
            None if look is None else joined_bounds(look(name, one) for one, _, _ in self._parts(first, last))
        )

    def whole(self, name: str) -> Array | None:
        """Return a column as one array, which is in memory or mapped into it; None: it must be read."""
        look = getattr(self._table, "whole", None)
        found: Array | None = None if look is None else look(name)
        return found

    def close(self) -> None:
        """Close the file."""
        self._pieces.clear()
        self._table.close()

    def _parts(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return the pieces that have these rows, with the slice of each."""
        found, piece = [], bisect_right(self._starts, first) - 1
        while first < last:
            begin, end = self._starts[piece : piece + 2]
            stop = min(last, end)
            if first < stop:
                found.append((piece, first - begin, stop - begin))
            first, piece = stop, piece + 1
        return found

    def _piece(self, name: str, number: int) -> Piece:
        found = self._pieces.pop((name, number), None)
        if found is None:
            found = self._table.decode(name, number)
            end = min(self._starts[number + 1], _rows(self._table, name))
            rows = end - self._starts[number]
            given = len(found.counts) if isinstance(found, Ragged) else len(found)
            if given != rows:
                raise ConfigurationError(f"it has {given} rows where {rows} are declared")
            kept = {one for one, _ in self._pieces if one != name}
            size = sum(map(_bytes, self._pieces.values())) + _bytes(found)
            for old in list(self._pieces):
                if size <= _KEPT_BYTES:
                    break
                if old[0] in kept and sum(one == old[0] for one, _ in self._pieces) == 1:
                    continue  # of each column one stays: a batch has rows of all of them
                size -= _bytes(self._pieces.pop(old))
        self._pieces[name, number] = found
        return found


def _bytes(piece: Piece) -> int:
    return piece.content.nbytes if isinstance(piece, Ragged) else piece.nbytes
