"""Source of batches: a sequence of samples that is read in slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError

__all__ = ["Array", "Arrays", "Field", "RaggedSource", "Source"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One array with a row for each sample.

    Attributes:
        name: used in errors.
        shape: of one sample.
        dtype: of its numbers, in the byte order of this machine.

    Example:
        >>> Field("image", (28, 28), np.dtype("f4")).row_bytes
        3136
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """The bytes of one sample's row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int) -> Array:
        """Return an array for some samples.

        Raises:
            ConfigurationError: there is no memory for it.
        """
        try:
            return np.empty((rows, *self.shape), self.dtype)
        except (MemoryError, ValueError):  # a ValueError where NumPy cannot count the bytes
            raise ConfigurationError(
                f"{rows} samples of {self.name} need {rows * self.row_bytes / 2**30:.1f} GiB of memory, "
                "which this process does not get; use a smaller batch size, or store smaller samples"
            ) from None


class Source(Protocol):
    """Samples with numbers from 0, read as slices; they may lie in several parts, e.g. files.

    See `FileSource` for what it may have besides: `resident` and `check_mapped` if it has samples in memory,
    `as_read` if it assembles arrays as they are.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """The number of samples in each part, in order."""

    @property
    def fields(self) -> Sequence[Field]:
        """The arrays that make up a sample."""

    @property
    def grain(self) -> int:
        """The number of samples to read together for the least cost, counted from the start of a part."""

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Read the samples [start, stop) into arrays of that length, one for each field."""

    def assemble(self, arrays: Sequence[Array]) -> Any:
        """Return a batch for the training, made from the arrays of some samples."""


class RaggedSource(Source, Protocol):
    """Samples whose rows have unequal lengths, filled up to one."""

    def row_lengths(self, arrays: Sequence[Array]) -> npt.NDArray[np.int64]:
        """Return how many entries each row has in its longest ragged column."""

    def without_filling(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the arrays of a batch, ragged columns cut to their longest row."""


class Arrays:
    """Arrays in memory as a source; a batch is a tuple of arrays.

    Args:
        arrays: of equal length.
        lengths: of the parts to treat them as; None: one part.

    Example:
        >>> source, out = Arrays(np.arange(5)), [np.zeros(2, int)]
        >>> source.read(1, 3, out)
        >>> source.assemble(out)
        (array([1, 2]),)
    """

    grain = 1
    as_read = True

    def __init__(self, *arrays: Array, lengths: Sequence[int] | None = None) -> None:
        self._arrays = arrays
        self.lengths: Sequence[int] = [len(arrays[0])] if lengths is None else lengths
        self.fields: Sequence[Field] = [
            Field(f"array {index}", one.shape[1:], one.dtype) for index, one in enumerate(arrays)
        ]

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Copy a slice of each array."""
        for array, into in zip(self._arrays, out, strict=True):
            into[:] = array[start:stop]

    def assemble(self, arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the arrays unchanged, as a tuple."""
        return tuple(arrays)
