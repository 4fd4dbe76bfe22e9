"""HDF5 as a format of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array
from nnlo_common.data.formats._format import FileInfo, OpenedFile, Ragged
from nnlo_common.data.hdf5._inspection import inspect_file, names_of, open_file

__all__ = ["HDF5", "OpenHDF5"]


class HDF5:
    """Reads datasets of HDF5 files; a group stands for all datasets in it."""

    title, suffixes = "HDF5", (".h5", ".hdf5", ".hdf", ".he5", ".nc")
    begins = b"\x89HDF\r\n\x1a\n"
    remote = False

    def inspect(self, path: str, names: Sequence[str], locking: bool | None) -> FileInfo:
        """Inspect the datasets and groups of these names."""
        return inspect_file(path, names, locking)

    def open(self, path: str, locking: bool | None) -> OpenedFile:
        """Open a file."""
        return OpenHDF5(open_file(path, locking))

    def names(self, path: str, locking: bool | None) -> list[str]:
        """Return the names at the top of a file."""
        return names_of(path, locking)


class OpenHDF5:
    """An open HDF5 file.

    Args:
        file: of h5py.
    """

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, name: str, first: int, last: int, out: Array) -> None:
        """Read a slice of a dataset."""
        if out.flags.c_contiguous and out.dtype == self._file[name].dtype.newbyteorder("="):
            self._file[name].read_direct(out, np.s_[first:last])
        else:  # a column of an input that has several
            out[...] = self._file[name][first:last]

    def ragged(self, name: str, first: int, last: int) -> Ragged:
        """Refuse: inspection has refused such datasets."""
        raise ConfigurationError(f"{name} has rows {first} to {last} of unequal length")

    def close(self) -> None:
        """Close it."""
        self._file.close()
