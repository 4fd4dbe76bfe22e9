"""Parquet and Arrow files, by pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import readable_file
from nnlo_common.data._remote import is_remote, open_remote
from nnlo_common.data.formats._format import TEXT, Ragged
from nnlo_common.data.formats._parquet_footer import Footer
from nnlo_common.data.formats._table import Column, Piece, TableFormat

__all__ = ["Arrow", "Parquet"]

# Limits of what the metadata of a file may take; pyarrow's own are higher.
_LARGEST_METADATA = 10**8
_DEEPEST = 8  # fixed-size lists inside each other


class Parquet(TableFormat):
    """Reads columns of Parquet files, a row group at a time."""

    title, suffixes, one = "Parquet", (".parquet", ".pq", ".parq"), "a Parquet file"
    begins, remote = b"PAR1", True
    needs = ("pyarrow", "parquet")

    def table(self, path: str) -> _ParquetTable:
        """Open a file."""
        return _ParquetTable(path)


class Arrow(TableFormat):
    """Reads columns of Arrow's IPC files, also called Feather, a record batch at a time."""

    title, suffixes, one = "Arrow", (".arrow", ".feather", ".ipc"), "an Arrow file"
    begins, remote = b"ARROW1", True
    needs = ("pyarrow", "parquet")

    def table(self, path: str) -> _ArrowTable:
        """Open a file."""
        return _ArrowTable(path)


class _ParquetTable:
    """An open Parquet file.

    Args:
        path: of the file.
    """

    groups: Mapping[str, Sequence[str]] = {}

    def __init__(self, path: str) -> None:
        import pyarrow.parquet as pq

        limits = {
            "thrift_string_size_limit": _LARGEST_METADATA,
            "thrift_container_size_limit": _LARGEST_METADATA // 100,
        }
        self._path, self._remote = path, open_remote(path) if is_remote(path) else None
        source = path if self._remote is None else self._remote
        self._file = pq.ParquetFile(source, page_checksum_verification=True, **limits)
        metadata = self._file.metadata
        rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        if any(count < 0 for count in rows):
            raise ConfigurationError(f"{path} is damaged: a row group has {min(rows)} rows; make it again")
        self.starts = [0, *accumulate(rows)]
        self.columns = {field.name: _column(field.type) for field in self._file.schema_arrow}

    @cached_property
    def _footer(self) -> Footer:
        with readable_file(self._path) if self._remote is None else nullcontext(self._remote) as file:
            return Footer(file, self._path, _LARGEST_METADATA)

    @cached_property
    def encoded(self) -> str:
        """How it is compressed."""
        codec = self._footer.codec
        return f"Parquet, {codec}" if codec else "Parquet"

    def decode(self, name: str, piece: int) -> Piece:
        """Return one column of one row group."""
        found = self._file.read_row_group(piece, columns=[name]).column(0)
        return _numbers(found.combine_chunks() if found.num_chunks != 1 else found.chunk(0))

    def bounds(self, name: str, piece: int) -> tuple[float, float] | None:
        """Return the least and the largest number of a column in a row group, from the file's statistics."""
        dtype = self.columns[name].dtype
        return None if dtype is None else self._footer.bounds(name, piece, dtype)

    def close(self) -> None:
        """Close the file."""
        self._file.close(force=True)


class _ArrowTable:
    """An open Arrow file.

    Args:
        path: of the file.
    """

    groups: Mapping[str, Sequence[str]] = {}

    def __init__(self, path: str) -> None:
        import pyarrow as pa

        self._source = pa.memory_map(path) if not is_remote(path) else open_remote(path)
        self._file = pa.ipc.open_file(self._source)
        rows = [self._batch(index).num_rows for index in range(self._file.num_record_batches)]
        self.starts = [0, *accumulate(rows)]
        self.columns = {field.name: _column(field.type) for field in self._file.schema}
        # An uncompressed batch is where the file is mapped, and takes no memory.
        before = pa.total_allocated_bytes()
        first = self._batch(0) if rows else None
        self.encoded = "Arrow, compressed" if first and pa.total_allocated_bytes() > before else ""

    def decode(self, name: str, piece: int) -> Piece:
        """Return one column of one record batch."""
        return _numbers(self._batch(piece).column(name))

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def _batch(self, index: int) -> Any:
        batch = self._file.get_batch(index)
        batch.validate()  # offsets and sizes lie within what is there
        return batch


def _column(kind: Any) -> Column:
    """Return what a type of Arrow means here."""
    import pyarrow as pa

    shape: list[int] = []
    ragged, kind = False, _stored(kind)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        ragged, kind = True, _stored(kind.value_type)
    while pa.types.is_fixed_size_list(kind) and len(shape) < _DEEPEST:
        shape.append(kind.list_size)
        kind = _stored(kind.value_type)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        # Not by `to_pandas_dtype`, for which older versions of pyarrow need pandas.
        return Column(pa.array([], kind).to_numpy(zero_copy_only=False).dtype, tuple(shape), ragged)
    if _is_text(kind.value_type if pa.types.is_dictionary(kind) else kind):
        return Column(TEXT, tuple(shape), ragged)
    return Column(refused=f"has the type {kind}")


def _stored(kind: Any) -> Any:
    """Return the type that an extension, such as Awkward's, is stored as."""
    import pyarrow as pa

    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _texts(array: Any) -> Any:
    """Return the texts of a column; equal ones are one object."""
    import pyarrow as pa

    if not pa.types.is_dictionary(array.type):
        array = array.dictionary_encode()
    known = np.array([*array.dictionary.to_pylist(), None], object)
    places = array.indices.to_numpy(zero_copy_only=False)
    if len(places) and not 0 <= places.min() <= places.max() < len(known) - 1:
        raise ValueError("an index is beyond its dictionary")
    return known[places]


def _numbers(array: Any) -> Piece:
    """Return the numbers or texts of a column; missing numbers are NaN, where there is NaN."""
    import pyarrow as pa

    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _refuse_missing(array)
        counts = np.diff(array.offsets.to_numpy(zero_copy_only=False).astype(np.int64))
        content = _numbers(array.flatten())
        assert not isinstance(content, Ragged)  # inspection has refused lists of lists
        return Ragged(content, counts)
    if pa.types.is_fixed_size_list(kind):
        _refuse_missing(array)
        content = _numbers(array.flatten())
        assert not isinstance(content, Ragged)  # inspection has refused it
        return content.reshape((len(array), kind.list_size, *content.shape[1:]))
    if not pa.types.is_floating(kind):
        _refuse_missing(array)
    if pa.types.is_dictionary(kind) or _is_text(kind):
        return np.asarray(_texts(array))
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _refuse_missing(array: Any) -> None:
    if array.null_count:
        import pyarrow.compute as pc

        first = pc.index(pc.is_null(array), value=True).as_py()
        raise ConfigurationError(
            f"{array.null_count} of its values are missing (null), the first of them {first} after the "
            f"beginning of these rows; fill or drop them (select=), where {array.type} has no NaN"
        )
