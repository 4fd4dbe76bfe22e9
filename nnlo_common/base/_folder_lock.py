"""Locks that admit one job at a time to the folder of a run or the journal of a search."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import reopened_file

__all__ = ["hold", "hold_lock", "release_lock"]

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
