"""Files of plain numbers that are mapped into memory: batches are made of them without a copy of a window."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array, Field

__all__ = ["check_whole", "is_as_read", "read_pages"]


def is_as_read(array: Array | None, field: Field) -> bool:
    """Whether an array is what reading would make of it."""
    if array is None or (array.dtype, array.shape[1:]) != (field.dtype, field.shape):
        return False
    return array.flags.c_contiguous and array.flags.aligned


def check_whole(arrays: Sequence[Array]) -> None:
    """Raise if the file of an array was cut off: to touch what is missing would end the process."""
    for array in arrays:
        if isinstance(array, np.memmap) and array.filename is not None:
            with contextlib.suppress(FileNotFoundError):  # what is mapped stays
                if Path(array.filename).stat().st_size < array.offset + array.nbytes:
                    raise ConfigurationError(
                        f"{array.filename} was truncated while it was read; copy or make it again"
                    )


def read_pages(arrays: Sequence[Array], start: int, stop: int) -> None:
    """Let the system read some rows of mapped files in their order; the rows are then taken in any order."""
    for array in arrays:
        if isinstance(array, np.memmap) and array.size:
            numbers = array[start:stop].reshape(-1).view(np.uint8)
            numbers[:: mmap.PAGESIZE].max(initial=0)
