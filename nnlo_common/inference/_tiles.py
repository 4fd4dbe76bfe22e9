"""Tiles of a volume: where the model looks, which part of its answer counts, and how neighbours are blended.

    |<------------- tile ------------->|
    |margin|          counts           |margin|         at an inner face
           |overlap|           |overlap|                shared with a neighbour, and blended

At the volume's own border nothing is dropped: the model sees its own padding there, as in the whole volume.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from operator import lt
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._limited_formats import mapped_array
from nnlo_common.data.formats._hdf5 import check_sources
from nnlo_common.data.formats._opened_files import open_file
from nnlo_common.inference.sinks import Region

__all__ = [
    "AXES",
    "BLENDS",
    "Blend",
    "Cut",
    "Tile",
    "Tiling",
    "Volume",
    "cuts_of",
    "opened_volume",
    "per_axis",
]

# -- volumes to cut into tiles: arrays, HDF5 datasets, Zarr arrays and .npy files, never whole in memory.

#: The axes of an array by its number of dimensions, if none are given.
AXES = {1: "x", 2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
_CHANNEL, _TIME = "c", "t"
_MOST_LINKS = 1000  # between a dataset's name and the dataset: links may lead in a circle


class Volume:
    """An array with named axes, read region by region.

    Args:
        array: has `shape`, `dtype` and slices, e.g. a dataset of h5py.
        axes: a letter for each axis: `c` for channels, `t` for volumes that have nothing to do with each
            other, and others, such as `zyx`, for those that are cut into tiles; None: by their number.
        name: for errors.
        close: releases it.

    Attributes:
        items: how many volumes there are.
        channels: of each.
        spatial: the letters of the axes that are cut.
        shape: along these.
        chunks: of the file along these; None: it has none.

    Example:
        >>> volume = Volume(np.arange(24).reshape(3, 4, 2), "yxc", "an image")
        >>> volume.channels, volume.shape, volume.read(0, (slice(0, 1), slice(1, 3))).tolist()
        (2, (3, 4), [[[2, 4]], [[3, 5]]])
    """

    def __init__(
        self, array: Any, axes: str | None, name: str, close: Callable[[], object] = lambda: None
    ) -> None:
        self._array, self.name, self.close = array, name, close
        shape = tuple(map(int, array.shape))
        if axes is None:
            axes = AXES.get(len(shape), "")
        spatial = [one for one in axes if one not in (_CHANNEL, _TIME)]
        if not isinstance(axes, str) or len(set(axes)) != len(axes) or len(axes) != len(shape) or not spatial:
            raise ConfigurationError(
                f"{name} has {len(shape)} axes, of {shape}; axes={axes!r} must name each once, e.g. 'zyx', "
                "'czyx' with channels, 'tzyx' for several volumes"
            )
        if 0 in shape:
            raise ConfigurationError(f"{name} is empty: its shape is {shape}")
        self._axes = axes
        self.dtype = np.dtype(array.dtype).newbyteorder("=")
        if self.dtype.kind not in "biuf":
            raise ConfigurationError(f"{name} has the type {array.dtype}, which is not a real number")
        self._sizes = dict(zip(axes, shape, strict=True))
        self.spatial = "".join(spatial)
        self.items, self.channels = self._sizes.get(_TIME, 1), self._sizes.get(_CHANNEL, 1)
        self.has_items = _TIME in axes
        self.shape = tuple(self._sizes[one] for one in spatial)
        chunks = getattr(array, "chunks", None)
        by_axis = dict(zip(axes, chunks, strict=True)) if chunks else {}
        self.chunks = tuple(int(by_axis[one]) for one in spatial) if chunks else None

    @property
    def voxel_bytes(self) -> int:
        """The bytes of one voxel with its channels."""
        return self.channels * int(self.dtype.itemsize)

    def read(self, item: int, region: Region) -> npt.NDArray[Any]:
        """Return a region as (channels, ...)."""
        along = dict(zip(self.spatial, region, strict=True))
        place = tuple(
            slice(item, item + 1) if one == _TIME else along.get(one, slice(None)) for one in self._axes
        )
        try:
            found = np.asarray(self._array[place])
        except Exception as error:  # h5py and zarr raise errors of many types for damaged files
            raise self._changed(str(error)) from None
        order = [self._axes.index(one) for one in (_TIME, _CHANNEL, *self.spatial) if one in self._axes]
        shape = (self.channels, *(one.stop - one.start for one in region))
        found = found.transpose(order)
        if found.size != np.prod(shape):
            raise self._changed(f"{found.shape} instead of {shape}")
        return np.ascontiguousarray(found.reshape(shape), self.dtype)

    def mark(self) -> int:
        """Return a number that tells the volume from others: of its two corners."""
        mark = 0
        for corner in (
            tuple(slice(0, min(8, size)) for size in self.shape),
            tuple(slice(max(0, size - 8), size) for size in self.shape),
        ):
            for item in {0, self.items - 1}:
                mark = zlib.crc32(self.read(item, corner).tobytes(), mark)
        return mark

    def _changed(self, problem: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.name} cannot be read ({problem}): the file is damaged, or has changed since; make it "
            f"again"
        )


def opened_volume(
    data: Any, dataset: str | None, axes: str | None, array: Callable[[Any], Any] = np.asarray
) -> Volume:
    """Open a volume.

    Args:
        data: the path of an .h5, .zarr or .npy file, or an array.
        dataset: its name in the file; None: the only one.
        axes: see `Volume`.
        array: converts a framework's tensor.
    """
    if isinstance(data, Volume):
        return data
    if not isinstance(data, str | Path):
        if dataset is not None:
            raise ConfigurationError(
                f"dataset={dataset!r} is about files, but the data are an array; leave it out"
            )
        sliced = hasattr(data, "chunks") and hasattr(data, "shape")
        return Volume(data if sliced else array(data), axes, "the volume")
    path = Path(data).expanduser()
    suffix = path.suffix.lower()
    if suffix == ".npy":
        return Volume(_mapped(path), axes, str(path))
    if suffix == ".zarr":
        return _of_zarr(path, dataset, axes)
    file = open_file(str(path))
    try:
        found = _chosen(path, file, dataset)
        check_sources(str(path), found)
        return Volume(found, axes, f"{path}: {found.name}", file.close)
    except BaseException:
        file.close()
        raise


def _chosen(path: Path, file: Any, dataset: str | None) -> Any:
    """Return the dataset of a name, or the only one."""
    import h5py

    names: list[str] = []
    file.visititems(lambda name, one: names.append(name) if isinstance(one, h5py.Dataset) else None)
    if dataset is None:
        if len(names) != 1:
            raise ConfigurationError(
                f"{path} has {', '.join(names[:8]) or 'no datasets'}; name one of them (dataset=, or "
                f"--dataset)"
            )
        dataset = names[0]
    found = _followed(file, dataset)
    if not isinstance(found, h5py.Dataset):
        raise ConfigurationError(
            f"{path} has no dataset {dataset!r}; it has {', '.join(names[:8]) or 'none'}"
        )
    return found


def _followed(file: Any, name: str) -> Any:
    """Return what a name stands for, also by links inside the file; None: nothing."""
    import h5py

    here, left = file, _parts(name)
    for _ in range(_MOST_LINKS):
        if not left or not isinstance(here, h5py.Group):
            break
        part, *left = left
        link = here.get(part, getlink=True)
        if isinstance(link, h5py.SoftLink):
            here, left = file if link.path.startswith("/") else here, [*_parts(link.path), *left]
        else:
            here = here[part] if isinstance(link, h5py.HardLink) else None
    return None if left else here


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _of_zarr(path: Path, dataset: str | None, axes: str | None) -> Volume:
    try:
        import zarr
    except ImportError:
        raise MissingExtraError("reading Zarr", "zarr", "zarr") from None
    try:
        found: Any = zarr.open(str(path), mode="r")
        if dataset is not None:
            found = found[dataset]
    except Exception as error:  # zarr raises errors of many types
        raise ConfigurationError(
            f"{path} cannot be opened as Zarr ({error!s:.200}); check the path"
        ) from None
    if not hasattr(found, "dtype"):
        names = [name for name, _ in found.arrays()]
        if len(names) != 1:
            raise ConfigurationError(
                f"{path} has {', '.join(names[:8]) or 'no arrays'}; name one of them (dataset=, or --dataset)"
            )
        found = found[names[0]]
    return Volume(found, axes, str(path))


def _mapped(path: Path) -> Any:
    try:
        return mapped_array(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as .npy ({error}); check the path") from None


Blend: TypeAlias = Literal["crop", "linear", "gaussian"]
BLENDS = ("crop", "linear", "gaussian")
# As MONAI has them, so that both give the same where both blend alike.
_SIGMA, _LEAST = 0.125, 1e-3


@dataclass(frozen=True, slots=True)
class Cut:
    """One tile along one axis.

    Attributes:
        start: where it begins.
        stop: where it ends.
        first: where its answer begins to count.
        last: where it ceases to count.
        left: how many voxels it shares with the tile before.
        right: how many with the one after.
    """

    start: int
    stop: int
    first: int
    last: int
    left: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile.

    Attributes:
        cuts: one for each axis.
    """

    cuts: tuple[Cut, ...]

    @property
    def region(self) -> Region:
        """What the model looks at."""
        return tuple(slice(one.start, one.stop) for one in self.cuts)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of that."""
        return tuple(one.stop - one.start for one in self.cuts)


def cuts_of(
    size: int,
    tile: int,
    *,
    margin: int,
    overlap: int = 0,
    multiple: int = 1,
    even: bool = False,
    axis: str = "",
) -> list[Cut]:
    """Return the tiles along one axis; together they count everywhere.

    Args:
        size: of the volume.
        tile: of a tile.
        margin: what does not count at an inner face.
        overlap: what neighbours both count, blended.
        multiple: tiles begin at multiples of it, as the network's strides ask for.
        even: tiles begin to count at multiples of one number, as the chunks of a file do; else there may be
            fewer tiles, as the first one counts from its begin.
        axis: its name, for errors.

    Raises:
        ConfigurationError: nothing of a tile is left.

    Example:
        >>> [(one.start, one.stop, one.first, one.last) for one in cuts_of(20, 10, margin=2)]
        [(0, 10, 0, 8), (6, 16, 8, 14), (10, 20, 14, 20)]
        >>> [(one.start, one.stop, one.first, one.last) for one in cuts_of(20, 10, margin=2, even=True)]
        [(0, 10, 0, 6), (4, 14, 6, 12), (10, 20, 12, 18), (10, 20, 18, 20)]
    """
    if tile >= size:
        return [Cut(0, size, 0, size)]
    lost = 2 * margin + overlap + (multiple - 1 if even else 0)
    stride = (tile - lost) // multiple * multiple
    if stride < 1:
        blended = f" and an overlap of {overlap}" if overlap else ""
        where = f" along {axis}" if axis else ""
        aligned = f", in steps of {multiple}" if multiple > 1 else ""
        raise ConfigurationError(
            f"a margin of {margin} at both faces{blended} leave nothing of a tile of {tile}{where}{aligned}; "
            f"give tiles larger than {lost + multiple - 1}, or a smaller margin"
        )
    # The last tile ends with the volume; it may be shorter, but begins where the strides are aligned.
    end = -(-(size - tile) // multiple) * multiple
    if even:
        firsts = range(0, size, stride)
        starts = [min(max((first - margin) // multiple * multiple, 0), end) for first in firsts]
    else:
        starts = [min(start, end) for start in range(0, end + stride, stride)]
        firsts = [0, *(start + margin for start in starts[1:])]  # type: ignore[assignment]
    found: list[Cut] = []
    for start, first in zip(starts, firsts, strict=True):
        stop = min(start + tile, size)
        last = size if stop == size else stop - margin
        if not overlap:
            if even:
                last = min(first + stride, size)
            elif found:
                first = found[-1].last  # noqa: PLW2901 - an earlier tile counts as far as it can
        found.append(Cut(start, stop, first, last))
    if overlap:
        found = _with_shared([one for one in found if one.first < one.last])
    return found


def _with_shared(cuts: list[Cut]) -> list[Cut]:
    """Return cuts with what neighbours share."""
    shared = [max(one.last - other.first, 0) for one, other in pairwise(cuts)]
    return [
        Cut(one.start, one.stop, one.first, one.last, left, right)
        for one, left, right in zip(cuts, [0, *shared], [*shared, 0], strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The tiles of a volume, and the pieces in which the result is written.

    Attributes:
        shape: of the volume, without channels.
        tile: the shape of a tile.
        margin: what does not count at inner faces, for each axis.
        overlap: what neighbours blend, for each axis.
        multiple: what tiles are aligned to, for each axis.
        blend: how.
        group: tiles in a piece, for each axis.
        names: of the axes, for errors.
        even: pieces begin at multiples of one number, as chunks of a file do.

    Example:
        >>> tiling = Tiling(shape=(20, 9), tile=(10, 10), margin=(2, 2))
        >>> tiling.pieces, [region[0] for region in map(tiling.piece, range(3))]
        (3, [slice(0, 8, None), slice(8, 14, None), slice(14, 20, None)])
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    margin: tuple[int, ...]
    overlap: tuple[int, ...] = ()
    multiple: tuple[int, ...] = ()
    blend: Blend = "crop"
    group: tuple[int, ...] = ()
    names: str = ""
    even: bool = False

    @cached_property
    def axes(self) -> tuple[list[Cut], ...]:
        """The tiles along each axis."""
        count = len(self.shape)
        overlaps, multiples = self.overlap or (0,) * count, self.multiple or (1,) * count
        names = self.names or " " * count
        return tuple(
            cuts_of(
                size,
                tile,
                margin=margin,
                overlap=overlap,
                multiple=multiple,
                even=self.even,
                axis=name.strip(),
            )
            for size, tile, margin, overlap, multiple, name in zip(
                self.shape, self.tile, self.margin, overlaps, multiples, names, strict=True
            )
        )

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return math.prod(map(len, self.axes))

    @cached_property
    def _bounds(self) -> tuple[list[int], ...]:
        """The bounds of the pieces along each axis: where tiles begin to count."""
        found = []
        for cuts, size, group in zip(
            self.axes, self.shape, self.group or (1,) * len(self.shape), strict=True
        ):
            inner = [cut.first for cut in cuts[1:]]
            found.append([0, *inner[group - 1 :: group], size])
        return tuple(found)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(len(bounds) - 1 for bounds in self._bounds)

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return math.prod(self._counts)

    @property
    def grid(self) -> tuple[int, ...]:
        """How many pieces there are along each axis."""
        return self._counts

    def piece(self, number: int) -> Region:
        """Return the region of a piece; they divide the volume."""
        place = np.unravel_index(number, self._counts)
        return tuple(
            slice(bounds[int(at)], bounds[int(at) + 1])
            for bounds, at in zip(self._bounds, place, strict=True)
        )

    def tiles_of(self, region: Region) -> Iterator[tuple[tuple[int, ...], Tile]]:
        """Yield the tiles that count somewhere in a region, with their places along the axes, in order."""
        along = [
            [at for at, cut in enumerate(cuts) if cut.first < part.stop and part.start < cut.last]
            for cuts, part in zip(self.axes, region, strict=True)
        ]
        for place in product(*along):
            yield place, Tile(tuple(cuts[at] for cuts, at in zip(self.axes, place, strict=True)))

    def pieces_in(self, region: Region) -> Iterator[int]:
        """Yield the numbers of the pieces that have some of a region."""
        along = [
            range(bisect_right(bounds, part.start) - 1, bisect_left(bounds, part.stop))
            for bounds, part in zip(self._bounds, region, strict=True)
        ]
        for place in product(*along):
            yield int(np.ravel_multi_index(place, self._counts))

    def last_piece_of(self, tile: Tile) -> int:
        """Return the number of the last piece in which a tile counts."""
        place = [
            bisect_left(bounds, cut.last) - 1 for bounds, cut in zip(self._bounds, tile.cuts, strict=True)
        ]
        return int(np.ravel_multi_index(place, self._counts))

    def weights(self, tile: Tile) -> npt.NDArray[np.float32]:
        """Return the weight of each voxel of a tile; 0 where it does not count."""
        found = np.ones((), np.float32)
        for cut, full in zip(tile.cuts, self.tile, strict=True):
            found = found[..., None] * _along(cut, min(full, cut.stop - cut.start), self.blend)
        if self.blend == "gaussian":
            inside = tuple(slice(cut.first - cut.start, cut.last - cut.start) for cut in tile.cuts)
            least = np.zeros(found.shape, np.float32)
            least[inside] = _LEAST
            found = np.maximum(found, least)
        return found

    def grouped(
        self, voxel_bytes: int, *, most: int, least_bytes: int, largest_bytes: int, tiles: int = 1
    ) -> Tiling:
        """Return this tiling with larger pieces, so that there are few files, each worth its cost.

        Args:
            voxel_bytes: that the result has for each voxel.
            most: pieces, unless a piece had `largest_bytes` then.
            least_bytes: of a piece, if there are enough pieces.
            largest_bytes: of a piece.
            tiles: at least in a piece, as the model gets so many at once.
        """
        group = [1] * len(self.shape)

        def size() -> int:
            steps = [max(cuts[0].last, 1) * count for cuts, count in zip(self.axes, group, strict=True)]
            return (
                math.prod(min(step, whole) for step, whole in zip(steps, self.shape, strict=True))
                * voxel_bytes
            )

        def pieces() -> int:
            return math.prod(-(-len(cuts) // count) for cuts, count in zip(self.axes, group, strict=True))

        few = 64
        shares = self.blend != "crop"

        def small() -> bool:
            """Return whether a piece has too few tiles, or is cut along an axis where it should be whole."""
            few_tiles = math.prod(map(min, group, map(len, self.axes))) < tiles
            return few_tiles or (shares and any(map(lt, group[1:], map(len, self.axes[1:]))))

        while pieces() > most or (size() < least_bytes and pieces() > few) or small():
            room = [at for at, cuts in enumerate(self.axes) if group[at] < len(cuts)]
            if not room or size() * 2 > largest_bytes:
                break
            # The least along the last axes, whose voxels are neighbours in a file. Pieces that share tiles
            # are
            # whole along the last axes, so that those that follow each other share tiles along the first
            # only.
            at = room[-1] if shares else min(room, key=lambda at: (group[at], -at))
            group[at] *= 2
        return replace(self, group=tuple(group))


def _along(cut: Cut, tile: int, blend: Blend) -> npt.NDArray[np.float32]:
    """Return the weights of a tile along one axis."""
    at = np.arange(cut.start, cut.stop)
    counts = (at >= cut.first) & (at < cut.last)
    weights = np.ones(len(at))
    if blend == "linear":
        if cut.left:
            weights = np.minimum(weights, (at - cut.first + 0.5) / cut.left)
        if cut.right:
            weights = np.minimum(weights, (cut.last - at - 0.5) / cut.right)
    elif blend == "gaussian":
        middle = cut.start + (tile - 1) / 2
        weights = np.exp(-(((at - middle) / (_SIGMA * tile)) ** 2) / 2)
    return np.where(counts, weights, 0).astype(np.float32)


def per_axis(name: str, value: Any, axes: str, least: int) -> tuple[int, ...]:
    """Return a whole number for each axis: from one for all, or from one for each.

    Example:
        >>> per_axis("tile", 64, "zyx", 1), per_axis("tile", (8, 64, 64), "zyx", 1)
        ((64, 64, 64), (8, 64, 64))
    """
    several: Sequence[Any] = value if isinstance(value, list | tuple) else [value] * len(axes)
    good = all(
        isinstance(one, int | np.integer) and not isinstance(one, bool) and one >= least for one in several
    )
    if not good or len(several) != len(axes):
        raise ConfigurationError(
            f"{name}={value!r}: give a whole number of at least {least}, or one for each of the axes {axes}"
        )
    return tuple(int(one) for one in several)
