"""Lists of files, resolved to the same paths in the same order on every rank."""

from __future__ import annotations

import glob
import os
import re
import stat
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.data._remote import is_remote, is_remote_pattern, remote_matches, remote_state

__all__ = ["Files", "list_files", "refuse_duplicates", "state_of", "with_tree", "without_tree"]

Files: TypeAlias = str | Path | Iterable[str | Path]

_LISTS = (".txt", ".list", ".lst")
_TREE = re.compile(r"(.*\.root):([^/:][^:]*)", re.DOTALL)
_PATTERN = frozenset("*?[")
_LONGEST = 4096  # characters in a path, on Linux
_MOST_FOLDERS = 100_000
_LARGEST = 1_000_000_000  # bytes of a list file
_SHOWN = 200  # characters of an invalid path in a message


def list_files(files: Files) -> tuple[str, ...]:
    """Return the absolute paths of `files`, sorted, each once; do not check that the files exist.

    Args:
        files: the path of one file; a pattern such as ``"run/*.h5"``, in which ``**`` matches any folders;
            the path of a list file (.txt, .list or .lst), with one path or pattern in each line, relative to
            the list's folder, besides blank lines and comments (``#``); or several of these. The tree of a
            ROOT file may follow it: ``"run/*.root:events"``. An entry with ``://`` stays unchanged, for a
            copy command or a library that opens it; the library lists what a pattern of them matches.

    Raises:
        ConfigurationError: no file is named, or one is named twice; a list file cannot be read; or a pattern
            matches nothing.
        MissingExtraError: the package that lists remote files is not installed.

    Example:
        >>> list_files(["/data/b.h5", "/data/more/../a.h5"])
        ('/data/a.h5', '/data/b.h5')
    """
    several = isinstance(files, Iterable) and not isinstance(files, str | bytes)
    entries: Sequence[str | Path] = list(files) if several else [files]  # type: ignore[arg-type, list-item]
    if wrong := [entry for entry in entries if not isinstance(entry, str | Path) or not str(entry).strip()]:
        raise ConfigurationError(
            f"files has {wrong[0]!r} in it, which is not a path; give paths, patterns or list files"
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


def refuse_duplicates(paths: Iterable[str]) -> None:
    """Refuse one file or tree under two names, e.g. a pattern's matches through a link to a folder."""
    known: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for path in paths:
        file = without_tree(path)
        with suppress(OSError):  # a missing file is reported where it is opened
            status = os.stat(file)  # noqa: PTH116 - there may be a million
            tree = path.removeprefix(file).strip(":").partition(";")[0]  # the number is of a version
            before = known.setdefault((status.st_dev, status.st_ino), [])
            for first, other in before:
                if tree == other or not tree or not other:  # without a name it is the only one
                    raise ConfigurationError(
                        f"{path} and {first} are one file, by a link or by its only tree, so its samples "
                        "would count twice; name one of them only"
                    )
            before.append((path, tree))


def without_tree(path: str) -> str:
    """Return the path of a file without the tree that is named with it.

    Example:
        >>> without_tree("run.root:events"), without_tree("run.h5")
        ('run.root', 'run.h5')
    """
    found = _TREE.fullmatch(path)
    return path if found is None else found[1]


def with_tree(path: str, other: str) -> str:
    """Return a path with the tree that is named in another."""
    found = _TREE.fullmatch(other)
    return path if found is None else f"{path}:{found[2]}"


def _others(count: int) -> str:
    return f", as are {count - 1} others" if count > 1 else ""


def _expand(entry: str) -> list[str]:
    if entry.endswith(_LISTS) and not is_remote(entry):
        return _lines(Path(entry))
    return _matching(entry, f"files={entry!r}")


def _matching(entry: str, where: str) -> list[str]:
    if is_remote(entry):
        return [entry] if not is_remote_pattern(entry) else _remote(entry, where)
    if len(entry) > _LONGEST or "\0" in entry:
        zeros = " and zero bytes" if "\0" in entry else ""
        raise ConfigurationError(
            f"{where[:_SHOWN]} is not a path: it has {len(entry)} characters{zeros}; give the path of a file"
        )
    try:
        # Strings, not Path objects, as there may be a million of them; abspath also removes "..".
        path = os.path.abspath(str(Path(entry).expanduser()) if entry.startswith("~") else entry)  # noqa: PTH100
    except RuntimeError as error:
        raise ConfigurationError(f"{where}: no such home folder ({error}); write the whole path") from None
    file = without_tree(path)
    if not _PATTERN & set(file) or os.path.lexists(file):
        return [path]
    matches = [with_tree(one, path) for one in _matches(file, where)]
    if not matches:
        raise ConfigurationError(
            f"{where} matches nothing: no such file as {path}; correct the pattern, or make the files first"
        )
    return matches


def _remote(entry: str, where: str) -> list[str]:
    matches = [with_tree(one, entry) for one in remote_matches(without_tree(entry))]
    if not matches:
        raise ConfigurationError(
            f"{where} matches nothing on the other side; correct the pattern, or name each file"
        )
    return matches


def _matches(pattern: str, where: str) -> list[str]:
    """Return the files that a pattern matches, within limits: "/**" would look at the whole machine."""
    head, recursive, rest = pattern.partition(f"{os.sep}**")
    if not recursive or rest[:1] not in ("", os.sep):
        return glob.glob(pattern)  # noqa: PTH207 - Path.glob refuses absolute patterns
    found: dict[str, None] = {}
    looked = 0
    for base in glob.glob(head or os.sep):  # noqa: PTH207
        folders = [base]
        while folders:
            folder = folders.pop()
            looked += 1
            if looked > _MOST_FOLDERS:
                raise ConfigurationError(
                    f"{where} looks into more than {_MOST_FOLDERS} folders; begin the pattern with a folder "
                    "that has the data only"
                )
            with suppress(OSError), os.scandir(folder) as entries:  # not permitted, or gone
                inside = [
                    entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")
                ]
                folders += sorted(inside, reverse=True)
            found.update(dict.fromkeys(_matches(glob.escape(folder) + (rest or f"{os.sep}*"), where)))
    return [path for path in found if rest or not os.path.isdir(path)]  # noqa: PTH112


def _lines(path: Path) -> list[str]:
    """Return the paths that a list file names."""
    try:
        path = path.expanduser()
        text = read_whole(path, _LARGEST).decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(
            f"the list file {path} cannot be read ({error.strerror}); give a text file with one path in each "
            "line"
        ) from None
    except UnicodeDecodeError:
        raise ConfigurationError(
            f"the list file {path} is not text; give a UTF-8 text file with a path in each line, or rename a "
            "data file to end in .h5"
        ) from None
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(f"the list file {path} cannot be found ({error}); write its path") from None
    lines = text.splitlines()
    found, folder = list[str](), str(path.parent)
    for number, line in enumerate(lines, 1):
        entry = line.split("#", 1)[0].strip()
        if entry:
            # Relative to the list's folder; absolute and remote paths stay unchanged.
            entry = entry if is_remote(entry) or entry.startswith("~") else os.path.join(folder, entry)  # noqa: PTH118
            found += _matching(entry, f"{path}, line {number}: {line.strip()!r}")
    if not found:
        raise ConfigurationError(f"the list file {path} names no file; write a path into each line")
    return found


def state_of(paths: Sequence[str]) -> str:
    """Return sizes and times of the files, by which processes know that they read the same.

    Of what has none, such as columns in memory, it is another text in each call: nobody else reads that.
    """
    return "\n".join(f"{path} {_state(without_tree(path)) or uuid.uuid4().hex}" for path in paths)


def _state(path: str) -> Any:
    """Return what differs once a file, or one in a folder, has changed; None: nothing tells."""
    if is_remote(path):
        return remote_state(path)
    try:
        found = [os.stat(path)]  # noqa: PTH116 - there may be a million
        if stat.S_ISDIR(found[0].st_mode):
            found += [os.stat(os.path.join(one, name)) for one, _, names in os.walk(path) for name in names]  # noqa: PTH116, PTH118
    except OSError:
        return None
    first, sizes, times = found[0], [one.st_size for one in found], [one.st_mtime_ns for one in found]
    return first.st_dev, first.st_ino, len(found), sum(sizes), max(times)
