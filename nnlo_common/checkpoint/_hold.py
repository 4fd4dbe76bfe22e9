"""One job at a time in the folder of a run."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

from nnlo_common._errors import ConfigurationError

__all__ = ["hold"]

LOCK = "in-use"
#: By folder; the system takes the lock away when the process ends, however it does.
_held: dict[Path, int] = {}


def hold(folder: Path) -> None:
    """Keep other jobs out of a folder for as long as this process lives.

    Where the file system has no locks, or the folder cannot be written to, nothing is held.

    Raises:
        ConfigurationError: another job has it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hold(Path(folder))
        ...     hold(Path(folder))  # the same job may come again
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = (folder / LOCK).resolve()
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
            f"another job ({owner or 'that has not said which'}) is training in {folder} right now; wait for "
            "its end, or name another folder"
        ) from None
    _held[path] = descriptor  # to close it would give the lock back
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
