"""Opening HDF5 files, with errors that name the file and the remedy."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.data.formats._format import error_numbers, wrong_path

__all__ = ["open_file"]

_LOG = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP}


def open_file(path: str, locking: bool | None = None) -> Any:
    """Open a file for reading, as an h5py.File.

    Args:
        path: of the file.
        locking: passed to h5py; None: lock the file if the file system has locks.

    Raises:
        ConfigurationError: the file cannot be opened.
        MissingExtraError: h5py is not installed.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("reading HDF5 files", "h5py", "hdf5") from None
    # Opening a pipe would hang.
    if not os.path.isfile(path):  # noqa: PTH113 - Path.is_file raises in a folder without permission
        raise ConfigurationError(f"{path} {wrong_path(path, 'an HDF5 file', '.h5')}")
    try:
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if locking is not None or not error_numbers(error) & _NO_LOCKS:
                raise
            _LOG.warning("%s: the file system has no locks; the file is opened with locking=False", path)
            return h5py.File(path, "r", locking=False)
    except OSError as error:
        raise ConfigurationError(f"{path} {_wrong_file(path, str(error), error.errno)}") from None


def _wrong_file(path: str, text: str, number: int | None) -> str:
    """Return why a file cannot be opened, and what to do; HDF5's messages only name its functions."""
    if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
        return "may not be read by this user (no permission); ask its owner for access (chmod a+r)"
    if Path(path).stat().st_size == 0:
        return "is empty (0 bytes); the program that wrote it failed, so make it again"
    if "unable to lock" in text or number == errno.EAGAIN:
        return (
            "is locked: a program has it open for writing; wait until that ends. If no program has, or the "
            "file system's locks do not work, pass locking=False"
        )
    if "truncated" in text:
        return "is truncated: a part of it is missing; copy or make it again"
    if "signature not found" in text:
        return f"is not an HDF5 file: it begins with {_beginning(path)!r}; convert it or leave it out"
    return f"cannot be opened ({text}); check it with h5ls, and if that fails too, make it again"


def _beginning(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return file.read(12)
