"""NumPy's own files: .npy with one array, .npz with several."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import readable_file
from nnlo_common.data._source import Array
from nnlo_common.data.formats._table import Column, TableFormat

__all__ = ["NPY", "NPZ", "array_header"]

#: The name of the array in an .npy file that has no fields of its own.
ARRAY = "array"
_ROWS = 4096  # of a piece
_LONGEST = 10_000  # bytes of a header, as in NumPy
# A compressed array is decoded whole.
_LARGEST = 16 * 2**30


class NPY(TableFormat):
    """Reads the array of an .npy file, called "array", or the fields of a structured one."""

    title, suffixes, one = "NumPy", (".npy",), "an .npy file"
    begins = b"\x93NUMPY"

    def table(self, path: str) -> _MappedArrays:
        """Map a file into memory."""
        with readable_file(path) as file:
            array = _mapped(path, *array_header(file), file.tell())
        if array.dtype.names:
            return _MappedArrays({name: array[name] for name in array.dtype.names}, "")
        return _MappedArrays({ARRAY: array}, "")


class NPZ(TableFormat):
    """Reads the arrays of an .npz file; compressed ones are decoded whole."""

    title, suffixes, one = "npz", (".npz",), "an .npz file"
    begins = b"PK\x03\x04"

    def table(self, path: str) -> _Archive:
        """Open a file."""
        return _Archive(path)


class _MappedArrays:
    """Arrays as a table.

    Args:
        arrays: by name.
        encoded: as in `Table`.
    """

    groups: Mapping[str, Sequence[str]] = {}

    def __init__(self, arrays: Mapping[str, Array], encoded: str) -> None:
        self._arrays, self.encoded = dict(arrays), encoded
        self.columns = {name: _column(one.shape, one.dtype) for name, one in arrays.items()}
        lengths = {name: one.shape[0] for name, one in arrays.items() if one.ndim}
        self.starts = _starts(lengths)

    def decode(self, name: str, piece: int) -> Array:
        """Return a slice of an array."""
        first, last = self.starts[piece : piece + 2]
        return self._arrays[name][first:last]

    def whole(self, name: str) -> Array:
        """Return an array."""
        return self._arrays[name]

    def close(self) -> None:
        """Drop the arrays."""
        self._arrays.clear()


class _Archive:
    """An .npz file.

    Args:
        path: of the file.
    """

    groups: Mapping[str, Sequence[str]] = {}

    def __init__(self, path: str) -> None:
        self._path, self._file = path, zipfile.ZipFile(path)
        self._members: dict[str, tuple[zipfile.ZipInfo, Any]] = {}
        self._arrays: dict[str, Array] = {}
        self.columns: dict[str, Column] = {}
        try:
            for info in self._file.infolist():
                if info.filename.endswith(".npy"):
                    self._take(info.filename.removesuffix(".npy"), info)
        except BaseException:
            self._file.close()
            raise
        kinds = {one.compress_type for one, _ in self._members.values()}
        self.encoded = "deflate" if kinds - {zipfile.ZIP_STORED} else ""
        self.starts = _starts({name: shape[0] for name, (_, (_, shape, _)) in self._members.items() if shape})

    def decode(self, name: str, piece: int) -> Array:
        """Return a slice of an array."""
        first, last = self.starts[piece : piece + 2]
        return self.whole(name)[first:last]

    def whole(self, name: str) -> Array:
        """Return an array."""
        if name not in self._arrays:
            self._arrays[name] = self._read(*self._members[name])
        return self._arrays[name]

    def close(self) -> None:
        """Close the file."""
        self._arrays.clear()
        self._file.close()

    def _take(self, name: str, info: zipfile.ZipInfo) -> None:
        if name in self._members:
            raise ConfigurationError(f"{self._path} has two arrays {name!r}; make it again")
        with self._file.open(info) as file:
            dtype, shape, fortran = array_header(file)
            begin = file.tell()
        declared = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and begin + declared != info.file_size:
            raise ConfigurationError(
                f"{self._path}: {name!r} declares {declared} bytes, but has {info.file_size - begin}; make "
                "the file again"
            )
        self.columns[name] = _column(shape, dtype)
        if info.compress_type != zipfile.ZIP_STORED and declared > _LARGEST:
            self.columns[name] = Column(
                refused=f"is compressed and has {declared / 2**30:.0f} GiB, which must be decoded whole"
            )
        self._members[name] = info, (dtype, shape, fortran)

    def _read(self, info: zipfile.ZipInfo, header: tuple[np.dtype[Any], tuple[int, ...], bool]) -> Array:
        dtype, shape, fortran = header
        if info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1:
            return _mapped(self._path, dtype, shape, fortran, self._begin(info))
        with self._file.open(info) as file:
            array_header(file)
            content = file.read()
        return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """Return where the numbers of a member begin in the file."""
        with readable_file(self._path) as file:
            file.seek(info.header_offset)
            local = file.read(30)
            if local[:4] != b"PK\x03\x04":
                raise ValueError(f"{info.filename!r} is not where the index says")
            name, extra = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
            file.seek(info.header_offset + 30 + name + extra)
            array_header(file)
            return file.tell()


def array_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Return type, shape and order of an array; it never unpickles."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file, max_header_size=_LONGEST)
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape is {shape}")
    return dtype, shape, fortran


def _mapped(path: str, dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool, at: int) -> Array:
    if dtype.hasobject:
        raise ConfigurationError(f"{path} holds Python objects, which could run code; save numbers only")
    size = math.prod(shape) * dtype.itemsize
    with readable_file(path) as file:
        there = file.seek(0, 2) - at
    if there < size:
        raise ConfigurationError(
            f"{path} is truncated: it declares {shape} of {dtype}, {size} bytes, and has {there}; copy or "
            "make it again"
        )
    order: Any = "F" if fortran else "C"
    if not size:
        return np.empty(shape, dtype, order)
    return np.memmap(path, dtype, "r", at, shape, order)


def _column(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Column:
    if not shape:
        return Column(refused="is one number, but needs a row for each sample")
    if dtype.hasobject:
        return Column(refused="holds Python objects")
    return Column(dtype, tuple(map(int, shape[1:])))


def _starts(lengths: Mapping[str, int]) -> list[int]:
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigurationError(
            f"it has arrays of unequal lengths: {listed}; each needs a row for each sample: make the file "
            "again"
        )
    length = next(iter(lengths.values()), 0)
    return [*range(0, length, _ROWS), length]
