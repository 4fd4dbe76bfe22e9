"""Lists of files: resolve one to the same files, in the same order, on every rank."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Files", "list_files", "refuse_one_twice"]

Files: TypeAlias = str | Path | Iterable[str | Path]

_LISTS = (".txt", ".list", ".lst")
_PATTERN = frozenset("*?[")
_LONGEST = 4096  # characters of a path, as Linux has it
_SHOWN = 200  # of those that are none


def list_files(files: Files) -> tuple[str, ...]:
    """Return the paths that are meant, sorted, each once; whether there are such files is not asked here.

    Args:
        files: the path of one file; a pattern such as ``"run/*.h5"``, in which ``**`` stands for any folders;
            the path of a list file (.txt, .list or .lst), which has such an entry in each line, relative to
            its own folder, besides blank lines and comments (``#``); or several of these. What has a ``://``
            in it is left as it is, for a copy command.

    Raises:
        ConfigurationError: it means no file, or one of them twice; or a list file cannot be read.

    Example:
        >>> list_files(["/data/b.h5", "/data/more/../a.h5"])
        ('/data/a.h5', '/data/b.h5')
    """
    several = isinstance(files, Iterable) and not isinstance(files, str | bytes)
    entries: Sequence[str | Path] = list(files) if several else [files]  # type: ignore[arg-type, list-item]
    if wrong := [entry for entry in entries if not isinstance(entry, str | Path) or not str(entry).strip()]:
        raise ConfigurationError(
            f"files has {wrong[0]!r} in it, which is no path; give paths, patterns or list files"
        )
    found = sorted(path for entry in entries for path in _expand(str(entry)))
    if not found:
        raise ConfigurationError(f"files={files!r} names no file; give at least one path, or a pattern")
    twice = [path for path, count in Counter(found).items() if count > 1]
    if twice:
        raise ConfigurationError(
            f"{twice[0]} is listed twice{_others(len(twice))}, so its samples would count twice; list each "
            "file once"
        )
    return tuple(found)


def refuse_one_twice(paths: Iterable[str]) -> None:
    """Refuse one file under two names, as a pattern finds it that goes through a link to a folder."""
    known: dict[tuple[int, int], str] = {}
    for path in paths:
        with suppress(OSError):  # whether it is there is not asked here
            status = os.stat(path)  # noqa: PTH116 - there may be a million
            first = known.setdefault((status.st_dev, status.st_ino), path)
            if first != path and stat.S_ISREG(status.st_mode):
                raise ConfigurationError(
                    f"{path} and {first} are one file, by a link, so its samples would count twice; name one "
                    "of them only"
                )


def _others(count: int) -> str:
    return f", as are {count - 1} others" if count > 1 else ""


def _expand(entry: str) -> list[str]:
    if entry.endswith(_LISTS) and "://" not in entry:
        return _lines(Path(entry))
    return _matching(entry, f"files={entry!r}")


def _matching(entry: str, where: str) -> list[str]:
    if "://" in entry:
        return [entry]
    if len(entry) > _LONGEST or "\0" in entry:
        zeros = " and zeros in it" if "\0" in entry else ""
        raise ConfigurationError(
            f"{where[:_SHOWN]} is no path: it has {len(entry)} characters{zeros}; give the path of a file"
        )
    try:
        # On texts, as there may be a million of them; abspath takes ".." away, too.
        path = os.path.abspath(str(Path(entry).expanduser()) if entry.startswith("~") else entry)  # noqa: PTH100
    except RuntimeError as error:
        raise ConfigurationError(f"{where} has no such folder ({error}); write the whole path") from None
    if not _PATTERN & set(path) or os.path.lexists(path):
        return [path]
    matches = glob.glob(path, recursive=True)  # noqa: PTH207 - which takes absolute patterns, too
    if not matches:
        raise ConfigurationError(
            f"{where} matches nothing: no such file as {path}; mend the pattern, or make the files first"
        )
    return matches


def _lines(path: Path) -> list[str]:
    """The entries of a list file."""
    try:
        path = path.expanduser()
        text = None if path.exists() and not path.is_file() else path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"the list file {path} cannot be read ({error.strerror}); write a path into each line of it"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the list file {path} is no text; give a text file with a path in each line, in UTF-8, or "
            "rename what has data in it to end in .h5"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the list file {path} cannot be found ({error}); write its path") from None
    if text is None:  # a pipe would hang
        raise ConfigurationError(
            f"the list file {path} cannot be read: it is no ordinary file; write a path into each line of one"
        )
    lines = text.splitlines()
    found, folder = list[str](), str(path.parent)
    for number, line in enumerate(lines, 1):
        entry = line.split("#", 1)[0].strip()
        if entry:
            # Within its folder: what is absolute, or remote, stays as it is.
            entry = entry if "://" in entry or entry.startswith("~") else os.path.join(folder, entry)  # noqa: PTH118
            found += _matching(entry, f"{path}, line {number}: {line.strip()!r}")
    if not found:
        raise ConfigurationError(f"the list file {path} names no file; write a path into each line")
    return found
