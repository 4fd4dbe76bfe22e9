"""Sink: named arrays that ranks fill piece by piece, each piece whole or not at all."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, PeerLostError
from nnlo_common.base._limited_formats import npz_arrays
from nnlo_common.cluster.transport._endpoint import RankWorld

__all__ = ["MemorySink", "PieceWriter", "Region", "Regions", "Sink", "Whole", "check_names", "shape_of"]

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


def check_names(path: Path, names: Iterable[str]) -> None:
    """Refuse names of arrays that a file with groups cannot hold: one inside another, or none at all.

    Example:
        >>> check_names(Path("y.h5"), ["a", "b/c", "b/d"])
    """
    known: dict[tuple[str, ...], str] = {}
    for name in names:
        parts = tuple(part for part in name.split("/") if part not in ("", "."))
        shared = [other for other in known if other[: len(parts)] == parts[: len(other)]]
        if shared or not parts:
            beside = f" beside {known[shared[0]]!r}" if shared else ""
            raise ConfigurationError(f"{path} cannot hold the output {name!r}{beside}; give it another name")
        known[parts] = name


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


# -- sink in memory: each rank keeps its pieces, and all ranks get everything at the end ---------------


class MemorySink:
    """Arrays in memory.

    Args:
        path: unused.
        wholes: the arrays, by name.
        compression: unused.

    Attributes:
        arrays: all of them; on several ranks complete after `exchange`.
    """

    lasts = False

    def __init__(self, path: Path, wholes: Mapping[str, Whole], *, compression: str | None = None) -> None:  # noqa: ARG002
        try:
            self.arrays = {name: np.zeros(one.shape, one.dtype) for name, one in wholes.items()}
        except MemoryError:
            raise ConfigurationError(
                "there is no memory for all outputs; name a file for them (out=, or --out)"
            ) from None
        self._written: list[tuple[str, Region]] = []

    def prepare(self) -> None:
        """Do nothing."""

    def has(self, piece: int) -> bool:  # noqa: ARG002 - nothing is kept from before
        """Return False: nothing outlives the process."""
        return False

    def begin(self, piece: int, regions: Regions) -> MemorySink:  # noqa: ARG002 - the whole arrays are here
        """Begin to write a piece."""
        return self

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:
        """Write a part of the piece."""
        self.arrays[name][region] = array
        self._written.append((name, region))

    def close(self) -> None:
        """Do nothing: all is written."""

    def discard(self) -> None:
        """Do nothing: the whole prediction fails."""

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:
        """Do nothing: `exchange` follows on all ranks."""

    def exchange(self, world: RankWorld) -> None:
        """Give each rank what the others have (collective)."""
        group = world.group(range(world.size), naps=True)
        file = io.BytesIO()
        mine: dict[str, Any] = {
            str(at): self.arrays[name][region] for at, (name, region) in enumerate(self._written)
        }
        np.savez(file, **mine)
        places = [[name, [(one.start, one.stop) for one in region]] for name, region in self._written]
        from json import dumps, loads

        every = group.gather_bytes(dumps(places).encode())
        data = group.gather_bytes(file.getvalue())
        group.close()
        for rank, (told, content) in enumerate(zip(every, data, strict=True)):
            if rank == world.rank:
                continue
            try:
                found = npz_arrays(content)
                for at, (name, region) in enumerate(loads(told)):
                    self.arrays[name][tuple(slice(*one) for one in region)] = found[str(at)]
            except (KeyError, ValueError) as error:
                raise PeerLostError(rank, f"sent outputs that cannot be read ({error})") from error
