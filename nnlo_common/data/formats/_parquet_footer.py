"""The end of a Parquet file, read here: how its columns are compressed, and their least and largest values.

pyarrow looks at both only when it is asked for them, and ends the process where they are damaged. Everything
else of a file is read by pyarrow, which reports damage as an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Footer"]

_MAGIC = b"PAR1"
_CODECS = ("uncompressed", "snappy", "gzip", "lzo", "brotli", "lz4", "zstd", "lz4")
_TYPES = {0: "?", 1: "<i4", 2: "<i8", 4: "<f4", 5: "<f8"}
# The numbers of the fields that are read: of the file, of a row group, of a column of one, and of its
# statistics, of which old files have the first two only.
_ROW_GROUPS, _COLUMNS, _COLUMN = 4, 1, 3
_TYPE, _PATH, _CODEC, _STATISTICS = 1, 3, 4, 12
_OLD_LARGEST, _OLD_LEAST, _LARGEST, _LEAST = 1, 2, 5, 6

# The kinds of values in Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _DOUBLE, _BYTES, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_INTEGERS = (4, 5, 6)
_DEEPEST = 32  # structures inside each other
_MOST_BITS = 64
_MOST_VALUES = 10**6  # of one column in a row group, or of the list of all columns

#: The values of a structure by the numbers of their fields.
_Fields = dict[int, Any]


class Footer:
    """What the end of a Parquet file says about its columns.

    Args:
        file: open for reading; where it stands afterwards is not defined.
        name: of the file, for messages.
        most_bytes: that the end of the file may have.

    Raises:
        ConfigurationError: it is damaged.
    """

    def __init__(self, file: BinaryIO, name: str, most_bytes: int) -> None:
        self._name = name
        self._groups: list[dict[bytes, _Fields]] | None = None
        length = file.seek(0, 2)
        file.seek(max(0, length - 8))
        end = file.read(8)
        size = int.from_bytes(end[:4], "little")
        if end[4:] != _MAGIC or not 0 < size <= min(length - 12, most_bytes):
            raise self._damaged(f"its last 8 bytes are {end!r}")
        file.seek(length - 8 - size)
        self._content = file.read(size)

    @property
    def codec(self) -> str:
        """How its first column is compressed; empty: it has none, or does not say."""
        with self._named():
            for columns in self._row_groups():
                for column in columns:
                    known = column.get(_CODEC)
                    return _CODECS[known] if isinstance(known, int) and 0 <= known < len(_CODECS) else ""
        return ""

    def bounds(self, name: str, group: int, dtype: np.dtype[Any]) -> tuple[float, float] | None:
        """Return the least and the largest number of a column in a row group; None: the file does not say.

        Args:
            name: of the column, which is not inside another one.
            group: number of the row group.
            dtype: of the column's numbers.
        """
        if self._groups is None:
            with self._named():
                self._groups = [dict(_outer(columns)) for columns in self._row_groups()]
        column = self._groups[group].get(name.encode(), {}) if group < len(self._groups) else {}
        found = column.get(_STATISTICS)
        stored = np.dtype(_TYPES.get(column.get(_TYPE, -1), "V"))
        if stored.kind == "i" and dtype.kind == "u":
            stored = np.dtype(stored.str.replace("i", "u"))
        if not isinstance(found, dict) or stored.kind != dtype.kind:
            return None
        least, largest = found.get(_LEAST), found.get(_LARGEST)
        if least is None and largest is None and dtype.kind != "u":  # old files compare all as signed
            least, largest = found.get(_OLD_LEAST), found.get(_OLD_LARGEST)
        if least is None or largest is None:
            return None
        for one in (least, largest):
            if not isinstance(one, bytes) or len(one) != stored.itemsize:
                raise self._damaged(f"a limit of {name} in row group {group} is {one!r:.100}")
        limits = np.frombuffer(least + largest, stored)
        if stored.kind == "f" and np.isnan(limits).any():
            return None  # it says nothing about the other numbers
        return limits[0].item(), limits[1].item()

    def _row_groups(self) -> Iterator[Iterator[_Fields]]:
        """Go through the row groups, each of them whole before the next."""
        read = _Compact(self._content)
        for number, kind in read.fields():
            if number == _ROW_GROUPS and kind == _LIST:
                for inside in read.items():
                    _expect(_STRUCT, inside)
                    yield _columns(read)
            else:
                read.value(kind)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, IndexError) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._name} is damaged at its end ({what}); make it again")


def _columns(read: _Compact) -> Iterator[_Fields]:
    """Go through the columns of the row group that is read."""
    for number, kind in read.fields():
        if number == _COLUMNS and kind == _LIST:
            for inside in read.items():
                _expect(_STRUCT, inside)
                found = read.value(inside).get(_COLUMN)
                yield found if isinstance(found, dict) else {}  # encrypted columns have theirs elsewhere
        else:
            read.value(kind)


def _outer(columns: Iterator[_Fields]) -> Iterator[tuple[bytes, _Fields]]:
    """Return the names and columns of those that are not inside another one."""
    for column in columns:
        match column.get(_PATH):
            case [bytes(name)]:
                yield name, {number: column[number] for number in (_TYPE, _STATISTICS) if number in column}


def _expect(kind: int, found: int) -> None:
    if found != kind:
        raise ValueError(f"there is a value of kind {found} instead of {kind}")


class _Compact:
    """Reads values in Thrift's compact protocol; ValueError or IndexError: they are damaged.

    Args:
        content: the bytes.
    """

    def __init__(self, content: bytes) -> None:
        self._content, self._at, self._values = content, 0, 0

    def fields(self) -> Iterator[tuple[int, int]]:
        """Go through a structure's fields: number and kind; each value must be read before the next."""
        number = 0
        while head := self._byte():
            kind, by = head & 15, head >> 4
            number = number + by if by else self._integer()
            yield number, kind

    def items(self) -> Iterator[int]:
        """Go through the kinds of a list's items; each must be read before the next."""
        head = self._byte()
        kind, count = head & 15, head >> 4
        if count == 15:
            count = self._natural()
        for _ in range(count):
            yield kind

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a value of this kind; structures are returned by the numbers of their fields."""
        self._values = self._values + 1 if depth else 1
        if depth > _DEEPEST or self._values > _MOST_VALUES:
            raise ValueError("its structures are too large")
        if kind in _INTEGERS:
            return self._integer()
        if kind == _BYTES:
            return self._bytes(self._natural())
        if kind == _STRUCT:
            return {
                number: inside == _TRUE if inside in (_TRUE, _FALSE) else self.value(inside, depth + 1)
                for number, inside in self.fields()
            }
        if kind in (_LIST, _SET):
            return [self.value(inside, depth + 1) for inside in self.items()]
        if kind in (_TRUE, _FALSE, _BYTE):  # items of a list: a structure has its truths in their kinds
            return self._byte()
        if kind == _DOUBLE:
            return self._bytes(8)
        raise ValueError(f"there is no kind {kind} of values")

    def _byte(self) -> int:
        self._at += 1
        return self._content[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        found = self._content[self._at : self._at + count]
        if len(found) < count:
            raise ValueError(f"{count} bytes are expected where {len(found)} are left")
        self._at += count
        return found

    def _natural(self) -> int:
        number = shift = 0
        while (byte := self._content[self._at]) > 127:
            self._at += 1
            number |= (byte & 127) << shift
            shift += 7
            if shift >= _MOST_BITS:
                raise ValueError("a number is too long")
        self._at += 1
        return number | byte << shift

    def _integer(self) -> int:
        number = self._natural()
        return number >> 1 ^ -(number & 1)
