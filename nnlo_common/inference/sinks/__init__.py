"""Sinks: files and arrays that several ranks fill piece by piece; a format is one file."""

from __future__ import annotations

from nnlo_common.inference.sinks._hdf5 import HDF5Sink
from nnlo_common.inference.sinks._npy import NpySink
from nnlo_common.inference.sinks._sink import MemorySink, PieceWriter, Region, Regions, Sink, Whole
from nnlo_common.inference.sinks._zarr import ZarrSink

__all__ = [
    "FORMATS",
    "HDF5Sink",
    "MemorySink",
    "NpySink",
    "PieceWriter",
    "Region",
    "Regions",
    "Sink",
    "Whole",
    "ZarrSink",
]

#: The sink of each suffix.
FORMATS: dict[str, type[Sink]] = {
    ".h5": HDF5Sink,
    ".hdf5": HDF5Sink,
    ".npy": NpySink,
    ".zarr": ZarrSink,
}
