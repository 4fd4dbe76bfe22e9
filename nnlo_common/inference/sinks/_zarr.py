"""Zarr sink: a folder of arrays whose chunks are the pieces, so that no two ranks write one chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.inference._journal import full_disk, parts_folder
from nnlo_common.inference.sinks._sink import Region, Regions, Whole, check_names

__all__ = ["ZarrSink"]

_LARGEST_CHUNK = 2**26  # bytes


class ZarrSink:
    """Arrays in a Zarr group; a name with "/" in it is in groups.

    Args:
        path: of the folder.
        wholes: the arrays, by name.
        compression: "none" for none; else Zarr's default.
    """

    lasts = True

    def __init__(self, path: Path, wholes: Mapping[str, Whole], *, compression: str | None = None) -> None:
        if compression not in (None, "none"):
            raise ConfigurationError(
                f"compression={compression!r}: a Zarr result is compressed as Zarr does by default; give "
                "nothing, or 'none'"
            )
        check_names(path, wholes)
        _zarr()
        self._path, self._wholes, self._plain = path, wholes, compression == "none"
        self._place = parts_folder(path) / "data.zarr"
        self._pieces: Any = None

    def chunked(self, regions: Callable[[int], Regions]) -> None:
        """Learn the regions of the pieces, whose first one has the shape of the chunks."""
        self._pieces = regions

    def prepare(self) -> None:
        """Make the arrays."""
        zarr = _zarr()
        first = self._pieces(0)
        try:
            group = zarr.open_group(str(self._place), mode="a")
            for name, one in self._wholes.items():
                if name not in group:
                    chunks = tuple(max(part.stop - part.start, 1) for part in first[name])
                    chunks = _cut(chunks, one.dtype.itemsize)
                    options = {"compressors": None} if self._plain else {}
                    group.create_array(name, shape=one.shape, dtype=one.dtype, chunks=chunks, **options)
        except OSError as error:
            raise full_disk(self._path, error) from None

    def has(self, piece: int) -> bool:  # noqa: ARG002 - the folder is made once
        """Return whether the folder is there."""
        return self._place.is_dir()

    def begin(self, piece: int, regions: Regions) -> _ChunkWriter:  # noqa: ARG002
        """Begin to write a piece."""
        return _ChunkWriter(self._path, self._place, regions)

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:  # noqa: ARG002
        """Give the folder its name."""
        try:
            self._place.rename(self._path)
        except OSError as error:
            raise full_disk(self._path, error) from None


class _ChunkWriter:
    """Collects a piece in memory, and writes its chunks whole."""

    def __init__(self, path: Path, place: Path, regions: Regions) -> None:
        self._path, self._regions = path, regions
        self._group = _zarr().open_group(str(place), mode="r+")

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:
        """Write a part of the piece."""
        try:
            self._group[name][region] = array
        except OSError as error:
            raise full_disk(self._path, error) from None

    def close(self) -> None:
        """Do nothing: each write is complete."""

    def discard(self) -> None:
        """Do nothing: the piece is written again."""


def _cut(chunks: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Halve the sides of a chunk until it is small enough; a piece stays whole chunks."""
    found = list(chunks)
    size = itemsize
    for one in found:
        size *= one
    while size > _LARGEST_CHUNK:
        at = next((at for at, one in enumerate(found) if one % 2 == 0), None)
        if at is None:
            break
        found[at] //= 2
        size //= 2
    return tuple(found)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise MissingExtraError("writing Zarr", "zarr", "zarr") from None
    return zarr
