"""Files of plain numbers that are mapped into memory: batches are made of them without a copy of a window."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._source import Array, Field

__all__ = ["MappedFile", "check_whole", "files_of", "is_as_read", "read_pages"]


def is_as_read(array: Array | None, field: Field) -> bool:
    """Whether an array is what reading would make of it."""
    if array is None or (array.dtype, array.shape[1:]) != (field.dtype, field.shape):
        return False
    return array.flags.c_contiguous and array.flags.aligned


class MappedFile(NamedTuple):
    """The file of a mapped array.

    Attributes:
        memory: the mapping, which has the file open.
        size: the bytes that the file must have.
        name: its path.
    """

    memory: mmap.mmap
    size: int
    name: str


def files_of(arrays: Sequence[Array]) -> list[MappedFile]:
    """Return the files of mapped arrays."""
    found = []
    for array in arrays:
        memory: Any = array.base
        if isinstance(array, np.memmap) and isinstance(memory, mmap.mmap):
            found.append(MappedFile(memory, array.offset + array.nbytes, str(array.filename)))
    return found


def check_whole(files: Sequence[MappedFile]) -> None:
    """Raise if one of these files was cut off: to touch what is missing would end the process."""
    for memory, size, name in files:
        if memory.size() < size:
            raise ConfigurationError(f"{name} was truncated while it was read; copy or make it again")


def read_pages(arrays: Sequence[Array], start: int, stop: int) -> None:
    """Let the system read some rows of mapped files in their order; the rows are then taken in any order."""
    for array in arrays:
        if isinstance(array, np.memmap) and array.size:
            numbers = array[start:stop].reshape(-1).view(np.uint8)
            numbers[:: mmap.PAGESIZE].max(initial=0)
