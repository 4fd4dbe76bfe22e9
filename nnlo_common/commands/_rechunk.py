"""`nnlo rechunk`: rewrite files with other chunks and another filter, and say how fast they read now."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from nnlo_common.base._arguments import whole_in
from nnlo_common.base._errors import ConfigurationError, MissingExtraError, NNLOError
from nnlo_common.base._file_access import usable, whole
from nnlo_common.commands.train._job import REFUSED, tell
from nnlo_common.data import FileSource, list_files
from nnlo_common.data._listing import without_tree
from nnlo_common.data.formats._found import check_remote, format_of
from nnlo_common.data.formats._hdf5 import HDF5
from nnlo_common.data.formats._opened_files import open_file

__all__ = ["FILTERS", "add_rechunk", "run_rechunk"]

# -- the command: rewrite each file with other chunks and another filter, and say how fast it reads now -

#: What each filter is for.
FILTERS = {
    "none": "read fastest",
    "lzf": "smaller, and decoded faster than gzip",
    "gzip": "smallest, and decoded slowest",
}
_CHUNK_BYTES = 2**19
_COPIED_BYTES = 2**24
_TRIED_BYTES = 2**27  # of the samples that are read to tell the pace


def run_rechunk(
    files: Sequence[str],
    to: str,
    *,
    names: Sequence[str] | None = None,
    rows: int | None = None,
    filter_: str = "none",
    pad: int | None = None,
) -> int:
    """Rewrite files, and return the exit status.

    Args:
        files: paths, patterns or list files; of any format.
        to: the folder of the new files, each with the name of its file and `.h5`.
        names: the columns to write; None: all of a file; of an HDF5 file also what is not numbers.
        rows: of a chunk; None: half a megabyte.
        filter_: one of `FILTERS`.
        pad: the length of rows of unequal length.
    """
    try:
        listed = list_files(files)
        check_remote(listed)
        whole_files = [one for one in listed if names is None and isinstance(format_of([one]), HDF5)]
        if rows is not None and filter_ == "none":
            raise ConfigurationError(
                f"--rows {rows} with --filter none: without a filter there are no chunks; leave --rows out, "
                "or give --filter lzf or gzip"
            )
        if pad is not None and whole_files:
            raise ConfigurationError(
                f"--pad {pad} with the HDF5 file {whole_files[0]}: without --names it is copied as it is; "
                "add --names, or leave --pad out"
            )
        for target, path in _targets(listed, Path(to)).items():
            storage = _ChunkLayout(rows, filter_)
            with whole(usable("--to", target)) as fresh:
                if path in whole_files:
                    tried = _copy_all(path, fresh, storage)
                else:
                    tried = _copy_columns(path, fresh, storage, names, pad)
            _tell(path, tried, target, pad)
    except (ConfigurationError, MissingExtraError) as error:
        tell(str(error), "rechunk")
        return REFUSED
    return 0


def _targets(paths: Sequence[str], folder: Path) -> dict[Path, str]:
    """Return the new files, with what each is made of."""
    found: dict[Path, str] = {}
    for path in paths:
        target = folder / f"{Path(without_tree(path)).stem}.h5"
        if target.exists():
            raise ConfigurationError(f"{target} is there already; name another folder by --to, or remove it")
        if target in found:
            raise ConfigurationError(
                f"{found[target]} and {path} would both become {target}; rewrite them one after the other, "
                "each with another --to"
            )
        found[target] = path
    return found


class _ChunkLayout(NamedTuple):
    """How datasets are stored.

    Attributes:
        rows: of a chunk; None: half a megabyte.
        filter: one of `FILTERS`.
    """

    rows: int | None
    filter: str

    def dataset(self, group: Any, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Make a dataset."""
        if self.filter == "none":
            return group.create_dataset(name, shape, dtype)  # without chunks: a slice is one read
        row_bytes = max(math.prod(shape[1:]) * dtype.itemsize, 1)
        chunk = min(max(self.rows or _CHUNK_BYTES // row_bytes, 1), max(shape[0], 1))
        options = {"compression": self.filter, "shuffle": True, "chunks": (chunk, *shape[1:])}
        return group.create_dataset(name, shape, dtype, **options)


def _copy_all(path: str, fresh: Path, storage: _ChunkLayout) -> list[str]:
    """Copy an HDF5 file with all that is in it; return the names of the datasets that have got new chunks."""
    import h5py

    rewritten: list[str] = []

    def visit(group: Any, into: Any) -> None:
        for key, value in group.attrs.items():
            into.attrs[key] = value
        for name in group:
            link = group.get(name, getlink=True)
            one = group[name] if isinstance(link, h5py.HardLink) else None
            if isinstance(one, h5py.Group):
                visit(one, into.create_group(name))
            elif (
                isinstance(one, h5py.Dataset)
                and one.shape
                and one.dtype.kind in "biuf"
                and 0 not in one.shape
            ):
                made = storage.dataset(into, name, one.shape, one.dtype)
                _copy_rows(one, made)
                for key, value in one.attrs.items():
                    made.attrs[key] = value
                rewritten.append(one.name)
            elif one is None:
                into[name] = link
            else:  # texts, or numbers without rows
                group.copy(name, into)

    with open_file(path) as source, h5py.File(fresh, "w") as target:
        try:
            visit(source, target)
        except NNLOError:
            raise
        except Exception as error:  # h5py raises any type of exception for damaged files
            raise ConfigurationError(f"{path} cannot be copied ({error}); check it with h5ls") from None
    if not rewritten:
        raise ConfigurationError(f"{path} has no datasets of numbers, so there is nothing to rewrite")
    return rewritten


def _copy_columns(
    path: str, fresh: Path, storage: _ChunkLayout, names: Sequence[str] | None, pad: int | None
) -> list[str]:
    """Write columns of a file of any format; return their names."""
    kind = format_of([path])
    wanted = list(dict.fromkeys(names or ())) or _usable(path, kind.names(path, None), pad)
    with closing(FileSource(path, features=wanted, pad=pad, cache="none")) as source:
        try:
            _write_columns(source, fresh, storage)
        except NNLOError:
            raise
        except Exception as error:  # h5py raises any type of exception for names, sizes and full disks
            raise ConfigurationError(
                f"{path} cannot be written as HDF5 ({error}); choose other columns by --names, or make room "
                "on that disk"
            ) from None
    return wanted


def _write_columns(source: FileSource, fresh: Path, storage: _ChunkLayout) -> None:
    import h5py

    with h5py.File(fresh, "w") as target:
        size = len(source)
        made = [
            storage.dataset(target, field.name, (size, *field.shape), field.dtype) for field in source.fields
        ]
        row_bytes = max(sum(field.row_bytes for field in source.fields), 1)
        step = -(-max(_COPIED_BYTES // row_bytes, 1) // source.grain) * source.grain
        for start in range(0, size, step):
            stop = min(start + step, size)
            arrays = [field.empty(stop - start) for field in source.fields]
            source.read(start, stop, arrays)
            for one, array in zip(made, arrays, strict=True):
                one[start:stop] = array


def _usable(path: str, names: Sequence[str], pad: int | None) -> list[str]:
    """Return the columns that have numbers."""
    found = []
    for name in names:
        try:
            FileSource(path, features=[name], pad=pad, cache="none").close()
        except ConfigurationError as error:
            tell(f"left out: {error}", "rechunk")
        else:
            found.append(name)
    if not found:
        raise ConfigurationError(f"{path} has no columns of numbers, so there is nothing to write")
    return found


def _copy_rows(source: Any, target: Any) -> None:
    chunk = source.chunks[0] if source.chunks else 1
    row_bytes = max(source.dtype.itemsize * source.size // source.shape[0], 1)
    step = -(-max(_COPIED_BYTES // row_bytes, 1) // chunk) * chunk
    for start in range(0, source.shape[0], step):
        target[start : start + step] = source[start : start + step]


def _tell(path: str, names: Sequence[str], target: Path, pad: int | None) -> None:
    before, after = _pace(path, names, pad), _pace(str(target), names)
    sizes = [f"{_bytes(Path(without_tree(one))) / 1e6:.1f} MB" for one in (path, str(target))]
    print(
        f"nnlo rechunk: {path} ({sizes[0]}, reads {before:.0f} MB/s) is now {target} ({sizes[1]}, reads "
        f"{after:.0f} MB/s)",
        flush=True,
    )


def _bytes(path: Path) -> int:
    """Return the size of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in (path, *path.rglob("*")) if one.is_file())


def _pace(path: str, names: Sequence[str], pad: int | None = None) -> float:
    """Return how fast the numbers of a file are read, in MB of numbers each second."""
    try:
        with closing(FileSource(path, features=list(names), pad=pad, cache="none")) as source:
            row_bytes = max(sum(field.row_bytes for field in source.fields), 1)
            rows, step = min(len(source), _TRIED_BYTES // row_bytes + 1), max(_COPIED_BYTES // row_bytes, 1)
            begun_s = time.perf_counter()
            for start in range(0, rows, step):
                source.take(start, min(start + step, rows))
            return rows * row_bytes / 1e6 / max(time.perf_counter() - begun_s, 1e-9)
    except ConfigurationError:  # e.g. datasets of unequal lengths
        return float("nan")


# -- flags of `nnlo rechunk` ----------------------------------------------------------------------------


def add_rechunk(commands: Any) -> None:
    """Add the command to the parser's commands."""
    one = commands.add_parser(
        "rechunk",
        help="rewrite files of samples, of any format, as HDF5 files that read fast",
        description="Rewrite files of samples as HDF5 files that read fast: HDF5 with other chunks or "
        "another filter, with all that is in them; other formats with their columns of numbers. It says "
        "how fast each file reads before and after.",
    )
    one.add_argument("files", nargs="+", metavar="FILE", help="paths, patterns or list files")
    one.add_argument("--to", required=True, metavar="FOLDER", help="the folder of the new files")
    one.add_argument("--names", nargs="+", metavar="NAME", help="write these columns only")
    one.add_argument(
        "--rows", type=_positive, metavar="N", help="samples in a compressed chunk; else half a megabyte"
    )
    filters = "; ".join(f"{name}: {what}" for name, what in FILTERS.items())
    one.add_argument("--filter", dest="filter_", choices=FILTERS, default="none", help=f"{filters} (none)")
    one.add_argument(
        "--pad",
        type=_positive,
        metavar="N",
        help="bring rows of unequal length to this length, of HDF5 with --names",
    )


def _positive(text: str) -> int:
    """Return a whole number above 0."""
    number = whole_in(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number above 0")
    return number
