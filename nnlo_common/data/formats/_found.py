"""The format of files, by their names, else by their first bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import readable_file
from nnlo_common.data._listing import without_tree
from nnlo_common.data._remote import check_protocols, importable, is_remote
from nnlo_common.data.formats._arrow import Arrow, Parquet
from nnlo_common.data.formats._format import Format
from nnlo_common.data.formats._hdf5 import HDF5
from nnlo_common.data.formats._numpy import NPY, NPZ
from nnlo_common.data.formats._objects import Objects
from nnlo_common.data.formats._root import ROOT
from nnlo_common.data.formats._webdataset import WebDataset
from nnlo_common.data.formats._zarr import Zarr

__all__ = ["FORMATS", "check_remote", "format_of", "listed_formats"]

#: Each format of files. HDF5 is that of a file of which nothing else is known.
FORMATS: Sequence[Format] = (HDF5(), Parquet(), Arrow(), ROOT(), Zarr(), NPY(), NPZ(), WebDataset())


def listed_formats() -> str:
    """Return the names of all formats, for a sentence.

    Example:
        >>> listed_formats().startswith("HDF5, Parquet")
        True
    """
    *titles, last = (one.title for one in FORMATS)
    return f"{', '.join(titles)} or {last}"


def format_of(files: Sequence[str] | Mapping[str, Any]) -> Format:
    """Return the format of some files, or of columns in memory.

    Raises:
        ConfigurationError: they have several.
    """
    if isinstance(files, Mapping):
        return Objects(files)
    kinds = {one.title: (one, path) for path, one in ((path, _named(path)) for path in files) if one}
    if len(kinds) > 1:
        (one, first), (other, second) = list(kinds.values())[:2]
        raise ConfigurationError(
            f"{first} is a {one.title} file and {second} a {other.title} file; name files of one format"
        )
    if kinds:
        return next(iter(kinds.values()))[0]
    beginning = b""
    with suppress(OSError, ValueError), readable_file(files[0]) as file:
        beginning = file.read(16)
    return next((one for one in FORMATS if one.begins and beginning.startswith(one.begins)), FORMATS[0])


def check_remote(files: Sequence[str], kind: Format | None = None) -> None:
    """Refuse remote names that nothing here opens, before any file is opened.

    Args:
        files: as `list_files` returns them.
        kind: their format; None: it follows from them.

    Raises:
        MissingExtraError: a package is not installed.
        ConfigurationError: no package is known that opens such names.
    """
    remote = [path for path in files if is_remote(path)]
    if not remote or not (kind := kind or format_of(files)).remote:
        return
    needs = getattr(kind, "needs", None)
    if needs is not None and not importable(needs[0]):
        raise MissingExtraError(f"reading {kind.title} files", *needs)
    known = set[str]()
    for path in remote:
        protocols = path.partition("://")[0]
        if protocols not in known:
            check_protocols(path, f"reading {path}")
            known.add(protocols)


def _named(path: str) -> Format | None:
    """Return the format that a name tells."""
    name = without_tree(path).rstrip("/").lower()
    return next((one for one in FORMATS if name.endswith(tuple(one.suffixes))), None)
