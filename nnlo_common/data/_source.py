"""Source of batches: samples in a row, of which any slice can be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Arrays", "Field", "Source"]

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One array of which each sample has a row.

    Attributes:
        name: what it is called in errors.
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
        """How many bytes a sample takes of it."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Source(Protocol):
    """Samples with numbers from 0, read as slices; they may lie in several parts, e.g. files."""

    @property
    def lengths(self) -> Sequence[int]:
        """How many samples each part has, in order."""

    @property
    def fields(self) -> Sequence[Field]:
        """What each sample is of."""

    @property
    def grain(self) -> int:
        """How many samples are cheapest read together, from the beginning of a part on."""

    def read(self, start: int, stop: int, out: Sequence[Array]) -> None:
        """Read the samples [start, stop) into arrays of that length, one for each field."""

    def assemble(self, arrays: Sequence[Array]) -> Any:
        """Make of the arrays of some samples what a training is given."""


class Arrays:
    """Arrays in memory as a source; a batch is a tuple of arrays.

    Args:
        arrays: of equal length.
        lengths: of the parts that they are thought to have; None: they are one.

    Example:
        >>> source, out = Arrays(np.arange(5)), [np.zeros(2, int)]
        >>> source.read(1, 3, out)
        >>> source.assemble(out)
        (array([1, 2]),)
    """

    grain = 1

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
        """Return them as they are."""
        return tuple(arrays)
