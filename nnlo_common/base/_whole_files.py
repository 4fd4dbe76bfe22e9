"""Files that ranks write: one for each rank, complete or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import new_file, readable_file, reopened_file

__all__ = [
    "RANKS",
    "hold",
    "hold_lock",
    "of_rank",
    "release_lock",
    "usable",
    "whole",
    "whole_file",
    "write_whole",
]

# -- locks that admit one job at a time to the folder of a run or the journal of a search --------------

LOCK = "in-use"
#: Open descriptors by lock file. The system releases a lock when the process ends, even by a crash.
_held: dict[Path, int] = {}


def hold(folder: Path, doing: str = "training") -> None:
    """Lock a folder against other jobs until this process ends.

    Does nothing if the file system has no locks or the folder is not writable.

    Args:
        folder: to lock.
        doing: what this job does there, for the other job's error message.

    Raises:
        ConfigurationError: another job has locked it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hold(Path(folder))
        ...     hold(Path(folder))  # the same job may lock it again
    """
    hold_lock(folder / LOCK, f"{doing} in {folder}", "folder")


def hold_lock(lock: Path, doing: str, kind: str) -> None:
    """Take a lock file, and keep it until `release_lock` or the end of this process.

    Args:
        lock: the file.
        doing: what a job does with the lock, and where, for the error message.
        kind: what the user should choose another of, e.g. "folder", for the error message.

    Raises:
        ConfigurationError: another job has locked it.
    """
    path = _place(lock)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path in _held and path.exists() and os.fstat(_held[path]).st_ino == path.stat().st_ino:
            return
        descriptor = reopened_file(path, create=True)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR):  # it is no file that nnlo has made
            raise ConfigurationError(
                f"the lock {path} cannot be opened ({error.strerror}); remove it, or name another {kind}"
            ) from None
        return  # the first write there raises a better error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = _owner(descriptor)
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return
        raise ConfigurationError(
            f"another job ({owner or 'unknown process'}) is {doing} right now; wait until it ends, or "
            f"name another {kind}"
        ) from None
    _held[path] = descriptor  # closing it releases the lock
    if os.fstat(descriptor).st_nlink == 1:  # else the file has another name, and may be anything there
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def release_lock(lock: Path) -> None:
    """Release a lock; do nothing if this process does not hold it.

    The file stays: another job may have just opened it, and would then lock a deleted file.
    """
    descriptor = _held.pop(_place(lock), None)
    if descriptor is not None:
        os.close(descriptor)


def _place(lock: Path) -> Path:
    """Return one name for a lock file; it may itself not be a link."""
    return lock.parent.resolve() / lock.name


def _owner(descriptor: int) -> str:
    """Return what the other job has written, without characters that would control a terminal."""
    text = os.pread(descriptor, 200, 0).decode(errors="replace")
    return "".join(one for one in text if one.isprintable()).strip()


#: The folder within that of a run for what each rank writes, so that the result is seen first.
RANKS = "ranks"


def of_rank(folder: str | Path, name: str, rank: int) -> Path:
    """Return the path of a rank's own file in the folder of a run.

    Example:
        >>> of_rank("run", "facts.jsonl", 2).as_posix()
        'run/ranks/facts.rank2.jsonl'
    """
    plain = Path(name)
    return Path(folder) / RANKS / f"{plain.stem}.rank{rank}{plain.suffix}"


def usable(asked: str, path: Path) -> Path:
    """Make the folder of `path` and return `path`; refuse it before the training if it is not writable.

    Args:
        asked: the option that named the file, for the error message.
        path: of the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        problem = _obstacle(path)
    except OSError as error:
        problem = str(error.strerror)
    if not problem:
        return path
    raise ConfigurationError(f"{asked} cannot write {path} ({problem}); name a file in a writable folder")


def _obstacle(path: Path) -> str:
    """Describe what prevents writing of a file; empty if nothing does."""
    if path.parent.name == RANKS and path.parent.is_symlink():
        return f"{path.parent} is a symbolic link, which is not followed"
    if path.is_symlink():  # whoever has put it there chooses what is overwritten
        return "it is a symbolic link, which is not followed"
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "it is not a regular file"
    return "" if os.access(path.parent, os.W_OK) else "no permission"


@contextmanager
def whole_file(path: Path, *, synced: bool = True) -> Iterator[BinaryIO]:
    """Yield a new file to write to, and name it `path` at the end: no reader sees half a file.

    An error removes it. A link in its place is replaced, not followed.

    Args:
        path: of the file.
        synced: wait for the disk; False for files that are made again after a power cut.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole_file(Path(folder, "result.json")) as file:
        ...         _ = file.write(b"{}")
        ...     [one.name for one in Path(folder).iterdir()]
        ['result.json']
    """
    fresh = _fresh(path)
    with _renamed(fresh, path), new_file(fresh) as file:
        yield file
        file.flush()
        if synced:
            os.fsync(file.fileno())  # otherwise a power cut may leave the new name on an empty file


def write_whole(path: Path, data: bytes | str) -> None:
    """Write a file, whole or not at all; text as UTF-8."""
    with whole_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Do what `whole_file` does for a writer that takes only a path: yield that of an empty new file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with whole(Path(folder, "result.json")) as fresh:
        ...         _ = fresh.write_text("{}")
        ...     [one.name for one in Path(folder).iterdir()]
        ['result.json']
    """
    fresh = _fresh(path)
    with _renamed(fresh, path):
        new_file(fresh).close()
        yield fresh
        with readable_file(fresh, follow=False) as file:
            os.fsync(file.fileno())


def _fresh(path: Path) -> Path:
    return path.with_name(f"{path.stem}.part{path.suffix}")


@contextmanager
def _renamed(fresh: Path, path: Path) -> Iterator[None]:
    """Rename a file that the body writes; remove it after an error."""
    try:
        yield
        fresh.replace(path)
    except BaseException:
        with suppress(OSError):  # the body's error says more
            fresh.unlink(missing_ok=True)
        raise
