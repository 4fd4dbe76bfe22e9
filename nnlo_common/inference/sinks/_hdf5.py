"""HDF5 sink: a file for each piece, and one file with virtual datasets over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy.typing as npt

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import whole
from nnlo_common.inference._journal import full_disk, parts_folder
from nnlo_common.inference.sinks._sink import Region, Regions, Whole, check_names, shape_of

__all__ = ["HDF5Sink"]

COMPRESSIONS = ("gzip", "lzf")


class HDF5Sink:
    """Arrays in HDF5; a name with "/" in it is in groups.

    The virtual datasets name the parts relative to their own file: move both together.

    Args:
        path: of the file; its parts are in a folder beside it.
        wholes: the arrays, by name.
        compression: of the parts, "gzip" or "lzf"; None: none.
    """

    lasts = True

    def __init__(self, path: Path, wholes: Mapping[str, Whole], *, compression: str | None = None) -> None:
        if compression not in (None, *COMPRESSIONS):
            raise ConfigurationError(
                f"compression={compression!r}: give one of {', '.join(COMPRESSIONS)}, or nothing"
            )
        check_names(path, wholes)
        _h5py()
        self._path, self._wholes, self._compression = path, wholes, compression
        self._folder = parts_folder(path)

    def prepare(self) -> None:
        """Do nothing: a piece makes its own file."""

    def has(self, piece: int) -> bool:
        """Return whether the file of a piece is there."""
        return self._part(piece).is_file()

    def begin(self, piece: int, regions: Regions) -> _PartWriter:
        """Begin the file of a piece."""
        return _PartWriter(self._path, self._part(piece), self._wholes, regions, self._compression)

    def finish(self, pieces: int, regions: Callable[[int], Regions]) -> None:
        """Write the file of virtual datasets."""
        h5py = _h5py()
        layouts = {name: h5py.VirtualLayout(one.shape, one.dtype) for name, one in self._wholes.items()}
        for piece in range(pieces):
            part = self._part(piece)
            for name, region in regions(piece).items():
                where = _as_pattern(f"{part.parent.name}/{part.name}"), _as_pattern(name)
                layouts[name][region] = h5py.VirtualSource(*where, shape_of(region))
        try:
            with whole(self._path) as fresh, h5py.File(fresh, "w", libver="v110") as file:
                for name, layout in layouts.items():
                    file.create_virtual_dataset(name, layout)
        except (OSError, RuntimeError) as error:
            raise full_disk(self._path, _as_os_error(error)) from None

    def _part(self, piece: int) -> Path:
        return self._folder / f"part-{piece:06}.h5"


class _PartWriter:
    """Writes the file of one piece."""

    def __init__(
        self,
        path: Path,
        part: Path,
        wholes: Mapping[str, Whole],
        regions: Regions,
        compression: str | None,
    ) -> None:
        self._path, self._regions = path, regions
        self._stack = ExitStack()
        try:
            fresh = self._stack.enter_context(whole(part))
            self._file = self._stack.enter_context(_h5py().File(fresh, "w"))
            for name, region in regions.items():
                shape = shape_of(region)
                options: dict[str, Any] = {}
                if compression is not None and all(shape):
                    options = {"compression": compression, "chunks": True, "shuffle": True}
                self._file.create_dataset(name, shape, wholes[name].dtype, **options)
        except (OSError, RuntimeError) as error:
            self.discard()
            raise full_disk(path, _as_os_error(error)) from None

    def write(self, name: str, region: Region, array: npt.NDArray[Any]) -> None:
        """Write a part of the piece."""
        whole_of = self._regions[name]
        here = tuple(
            slice(one.start - all_.start, one.stop - all_.start)
            for one, all_ in zip(region, whole_of, strict=True)
        )
        try:
            self._file[name][here] = array
        except (OSError, RuntimeError) as error:
            raise full_disk(self._path, _as_os_error(error)) from None

    def close(self) -> None:
        """Complete the file, and give it its name."""
        try:
            self._stack.close()
        except (OSError, RuntimeError) as error:
            raise full_disk(self._path, _as_os_error(error)) from None

    def discard(self) -> None:
        """Remove the file."""
        error = ConfigurationError("discarded")
        with suppress(OSError, RuntimeError, ConfigurationError):
            self._stack.__exit__(type(error), error, None)


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("writing HDF5 files", "h5py", "hdf5") from None
    return h5py


def _as_pattern(name: str) -> str:
    """Return a name as HDF5 has it in sources, where `%b` would be the number of a block."""
    return name.replace("%", "%%")


def _as_os_error(error: Exception) -> OSError:
    """Return the system's error; HDF5 hides its number in the text."""
    if isinstance(error, OSError) and error.errno:
        return error
    text = str(error)
    number = text.partition("errno = ")[2].partition(",")[0]
    return OSError(int(number), os.strerror(int(number))) if number.isdecimal() else OSError(text)
