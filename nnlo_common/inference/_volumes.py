"""Volumes to cut into tiles: arrays, HDF5 datasets, Zarr arrays and .npy files, never whole in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._limited_formats import mapped_array
from nnlo_common.data.hdf5._opened_files import open_file
from nnlo_common.data.hdf5._sources import check_sources
from nnlo_common.inference.sinks import Region

__all__ = ["AXES", "Volume", "opened_volume"]

#: The axes of an array by its number of dimensions, if none are given.
AXES = {1: "x", 2: "yx", 3: "zyx", 4: "czyx", 5: "tczyx"}
_CHANNEL, _TIME = "c", "t"


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
                f"'czyx' "
                "with channels, 'tzyx' for several volumes"
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
    names: list[str] = []
    file.visititems(lambda name, one: names.append(name) if hasattr(one, "dtype") else None)
    if dataset is None:
        if len(names) != 1:
            raise ConfigurationError(
                f"{path} has {', '.join(names[:8]) or 'no datasets'}; name one of them (dataset=, or "
                f"--dataset)"
            )
        dataset = names[0]
    if dataset.strip("/") not in names:
        raise ConfigurationError(
            f"{path} has no dataset {dataset!r}; it has {', '.join(names[:8]) or 'none'}"
        )
    return file[dataset]


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
