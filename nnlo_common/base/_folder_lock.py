"""One job at a time in the folder of a run, or with the journal of a search."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError

__all__ = ["hold", "hold_lock", "release_lock"]

LOCK = "in-use"
#: By lock; the system takes the lock away when the process ends, however it does.
_held: dict[Path, int] = {}


def hold(folder: Path, doing: str = "training") -> None:
    """Keep other jobs out of a folder for as long as this process lives.

    Where the file system has no locks, or the folder cannot be written to, nothing is held.

    Args:
        folder: which.
        doing: what this job does there.

    Raises:
        ConfigurationError: another job has it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hold(Path(folder))
        ...     hold(Path(folder))  # the same job may come again
    """
    hold_lock(folder / LOCK, f"{doing} in {folder}", "folder")


def hold_lock(lock: Path, doing: str, kind: str) -> None:
    """Keep other jobs away from what a file stands for.

    Args:
        lock: the file.
        doing: what the job that has it does, and where.
        kind: what another job may name another of.

    Raises:
        ConfigurationError: another job has it.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        path = lock.resolve()
        if path in _held and path.exists() and os.fstat(_held[path]).st_ino == path.stat().st_ino:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return  # what is written there will say why not
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return
        raise ConfigurationError(
            f"another job ({owner or 'that has not said which'}) is {doing} right now; wait for its end, or "
            f"name another {kind}"
        ) from None
    _held[path] = descriptor  # to close it gives the lock back
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def release_lock(lock: Path) -> None:
    """Let other jobs in again; where nothing is held do nothing.

    The file stays: another job may have opened it just now, and would hold what nobody else finds.
    """
    descriptor = _held.pop(lock.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)
