"""HDF5 as a format of samples."""

from __future__ import annotations

import difflib
import math
import os
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.base._cores import usable_threads
from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.data._source import Array, Field
from nnlo_common.data.formats._format import (
    HOW,
    LARGEST_SAMPLE,
    NUMBERS,
    TEXT,
    FileInfo,
    OpenedFile,
    Ragged,
    shown,
)
from nnlo_common.data.formats._opened_files import open_file

__all__ = ["HDF5", "OpenHDF5", "check_sources", "inspect_file", "is_special", "names_of"]

# -- inspection of HDF5 files by metadata alone: datasets, shapes and defects --------------------------

# -- sources of virtual and external datasets: they must exist, be ordinary files, and not lead in a
# circle.

_DEEPEST = 16  # virtual datasets inside each other; as many as HDF5 follows links
_MOST_BLOCKS = 100_000  # sources of a pattern

#: A dataset under whatever name: device and number of its file, and its address there.
_Identity: TypeAlias = tuple[int, int, int]


def check_sources(path: str, dataset: Any, inside_of: tuple[_Identity, ...] = ()) -> set[str]:
    """Refuse data in missing files or datasets, for which HDF5 silently reads zeros, and data in itself.

    Args:
        path: of the file, for messages; the dataset may be in another one, behind a link.
        dataset: one of its datasets.
        inside_of: the virtual datasets that lead to it; reading a circle of them ends the process.

    Returns:
        the files that have its data.
    """
    file = dataset.file.filename
    found = {file, *(_checked(path, dataset, name) for name, _, _ in dataset.external or ())}
    if not dataset.is_virtual:
        return found
    here = _identity(dataset)
    if here in inside_of or len(inside_of) >= _DEEPEST:
        what = "its data in itself" if here in inside_of else f"over {_DEEPEST} sources inside each other"
        raise ConfigurationError(
            f"{path}: the virtual dataset {dataset.name} has {what}, which HDF5 cannot read; make it again"
        )
    chain = (*inside_of, here)
    for one in dataset.virtual_sources():
        for name, inside in _blocks(file, one.file_name, one.dset_name):
            if name == ".":
                found |= _check_sources_of(
                    dataset.file.get(inside), f"{inside!r} of this file", dataset, chain
                )
            else:
                with open_file(_checked(path, dataset, name)) as source:
                    found |= _check_sources_of(source.get(inside), f"{inside!r} of {name!r}", dataset, chain)
    return found


def _place(path: str, name: str) -> Path:
    """Return where HDF5 looks for a file that is named in `path`, until there is one.

    That is beside it, then where the program runs, then beside the file that it is a link to.
    """
    beside = Path(path).parent / name
    places = (beside, Path(name), Path(path).resolve().parent / name)
    return next((one for one in places if one.exists()), beside)


def is_special(path: str, name: str) -> bool:
    """Return whether the name in `path` leads to something that is not an ordinary file."""
    found = _place(path, name)
    return found.exists() and not found.is_file()


def _check_sources_of(found: Any, label: str, dataset: Any, inside_of: tuple[_Identity, ...]) -> set[str]:
    import h5py

    if not isinstance(found, h5py.Dataset):
        raise ConfigurationError(
            f"{dataset.file.filename}: {dataset.name} has its data in {label}, which does not exist; HDF5 "
            "would read zeros, so make one of the two files again"
        )
    return check_sources(found.file.filename, found, inside_of)


def _checked(path: str, dataset: Any, name: str) -> str:
    """Return the path of a file that has data of a dataset; refuse one that is missing, or is none."""
    file = dataset.file.filename
    if not (place := _place(file, name)).exists():
        raise ConfigurationError(
            f"{path}: {dataset.name} has its data in {name!r}, which does not exist; HDF5 would read zeros, "
            "so put that file there"
        )
    if is_special(file, name):
        raise ConfigurationError(
            f"{path}: {dataset.name} has its data in {name!r}, which is not an ordinary file; make it again"
        )
    return str(place)


def _blocks(path: str, name: str, inside: str) -> Iterator[tuple[str, str]]:
    """Yield the file and the dataset of a source; of a pattern with `%b` all that there are, from 0."""
    first = _block(name, 0), _block(inside, 0)
    if first == (_block(name, 1), _block(inside, 1)):
        yield first
        return
    for number in range(_MOST_BLOCKS):
        file, dataset = _block(name, number), _block(inside, number)
        place = Path(path) if file == "." else _place(path, file)
        if not place.exists():
            return
        with open_file(str(place)) as source:
            if dataset not in source:
                return
        yield file, dataset


def _block(pattern: str, number: int) -> str:
    """Return the name of a block of a source: `%b` is its number, `%%` a percent sign."""
    return "%".join(part.replace("%b", str(number)) for part in pattern.split("%%"))


def _identity(dataset: Any) -> _Identity:
    import h5py

    status, found = Path(dataset.file.filename).stat(), h5py.h5o.get_info(dataset.id)
    return status.st_dev, status.st_ino, found.addr


_MANY_ROWS = 1_000_000  # fewer may be zeros on purpose


def inspect_file(path: str, names: Sequence[str], locking: bool | None = None) -> FileInfo:
    """Inspect the datasets and groups of these names.

    Raises:
        ConfigurationError: the file cannot be opened, or lacks a usable dataset of one of the names.
    """
    try:
        return _inspect(path, names, locking)
    except NNLOError:
        raise
    except Exception as error:  # h5py raises any type of exception for damaged files
        raise ConfigurationError(
            f"{path} is damaged ({error}); check it with h5ls, and copy or make it again"
        ) from None


def _inspect(path: str, names: Sequence[str], locking: bool | None) -> FileInfo:
    with open_file(path, locking) as file:
        found: dict[str, Any] = {}
        groups: list[int | None] = []
        fields: list[Field] = []
        others: set[str] = set()
        for name in names:
            inside = dict(_datasets(file, path, name))
            groups.append(None if [*inside] == [_name_of(name)] else len(inside))
            fields += [_field(path, *one) for one in inside.items()]
            others |= set[str]().union(*(check_sources(path, one) for one in inside.values()))
            found |= inside
        datasets = [*found.values()]
        lengths = {name: int(one.shape[0]) for name, one in found.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ConfigurationError(
                f"{path} has datasets of unequal lengths: {listed}; each needs a row for each sample: make "
                "the file again, or name other datasets"
            )
        grain = max((one.chunks[0] for one in datasets if one.chunks), default=1)
        filters = {one.compression or "a filter" for one in datasets if one.chunks and _is_filtered(one)}
        return FileInfo(
            path=path,
            length=int(datasets[0].shape[0]),
            fields=tuple(fields),
            grain=grain,
            groups=tuple(groups),
            encoded=bool(filters),
            how=" and ".join(sorted(filters)),
            piece_bytes=min(
                (math.prod(one.chunks) * one.dtype.itemsize for one in datasets if one.chunks), default=0
            ),
            others=tuple(sorted(others - {path})),
        )


def _name_of(*names: str) -> str:
    """Return the name of a dataset in this file; its own is another one behind a link into another file."""
    return "/" + "/".join(part for name in names for part in name.split("/") if part)


def _datasets(file: Any, path: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the dataset of a name, or all datasets of its group, with their names in this file."""
    import h5py

    _check_links(file, path, name)
    try:
        found = file[name]
    except (KeyError, OSError, RuntimeError):
        raise ConfigurationError(f"{path} {_missing(file, name)}") from None
    if isinstance(found, h5py.Dataset):
        yield _name_of(name), found
        return
    if not isinstance(found, h5py.Group):
        raise ConfigurationError(
            f"{path}: {name!r} is a named type, without samples; name one of {_names(file)}"
        )
    if not len(found):
        raise ConfigurationError(f"{path}: the group {name!r} is empty; name one of {_names(file)}")
    for child in sorted(found):
        _check_links(found, path, child)
        inside = found.get(child)
        if not isinstance(inside, h5py.Dataset):
            what = "a broken link" if inside is None else "a group"
            raise ConfigurationError(
                f"{path}: in the group {name!r}, {child!r} is {what}; a group stands for several inputs or "
                f"outputs, so it may only have datasets. Name those you want, e.g. {[f'{name}/{child}/...']}"
            )
        yield _name_of(name, child), inside


def _check_links(group: Any, path: str, name: str) -> None:
    """Refuse links into anything but an ordinary file: HDF5 would wait for a pipe for ever."""
    import h5py

    parts = [part for part in name.split("/") if part]
    for count in range(1, len(parts) + 1):
        link = group.get("/".join(parts[:count]), getlink=True)
        if isinstance(link, h5py.ExternalLink) and is_special(path, link.filename):
            raise ConfigurationError(
                f"{path}: {name!r} is a link into {link.filename!r}, which is not an ordinary file; correct "
                "the link"
            )
        if link is None:
            return


def _missing(file: Any, name: str) -> str:
    """Return why a file lacks a name, and what to do."""
    import h5py

    link = None
    if name.strip("/") and name.strip("/").rpartition("/")[0] in ("", *file):
        link = file.get(name, getlink=True)
    if isinstance(link, h5py.HardLink):
        return f"has {name!r}, but it is damaged; check it with h5ls, and copy or make the file again"
    if isinstance(link, h5py.SoftLink):
        return f"has {name!r} as a link to {link.path!r}, which is missing or a circle; correct the link"
    if isinstance(link, h5py.ExternalLink):
        return (
            f"has {name!r} as a link to {link.path!r} in the file {link.filename!r}, which cannot be opened; "
            "put that file there"
        )
    near = difflib.get_close_matches(name, list(file), 1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"has no {name!r}; it has {_names(file)}.{meant} Name its datasets by {HOW}"


def names_of(path: str, locking: bool | None = None) -> list[str]:
    """Return the names at the top of a file."""
    with open_file(path, locking) as file:
        return list(file)


def _names(file: Any) -> str:
    """Return the names in a file as a short text."""
    return shown(list(file), "no datasets")


def _field(path: str, name: str, dataset: Any) -> Field:
    """Return shape and type of a dataset's samples; refuse data that cannot be trained on."""
    import h5py

    if dataset.shape is None or not dataset.shape:
        what = "has no data" if dataset.shape is None else "is one number"
        raise ConfigurationError(
            f"{path}: {name} {what}, but needs a row for each sample; name another dataset"
        )
    if 0 in dataset.shape[1:]:
        raise ConfigurationError(
            f"{path}: {name} has empty samples, of shape {dataset.shape[1:]}; name another dataset"
        )
    dtype = dataset.dtype
    if h5py.check_string_dtype(dtype) is not None:
        dtype = TEXT
    elif dtype.kind not in NUMBERS or dtype.itemsize > 8 or dtype.metadata:
        raise ConfigurationError(
            f"{path}: {name} has the type {_type(dtype)}, which cannot be trained on; make the file with "
            "float32 or an integer type, or name another dataset"
        )
    _check_size(path, dataset)
    _check_filters(path, dataset)
    return Field(name, tuple(map(int, dataset.shape[1:])), dtype.newbyteorder("="))


def _type(dtype: np.dtype[Any]) -> str:
    if dtype.kind == "O" or dtype.metadata:
        return f"{dtype} (texts, references, enumerations or rows of unequal length)"
    return str(dtype)


def _check_size(path: str, dataset: Any) -> None:
    """Refuse samples that no machine can hold, and rows that nobody has written."""
    sample = math.prod(map(int, dataset.shape[1:])) * dataset.dtype.itemsize
    if sample > LARGEST_SAMPLE:
        raise ConfigurationError(
            f"{path}: a sample of {dataset.name}, of shape {dataset.shape[1:]}, has {sample / 2**30:.0f} "
            f"GiB, more than {LARGEST_SAMPLE / 2**30:.0f}; are rows and columns exchanged? Make the file "
            "with a row for each sample"
        )
    elsewhere = dataset.is_virtual or dataset.external
    if dataset.shape[0] > _MANY_ROWS and not elsewhere and dataset.id.get_storage_size() == 0:
        raise ConfigurationError(
            f"{path}: {dataset.name} has {dataset.shape[0]} rows, but none was ever written; the program "
            "that made it has failed: make it again, or name another dataset"
        )


def _is_filtered(dataset: Any) -> bool:
    return bool(dataset.id.get_create_plist().get_nfilters())


def _check_filters(path: str, dataset: Any) -> None:
    """Refuse a dataset whose compression filter is not installed."""
    import h5py

    properties = dataset.id.get_create_plist()
    for index in range(properties.get_nfilters()):
        code, _, _, name = properties.get_filter(index)
        if not h5py.h5z.filter_avail(code):
            label = f" ({name.decode(errors='replace')})" if name else ""
            raise ConfigurationError(
                f"{path}: {dataset.name} is compressed with filter {code}{label}, which is not installed; "
                "`pip install hdf5plugin` and import it, or write the file with gzip"
            )


class HDF5:
    """Reads datasets of HDF5 files; a group stands for all datasets in it."""

    title, suffixes = "HDF5", (".h5", ".hdf5", ".hdf", ".he5", ".nc")
    begins = b"\x89HDF\r\n\x1a\n"
    remote = False

    def inspect(self, path: str, names: Sequence[str], locking: bool | None) -> FileInfo:
        """Inspect the datasets and groups of these names."""
        return inspect_file(path, names, locking)

    def open(self, path: str, locking: bool | None) -> OpenedFile:
        """Open a file."""
        return OpenHDF5(open_file(path, locking))

    def names(self, path: str, locking: bool | None) -> list[str]:
        """Return the names at the top of a file."""
        return names_of(path, locking)


class OpenHDF5:
    """An open HDF5 file.

    Args:
        file: of h5py.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._readers: dict[str, _PlainRows | _Chunks | _ByLibrary] = {}

    def read(self, name: str, first: int, last: int, out: Array) -> None:
        """Read a slice of a dataset."""
        reader = self._readers.get(name)
        if reader is None:
            dataset = self._file[name]
            reader = _PlainRows.of(dataset) or _Chunks.of(dataset) or _ByLibrary(dataset)
            self._readers[name] = reader
        reader.read(first, last, out)

    def ragged(self, name: str, first: int, last: int) -> Ragged:
        """Refuse: inspection has refused such datasets."""
        raise ConfigurationError(f"{name} has rows {first} to {last} of unequal length")

    def close(self) -> None:
        """Close it."""
        self._readers.clear()
        self._file.close()


class _ByLibrary:
    """A dataset that the library reads.

    Args:
        dataset: of h5py.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._rows = dataset, int(dataset.shape[0])
        self._dtype: np.dtype[Any] = dataset.dtype.newbyteorder("=")
        self._place: Any = None

    def read(self, first: int, last: int, out: Array) -> None:
        """Read a slice."""
        if out.dtype == TEXT:
            out[...] = self._dataset.asstr()[first:last]
        elif out.flags.c_contiguous and out.dtype == self._dtype:
            self._read_into(first, last, out)
        else:  # a column of an input that has several
            out[...] = self._dataset[first:last]

    def _read_into(self, first: int, last: int, out: Array) -> None:
        """Read a slice into an array of its type, by what `read_direct` does in the end.

        That takes longer for its preparations than the library for a block of 256 KB.
        """
        from h5py import h5s

        if last > self._rows:
            raise ValueError(f"it has {self._rows} rows")
        if self._place is None:
            self._place = self._dataset.id.get_space()
        self._place.select_hyperslab((first, *[0] * (out.ndim - 1)), out.shape)
        self._dataset.id.read(h5s.create_simple(out.shape), self._place, out)


# -- rows in one stretch of a file, without chunks and filters: the system copies them -------------------


class _PlainRows:
    """A dataset in one stretch of its file, in the type of this machine, read by the system.

    The library takes as long for its preparations as the system for a block of 256 KB. The file is not mapped
    into memory: a file system that fails then ends the process, and here raises an error.

    Args:
        dataset: of h5py; the descriptor is open while it is.
        descriptor: of the file, which the library closes.
        offset: of the first row in the file.
    """

    def __init__(self, dataset: Any, descriptor: int, offset: int) -> None:
        self._dataset, self._descriptor, self._offset = dataset, descriptor, offset
        self._dtype, self._rows = dataset.dtype, int(dataset.shape[0])
        self._row_bytes = math.prod(map(int, dataset.shape[1:])) * self._dtype.itemsize

    @classmethod
    def of(cls, dataset: Any) -> _PlainRows | None:
        """Return the rows of a dataset; None: they lie elsewhere, or another way."""
        file = dataset.file
        # What the library itself has written may still be in its memory.
        if file.driver != "sec2" or file.mode != "r" or not hasattr(os, "preadv"):
            return None
        if dataset.chunks or dataset.external or dataset.is_virtual or not _is_native(dataset):
            return None
        offset = dataset.id.get_offset()  # None: among the metadata, or never written
        if offset is None or dataset.id.get_storage_size() != dataset.size * dataset.dtype.itemsize:
            return None  # behind a user block, what was never written has an offset, too
        return cls(dataset, file.id.get_vfd_handle(), offset)

    def read(self, first: int, last: int, out: Array) -> None:
        """Read a slice.

        Raises:
            ValueError: the file ends before it.
        """
        if last > self._rows:
            raise ValueError(f"it has {self._rows} rows")
        alike = out.flags.c_contiguous and out.dtype == self._dtype
        found = out if alike else np.empty(out.shape, self._dtype)
        numbers, at = found.reshape(-1).view(np.uint8), self._offset + first * self._row_bytes
        done, size = 0, found.nbytes
        while done < size:  # the system may return less at once
            count = os.preadv(self._descriptor, [numbers[done:].data], at + done)
            if not count:
                raise ValueError(f"the file ends at byte {at + done}, in the middle of its rows")
            done += count
        if not alike:  # a column of an input that has several
            out[...] = found


# -- chunks of gzip, decoded by several threads: the library has one lock, and zlib has none -------------

_DEFLATE, _SHUFFLE = 1, 2  # numbers of HDF5's filters
# Of a chunk: of smaller ones handing them to a thread costs more than it saves; larger ones take much memory.
_SMALLEST_CHUNK, _LARGEST_CHUNK = 2**16, 2**26


class _Chunks:
    """The chunks of a dataset whose only filters are gzip and shuffle, in the type of this machine.

    Args:
        dataset: of h5py.
        filters: their numbers, in the order in which the file was written.
    """

    def __init__(self, dataset: Any, filters: Sequence[int]) -> None:
        self._dataset, self._filters, self._library = dataset, filters, _ByLibrary(dataset)
        self._shape, self._chunk, self._dtype = dataset.shape, dataset.chunks, dataset.dtype
        self._bytes = math.prod(self._chunk) * self._dtype.itemsize

    @classmethod
    def of(cls, dataset: Any) -> _Chunks | None:
        """Return the chunks of a dataset; None: the library must read it, or does so as fast."""
        if not dataset.chunks or dataset.is_virtual or not _is_native(dataset):
            return None
        properties, filters = dataset.id.get_create_plist(), list[int]()
        for index in range(properties.get_nfilters()):
            code, _, values, _ = properties.get_filter(index)
            if code == _SHUFFLE and list(values[:1]) != [dataset.dtype.itemsize]:
                return None
            filters.append(code)
        found = cls(dataset, filters)
        known = filters in ([_DEFLATE], [_SHUFFLE, _DEFLATE])
        return found if known and _SMALLEST_CHUNK <= found._bytes <= _LARGEST_CHUNK else None

    def read(self, first: int, last: int, out: Array) -> None:
        """Read a slice; chunks in part are left to the library, which may have them from the slice before."""
        begin, end = self._read_whole(first, last, out)
        if first < begin:
            self._library.read(first, begin, out[: begin - first])
        if end < last:
            self._library.read(end, last, out[end - first :])

    def _read_whole(self, first: int, last: int, out: Array) -> tuple[int, int]:
        """Read those rows of [first, last) whose chunks lie in it as a whole; return the first and the end.

        Raises:
            ConfigurationError: a chunk has more or fewer bytes than its shape.
        """
        threads, rows, size = usable_threads(), self._chunk[0], self._shape[0]
        if threads < 2 or last > size:
            return first, first
        begin, end = -(-first // rows) * rows, last if last == size else last // rows * rows
        places = self._places(begin, end)
        if len(places) < 2:
            return first, first
        pool, whole, under_way = _pool(os.getpid(), threads), True, deque[tuple[Future[bool], Array]]()
        try:
            for place in places:
                if len(under_way) <= 2 * threads:
                    buffer = np.empty(self._bytes + self._bytes // 64 + 1024, np.uint8)
                else:  # so many are in memory as they are in the file
                    before, buffer = under_way.popleft()
                    whole &= before.result()
                mask, raw = self._stored(place, buffer)
                target = out[(slice(place[0] - first, place[0] - first + rows), *self._beside(place))]
                under_way.append((pool.submit(self._decode, place[0], mask, raw, target), buffer))
        except (OSError, RuntimeError, ValueError, MemoryError):  # a chunk was never written, or is damaged
            whole = False
        finally:
            wait([one for one, _ in under_way])  # none of them fills the array later on
        whole = all(one.result() for one, _ in under_way) and whole
        return (begin, end) if whole else (first, first)

    def _stored(self, place: tuple[int, ...], buffer: Array) -> tuple[int, Any]:
        """Return which filters a chunk was written without, and its bytes; in a buffer, if it is as usual."""
        try:
            found: tuple[int, Any] = self._dataset.id.read_direct_chunk(place, out=buffer)
        except ValueError:  # it takes more than its numbers
            found = self._dataset.id.read_direct_chunk(place)
        return found

    def _places(self, begin: int, end: int) -> list[tuple[int, ...]]:
        """Return where the chunks of some rows begin."""
        across = [range(0, size, step) for size, step in zip(self._shape[1:], self._chunk[1:], strict=True)]
        return list(product(range(begin, end, self._chunk[0]), *across))

    def _beside(self, place: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the part of a row that a chunk has."""
        return tuple(slice(at, at + step) for at, step in zip(place[1:], self._chunk[1:], strict=True))

    def _decode(self, row: int, mask: int, raw: Any, out: Array) -> bool:
        """Decode a chunk into its place; return False if the library must tell what it is."""
        written = [code for index, code in enumerate(self._filters) if not mask >> index & 1]
        if _DEFLATE in written:
            inflate = zlib.decompressobj()
            try:
                raw = inflate.decompress(raw, self._bytes + 1)
            except zlib.error:
                return False
            if len(raw) <= self._bytes and not inflate.eof:
                return False
        if len(raw) != self._bytes:  # of a shorter one the library would return what was in memory before
            how = "more than" if len(raw) > self._bytes else f"{len(raw)} of"
            raise ConfigurationError(
                f"its chunk at row {row} has {how} the {self._bytes} bytes of its shape; the file is "
                "damaged: make it again"
            )
        alike = out.shape == self._chunk and out.dtype == self._dtype and out.flags.c_contiguous
        chunk = out if alike else np.empty(self._chunk, self._dtype)
        numbers, found = chunk.reshape(-1).view(np.uint8), np.frombuffer(raw, np.uint8)
        if _SHUFFLE in written:  # first the first bytes of all numbers, then the second ones
            size = self._dtype.itemsize
            for at, some in enumerate(found.reshape(size, -1)):
                numbers[at::size] = some
        else:
            numbers[...] = found
        if not alike:
            out[...] = chunk[tuple(map(slice, out.shape))]
        return True


def _is_native(dataset: Any) -> bool:
    """Return whether a dataset has numbers as this machine has them in memory."""
    import h5py

    if dataset.dtype.kind not in "iuf":
        return False
    return bool(dataset.id.get_type() == h5py.h5t.py_create(dataset.dtype.newbyteorder("=")))


@lru_cache(maxsize=1)
def _pool(process: int, threads: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process starts its own
    """Return the threads of a process that decode."""
    return ThreadPoolExecutor(threads, thread_name_prefix="nnlo decodes")
