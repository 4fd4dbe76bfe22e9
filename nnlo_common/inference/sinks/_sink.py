"""Sink: named arrays that ranks fill piece by piece, each piece whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["PieceWriter", "Region", "Regions", "Sink", "Whole", "shape_of"]

#: A part of an array: a slice with begin and end for each dimension.
Region: TypeAlias = tuple[slice, ...]
#: A part of each array, by its name.
Regions: TypeAlias = Mapping[str, Region]


@dataclass(frozen=True, slots=True)
class Whole:
    """One array of a result.

    Attributes:
        shape: of all of it.
        dtype: of its numbers.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a part.

    Example:
        >>> shape_of((slice(2, 5), slice(0, 4)))
        (3, 4)
    """
    return tuple(one.stop - one.start for one in region)


class PieceWriter(Protocol):
    """Writes one piece."""

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:
        """Write a part of the piece; `region` is that of the whole array."""

    def close(self) -> None:
        """Complete the piece: it is on the disk when this returns."""

    def discard(self) -> None:
        """Drop the piece, as it could not be completed."""


class Sink(Protocol):
    """The arrays of a result; every rank has one."""

    #: Whether what a rank has written outlives it.
    lasts: bool

    def __init__(
        self, path: Path, wholes: Mapping[str, Whole], *, compression: str | None = None
    ) -> None: ...

    def prepare(self) -> None:
        """Make what the pieces are written to, unless it is there; the first rank calls it before all others.

        Raises:
            ConfigurationError: this format cannot hold these arrays.
        """

    def has(self, piece: int) -> bool:
        """Return whether a piece that was once written is still there."""

    def begin(self, piece: int, regions: Regions) -> PieceWriter:
        """Begin to write a piece."""

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:
        """Complete the result: the first rank calls it when all pieces are written."""
