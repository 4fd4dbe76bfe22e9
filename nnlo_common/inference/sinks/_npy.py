"""Sink of one .npy file: its space is reserved first, then each rank writes its own bytes in it."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import reopened_file
from nnlo_common.inference._journal import full_disk, parts_folder
from nnlo_common.inference.sinks._sink import Region, Regions, Whole, shape_of

__all__ = ["NpySink"]


class NpySink:
    """One array in a .npy file.

    Args:
        path: of the file.
        wholes: the one array, by its name.
        compression: not possible.
    """

    lasts = True

    def __init__(self, path: Path, wholes: Mapping[str, Whole], *, compression: str | None = None) -> None:
        if len(wholes) != 1:
            raise ConfigurationError(
                f"{path} can hold one array, but there are {len(wholes)}: {', '.join(wholes)}; name an .h5 "
                "or .zarr file, or keep one of them by apply"
            )
        if compression is not None:
            raise ConfigurationError(
                f"compression={compression!r} is not possible in {path}; name an .h5 file"
            )
        ((_, self._whole),) = wholes.items()
        self._path = path
        self._file = parts_folder(path) / "data.npy"
        head = io.BytesIO()
        np.lib.format.write_array_header_2_0(
            head,
            {
                "descr": np.lib.format.dtype_to_descr(self._whole.dtype),
                "fortran_order": False,
                "shape": self._whole.shape,
            },
        )
        self._head = head.getvalue()

    def prepare(self) -> None:
        """Reserve the space of all, so that a disk too small is found now."""
        size = len(self._head) + math.prod(self._whole.shape) * self._whole.dtype.itemsize
        try:
            descriptor = reopened_file(self._file, create=True)
            try:
                if os.fstat(descriptor).st_size != size:
                    os.posix_fallocate(descriptor, 0, size)
                # In a file as large as this one, too: a kill may have come before its header.
                _put(descriptor, self._head, 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise full_disk(self._path, error) from None

    def has(self, piece: int) -> bool:  # noqa: ARG002 - they share a file
        """Return whether the file is there."""
        return self._file.is_file()

    def begin(self, piece: int, regions: Regions) -> _BytesWriter:  # noqa: ARG002 - the regions of writes say all
        """Begin to write a piece."""
        return _BytesWriter(self._path, self._file, self._whole, len(self._head))

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:  # noqa: ARG002 - all is there
        """Give the file its name."""
        try:
            self._file.replace(self._path)
        except OSError as error:
            raise full_disk(self._path, error) from None


class _BytesWriter:
    """Writes regions of the array at their places in the file.

    By `pwrite` and not by a memory map: pages that two hosts share would overwrite each other's bytes.
    """

    def __init__(self, path: Path, file: Path, whole: Whole, begin: int) -> None:
        self._path, self._whole, self._begin = path, whole, begin
        try:
            self._descriptor = reopened_file(file)
        except OSError as error:
            raise full_disk(path, error) from None

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:  # noqa: ARG002 - there is one
        """Write a part of the piece."""
        data = np.ascontiguousarray(array, self._whole.dtype).reshape(-1)
        at = 0
        try:
            for start, length in _runs(self._whole.shape, region):
                place = self._begin + start * data.itemsize
                _put(self._descriptor, data[at : at + length].view(np.uint8).data, place)
                at += length
        except OSError as error:
            raise full_disk(self._path, error) from None

    def close(self) -> None:
        """Wait until all is on the disk."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise full_disk(self._path, error) from None
        finally:
            self.discard()

    def discard(self) -> None:
        """Close the file; what is written of the piece is written again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _put(descriptor: int, data: Any, place: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(descriptor, left, place)
        left, place = left[written:], place + written


def _runs(shape: tuple[int, ...], region: Region) -> Iterator[tuple[int, int]]:
    """Yield the begin and length of each run of neighbours in memory that a region consists of.

    Example:
        >>> list(_runs((4, 5), (slice(1, 3), slice(0, 5)))), list(_runs((4, 5), (slice(1, 3), slice(2, 4))))
        ([(5, 10)], [(7, 2), (12, 2)])
    """
    parts = shape_of(region)
    if 0 in parts:
        return
    inner = len(shape)  # the dimensions from here on are whole
    while inner and parts[inner - 1] == shape[inner - 1]:
        inner -= 1
    first = max(inner - 1, 0)  # the last that is cut: its range is one run
    length = math.prod(parts[first:])
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    base = sum(one.start * stride for one, stride in zip(region, strides, strict=True))
    for index in np.ndindex(*parts[:first]):
        yield base + sum(at * stride for at, stride in zip(index, strides, strict=False)), length
