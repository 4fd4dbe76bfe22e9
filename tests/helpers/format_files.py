"""The same samples in files of every format, for tests that run over all of them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

__all__ = ["FORMATS", "WITH_TEXTS", "ZARR_TEXTS", "make"]


def make(kind: str, path: Path, columns: dict[str, np.ndarray], piece: int = 3) -> str:
    """Write columns in a format, in pieces of so many rows if it has any; return what names the file."""
    return FORMATS[kind](path, columns, piece)


def _hdf5(path, columns, piece, **options):
    import h5py

    with h5py.File(f"{path}.h5", "w") as file:
        for name, given in columns.items():
            values = given.astype(h5py.string_dtype()) if given.dtype.kind == "U" else given
            chunks = (min(piece, max(len(values), 1)), *values.shape[1:]) if options else None
            file.create_dataset(name, data=values, chunks=chunks, **options)
    return f"{path}.h5"


def _gzip(path, columns, piece):
    return _hdf5(path, columns, piece, compression="gzip")


def _arrow_table(columns):
    import pyarrow as pa

    arrays = {}
    for name, values in columns.items():
        one = pa.array(values.reshape(-1))
        for size in values.shape[:0:-1]:
            one = pa.FixedSizeListArray.from_arrays(one, size)
        arrays[name] = one
    return pa.table(arrays)


def _parquet(path, columns, piece):
    import pyarrow.parquet as pq

    pq.write_table(_arrow_table(columns), f"{path}.parquet", row_group_size=piece)
    return f"{path}.parquet"


def _arrow(path, columns, piece):
    import pyarrow.feather as feather

    feather.write_feather(_arrow_table(columns), f"{path}.arrow", compression="lz4", chunksize=piece)
    return f"{path}.arrow"


def _awkward(values):
    import awkward as ak

    if (
        values.dtype.kind == "U"
    ):  # of these older versions make texts of equal length, and write slices wrongly
        return ak.Array(values.tolist())
    return ak.from_numpy(np.ascontiguousarray(values), regulararray=True)


def _root(path, columns, piece):
    import uproot

    texts = {name for name, one in columns.items() if one.dtype.kind == "U"}
    kinds = {name: "string" if name in texts else (one.dtype, one.shape[1:]) for name, one in columns.items()}
    with uproot.recreate(f"{path}.root") as file:
        tree = file.mktree("events", kinds)
        length = len(next(iter(columns.values())))
        for start in range(0, length, piece):
            some = {name: one[start : start + piece] for name, one in columns.items()}
            tree.extend({name: _awkward(one) if name in texts else one for name, one in some.items()})
    return f"{path}.root:events"


def _rntuple(path, columns, piece):
    import uproot

    with uproot.recreate(f"{path}.root") as file:
        pieces = [
            {name: _awkward(one[start : start + piece]) for name, one in columns.items()}
            for start in range(0, len(next(iter(columns.values()))), piece)
        ]
        tuples = file.mkrntuple("events", pieces[0])
        for some in pieces[1:]:
            tuples.extend(some)
    return f"{path}.root"


def _zarr(path, columns, piece):
    import zarr

    store = zarr.open_group(f"{path}.zarr", mode="w")
    for name, values in columns.items():
        dtype = str if values.dtype.kind == "U" else values.dtype
        array = store.create_array(name, shape=values.shape, dtype=dtype, chunks=(piece, *values.shape[1:]))
        array[...] = values
    return f"{path}.zarr"


def _npz(path, columns, piece):
    np.savez(f"{path}.npz", **columns)
    return f"{path}.npz"


def _packed_npz(path, columns, piece):
    np.savez_compressed(f"{path}.npz", **columns)
    return f"{path}.npz"


def _npy(path, columns, piece):
    kinds = [(name, one.dtype, one.shape[1:]) for name, one in columns.items()]
    rows = np.zeros(len(next(iter(columns.values()))), kinds)
    for name, one in columns.items():
        rows[name] = one
    np.save(f"{path}.npy", rows)
    return f"{path}.npy"


def _tar(path, columns, piece):
    with tarfile.open(f"{path}.tar", "w") as tar:
        for row in range(len(next(iter(columns.values())))):
            for name, values in columns.items():
                content = io.BytesIO()
                np.save(content, values[row])
                member = tarfile.TarInfo(f"{row:06}.{name}.npy")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)
    return f"{path}.tar"


#: Writers of files, by the name of what they write.
FORMATS = {
    "HDF5": _hdf5,
    "HDF5, gzip": _gzip,
    "Parquet": _parquet,
    "Arrow": _arrow,
    "TTree": _root,
    "RNTuple": _rntuple,
    "Zarr": _zarr,
    "npz": _npz,
    "compressed npz": _packed_npz,
    "npy": _npy,
    "tar": _tar,
}
ZARR_TEXTS = "ignore:The (codec|dtype) .*Zarr format 3:UserWarning"
#: Those whose files have texts of any length. Zarr before 3.1 says that its own are not in the specification.
WITH_TEXTS = [
    pytest.param(one, marks=pytest.mark.filterwarnings(ZARR_TEXTS)) if one == "Zarr" else one
    for one in FORMATS
]
