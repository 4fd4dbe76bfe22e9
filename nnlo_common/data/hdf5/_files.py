"""Opening HDF5 files, with errors that say which file it is and what to do."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError

__all__ = ["OpenFiles", "open_file"]

_LOG = logging.getLogger(__name__)

# How many files stay open: each has caches of a megabyte or so.
_KEPT = 16
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)


def open_file(path: str, locking: bool | None = None) -> Any:
    """Open a file for reading, as an h5py.File.

    Args:
        path: of the file.
        locking: as h5py takes it; None: lock it, but not where the file system has no locks.

    Raises:
        ConfigurationError: it cannot be opened; the message names it and what to do.
        MissingExtraError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("reading HDF5 files", "h5py", "hdf5") from None
    if not os.path.isfile(path):  # noqa: PTH113 - False, too, where one may not look. (A pipe would hang.)
        raise ConfigurationError(f"{path} {_wrong_path(path)}")
    try:
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if locking is not None or not _has_no_locks(error):
                raise
            _LOG.warning("%s: the file system has no locks; it is opened without (locking=False)", path)
            return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise ConfigurationError(f"{path} {_wrong_file(path, str(error), error.errno)}") from None


def _has_no_locks(error: OSError) -> bool:
    return error.errno in _NO_LOCKS or any(f"errno = {number}," in str(error) for number in _NO_LOCKS)


def _wrong_path(path: str) -> str:
    """Say why there is no file to open."""
    if "://" in path:
        return "is not on this machine; give stage_to= and copy_command=, which fetch it"
    try:
        mode = Path(path).lstat().st_mode
    except PermissionError:
        return "is in a folder that may not be entered (no permission); ask for the right to (chmod a+x)"
    except OSError:
        return "does not exist on this host; correct the path, or make the file first"
    if Path(path).is_dir():
        return f"is a folder; name its files, e.g. {str(Path(path, '*.h5'))!r}"
    if stat.S_ISLNK(mode):
        return f"is a link to {Path(path).readlink()}, which is no file; mend the link"
    return "is no ordinary file; give the path of an HDF5 file"


def _wrong_file(path: str, text: str, number: int | None) -> str:
    """Say why it cannot be opened, in words of ours: HDF5's own tell what its functions did."""
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        return "may not be read by this user (no permission); ask for the right to read it (chmod a+r)"
    if Path(path).stat().st_size == 0:
        return "is empty (0 bytes); what wrote it has failed, so make it again"
    if "unable to lock" in text or number == errno.EAGAIN:
        return (
            "is locked: a program has it open for writing; wait for that to end. If none has, or the file "
            "system's locks do not work, pass locking=False"
        )
    if "truncated" in text:
        return "is truncated: a part of it is missing; copy it, or make it, again"
    if "signature not found" in text:
        return f"is no HDF5 file; it begins with {_beginning(path)!r}. Convert it, or take it off the list"
    return f"cannot be opened ({text}); check it with h5ls, and make it again if that fails, too"


def _beginning(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(12)


class OpenFiles:
    """Keeps the files open that were read last; each process, if this one is forked, its own.

    Args:
        locking: as in `open_file`.
    """

    def __init__(self, locking: bool | None = None) -> None:
        self._locking = locking
        self._begin()

    def lock(self) -> threading.RLock:
        """Return what to hold while a file is used, or another thread may close it."""
        if self._pid != os.getpid():
            self._begin()  # what was open belongs to another process, as does the thread that holds its lock
        return self._lock

    def get(self, path: str) -> Any:
        """Return an open file."""
        with self.lock():
            file = self._files.pop(path, None) or open_file(path, self._locking)
            self._files[path] = file
            if len(self._files) > _KEPT:
                self._files.popitem(last=False)[1].close()
            return file

    def close(self) -> None:
        """Close them all."""
        with self.lock():
            while self._files:
                self._files.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {"_locking": self._locking}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._locking = state["_locking"]
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.RLock()
        self._files: OrderedDict[str, Any] = OrderedDict()
