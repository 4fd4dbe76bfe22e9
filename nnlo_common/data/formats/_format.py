"""Format of files with samples: what its reader gives, and what all of them share."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.data._source import Array, Field

__all__ = [
    "FileInfo",
    "Format",
    "HOW",
    "LARGEST_SAMPLE",
    "NUMBERS",
    "OpenFiles",
    "OpenedFile",
    "Ragged",
    "TEXT",
    "TEXTS",
    "as_configuration",
    "error_numbers",
    "inspect_files",
    "joined_bounds",
    "shown",
    "wrong_path",
]

#: The arguments, and the flags of `nnlo train`, that name columns.
HOW = "features= and labels= (--features-name and --labels-name)"
#: The kinds of NumPy's types that can be trained on.
NUMBERS = "biuf"
#: The kinds of NumPy's types that hold texts, and what is read of them; they become indices by a vocabulary.
TEXTS, TEXT = "OSTU", np.dtype(object)
LARGEST_SAMPLE = 16 * 2**30
_SHOWN = 8  # names in a message
_REPORTED = 3  # bad files in a message
_MOST_PROBLEMS = 1000  # bad files, after which inspection stops
# Files that stay open: each has caches of about a megabyte.
_KEPT = 16


class Ragged(NamedTuple):
    """Rows of unequal length.

    Attributes:
        content: the entries of all rows, one after the other.
        counts: the number of entries of each row.
    """

    content: Array
    counts: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The requested columns of a file.

    Attributes:
        path: of the file.
        length: the number of samples.
        fields: one for each column, with its full name; those of a group in alphabetical order. The shape of
            a ragged column is that of one entry. The type of texts is `TEXT`.
        grain: the rows that are stored together, e.g. in a chunk; 1: any.
        groups: for each requested name, the number of columns in that group; None for a column.
        encoded: whether reading costs more than copying: they are compressed, for instance.
        ragged: the names of the columns with rows of unequal length.
        how: of what the encoding consists, for advice.
        piece_bytes: of the smallest piece that is decoded by itself; 0: any.
        others: further files that its samples are in.
    """

    path: str
    length: int
    fields: tuple[Field, ...]
    grain: int
    groups: tuple[int | None, ...]
    encoded: bool = False
    ragged: frozenset[str] = frozenset()
    how: str = ""
    piece_bytes: int = 0
    others: tuple[str, ...] = ()


class OpenedFile(Protocol):
    """An open file; one thread at a time uses it.

    It may also have `bounds` and `whole`: see `Table`.
    """

    def read(self, name: str, first: int, last: int, out: Array) -> None:
        """Read the rows [first, last) of a column into an array of that length."""

    def ragged(self, name: str, first: int, last: int) -> Ragged:
        """Return the rows [first, last) of a ragged column."""

    def close(self) -> None:
        """Close it."""


class Format(Protocol):
    """A way to store samples."""

    @property
    def title(self) -> str:
        """Its name, for messages."""

    @property
    def suffixes(self) -> Sequence[str]:
        """The ends of its files' names."""

    @property
    def begins(self) -> bytes:
        """How its files begin, if their names do not tell; empty: in no one way."""

    @property
    def remote(self) -> bool:
        """Whether its library opens names with ``://``."""

    def inspect(self, path: str, names: Sequence[str], locking: bool | None) -> FileInfo:
        """Return what is known of these columns without reading samples.

        Raises:
            ConfigurationError: the file cannot be opened, or lacks a usable column of one of the names.
        """

    def open(self, path: str, locking: bool | None) -> OpenedFile:
        """Open a file.

        Raises:
            ConfigurationError: it cannot be opened.
        """

    def names(self, path: str, locking: bool | None) -> list[str]:
        """Return the names that a file has."""


def inspect_files(
    kind: Format,
    paths: Sequence[str],
    names: Sequence[str],
    locking: bool | None = None,
    coded: Collection[str] | None = (),
) -> list[FileInfo]:
    """Inspect all files; they must be alike.

    Args:
        kind: their format.
        paths: of the files.
        names: of columns.
        locking: as in `FileSource`.
        coded: the columns that may have texts, as these become indices; None: all may.

    Raises:
        ConfigurationError: a file is unusable or unlike the first; the message describes the first few.
    """
    infos: list[FileInfo] = []
    problems: list[str] = []
    for path in paths:
        try:
            found = kind.inspect(path, names, locking)
            if coded is not None:
                _refuse_texts(found, coded)
            if infos:
                _compare(infos[0], found)
            infos.append(found)
        except ConfigurationError as error:
            problems.append(str(error))
            if len(problems) == _MOST_PROBLEMS:
                break
    if problems:
        more = len(problems) - _REPORTED
        least = "at least " if len(problems) == _MOST_PROBLEMS else ""
        listed = [
            *problems[:_REPORTED],
            *([f"and {least}{more} more of {len(paths)} files"] if more > 0 else []),
        ]
        raise ConfigurationError("\n".join(listed))
    if not sum(one.length for one in infos):
        raise ConfigurationError(
            f"{paths[0]}{f' and all other {len(paths) - 1} files' if len(paths) > 1 else ''} have no samples "
            f"in {', '.join(names)}; give files with samples"
        )
    return infos


def _refuse_texts(info: FileInfo, coded: Collection[str]) -> None:
    """Refuse columns of texts, unless a vocabulary turns them into indices."""
    for field in info.fields:
        if field.dtype == TEXT and field.name.strip("/") not in coded:
            raise ConfigurationError(
                f"{info.path}: {field.name} has the type object (texts), which cannot be trained on; make "
                "the file with float32 or an integer type, name another column, or name it in vocabulary= "
                "(--vocabulary) if its texts are categories"
            )


def _compare(first: FileInfo, other: FileInfo) -> None:
    """Refuse a file whose columns differ from those of the first."""
    for mine, theirs in zip(first.fields, other.fields, strict=False):
        if mine != theirs:
            raise ConfigurationError(
                f"{other.path}: {theirs.name} has samples of {theirs.shape} {theirs.dtype}, but "
                f"{mine.name} in {first.path} has {mine.shape} {mine.dtype}; make all files alike"
            )
    if first.ragged != other.ragged:
        name = min(first.ragged ^ other.ragged)
        ways = ["of unequal length" if name in one.ragged else "alike" for one in (other, first)]
        raise ConfigurationError(
            f"{other.path}: the rows of {name} are {ways[0]}, but {ways[1]} in {first.path}; make all files "
            "alike"
        )
    if first.groups != other.groups:
        names = [[field.name for field in one.fields] for one in (other, first)]
        raise ConfigurationError(
            f"{other.path} has {names[0]}, but {first.path} has {names[1]}; make all files alike"
        )


def shown(names: Sequence[str], none: str = "no columns") -> str:
    """Return the names in a file as a short text."""
    if not names:
        return none
    text = ", ".join(map(repr, names[:_SHOWN]))
    return text + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def wrong_path(path: str, one: str, suffix: str) -> str:
    """Return why there is no file to open, and what to do.

    Args:
        path: that was named.
        one: e.g. "an HDF5 file".
        suffix: of such files.
    """
    if "://" in path:
        return "is not on this machine; pass stage_to= and copy_command= to fetch it"
    try:
        mode = Path(path).lstat().st_mode
    except PermissionError:
        return "is in a folder that you may not enter (no permission); ask its owner for access (chmod a+x)"
    except OSError:
        return "does not exist on this host; correct the path, or make the file first"
    if Path(path).is_dir():
        return f"is a folder; name its files, e.g. {str(Path(path, f'*{suffix}'))!r}"
    if stat.S_ISLNK(mode):
        return f"is a link to {Path(path).readlink()}, which is not a file; correct the link"
    return f"is not an ordinary file; give the path of {one}"


def joined_bounds(parts: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """Return the least and the largest number of all parts; None: there are none, or it is unknown of one.

    Example:
        >>> joined_bounds([(1, 4), (0, 2)]), joined_bounds([(1, 4), None])
        ((0, 4), None)
    """
    found = list(parts)
    known = [one for one in found if one is not None]
    if not found or len(known) < len(found):
        return None
    return min(least for least, _ in known), max(largest for _, largest in known)


_ERRNO = re.compile(r"errno = (\d+)")


def error_numbers(error: OSError) -> set[int | None]:
    """Return the numbers of an error of the system; HDF5 may have its number in the text only."""
    return {error.errno, *map(int, _ERRNO.findall(str(error)))}


class OpenFiles:
    """Keeps the most recently read files open; a forked process opens its own.

    Args:
        opened: opens a file.
    """

    def __init__(self, opened: Callable[[str], OpenedFile]) -> None:
        self._opened = opened
        self._begin()

    def lock(self) -> threading.RLock:
        """Return the lock to hold while using a file, so that no other thread closes it."""
        if self._pid != os.getpid():
            self._begin()  # forked: the open files, and the thread that may hold the lock, are the parent's
        return self._lock

    def get(self, path: str) -> OpenedFile:
        """Return the file at `path`, open; the caller holds the lock."""
        file = self._files.pop(path, None) or self._opened(path)
        self._files[path] = file
        if len(self._files) > _KEPT:
            self._files.popitem(last=False)[1].close()
        return file

    def forget(self, path: str) -> None:
        """Close the file at `path`, which is not to be used any more."""
        with self.lock():
            file = self._files.pop(path, None)
            if file is not None:
                with suppress(OSError, RuntimeError):  # as its file system has failed
                    file.close()

    def close(self) -> None:
        """Close all files."""
        with self.lock():
            while self._files:
                self._files.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_opened": self._opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._opened = state["_opened"]
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._files: OrderedDict[str, OpenedFile] = OrderedDict()


def as_configuration(path: str, error: Exception) -> NNLOError:
    """Return the error about a damaged file."""
    if isinstance(error, NNLOError):
        return error
    text = " ".join(str(error).split())[:200] or type(error).__name__
    return ConfigurationError(f"{path} is damaged ({text}); copy or make it again")
