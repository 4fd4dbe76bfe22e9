"""Readers of every format beside the library used by hand, and an epoch from memory beside a tensor.

    python benchmarks/reading_formats.py

By hand means: the library's own loop over pieces of 5000 samples, each shuffled and cut into batches. Ours
shuffles over the whole file, and reads ahead. With --check it asserts at least 0.8 of the pace by hand for
the formats that are decoded, and an epoch from memory at 0.95 of the pace of one that indexes a tensor.
Plain HDF5 and .npy in the page cache are left out: there gathering from a large window is the cost, which the
small pieces by hand do not have.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from nnlo_common.data import Batches, FileSource

BATCH = 100
TIMES = 5


def write(folder: Path, samples: int) -> dict[str, tuple[str, Any]]:
    """Write the same samples in each format; return path and names of the features."""
    import h5py
    import pyarrow as pa
    import pyarrow.parquet as pq
    import uproot
    import zarr

    draw = np.random.default_rng(0)
    x = draw.normal(size=(samples, 300)).astype("f4")
    columns = {f"c{number}": draw.normal(size=samples).astype("f4") for number in range(20)}
    with h5py.File(folder / "gzip.h5", "w") as file:
        file.create_dataset("x", data=x, compression="gzip", chunks=(500, 300))
    with h5py.File(folder / "plain.h5", "w") as file:
        file["x"] = x
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=samples // 20)
    with uproot.recreate(folder / "a.root") as file:
        tree = file.mktree("events", {name: one.dtype for name, one in columns.items()})
        for start in range(0, samples, samples // 20):
            tree.extend({name: one[start : start + samples // 20] for name, one in columns.items()})
    array = zarr.open_group(folder / "a.zarr", mode="w").create_array(
        "x", shape=x.shape, dtype=x.dtype, chunks=(500, 300)
    )
    array[...] = x
    np.save(folder / "a.npy", x)
    return {
        "HDF5": (str(folder / "plain.h5"), "x"),
        "HDF5, gzip": (str(folder / "gzip.h5"), "x"),
        "Parquet": (str(folder / "a.parquet"), "c*"),
        "ROOT": (f"{folder / 'a.root'}:events", "c*"),
        "Zarr": (str(folder / "a.zarr"), "x"),
        "npy": (str(folder / "a.npy"), "array"),
    }


def by_hand(kind: str, path: str) -> Iterator[Any]:
    """Yield batches by the library's own loop."""
    if kind.startswith("HDF5"):
        import h5py

        with h5py.File(path) as file:
            data = file["x"]
            for start in range(0, len(data), 5000):
                yield from _cut(data[start : start + 5000])
    elif kind == "Parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(5000):
            yield from _cut(np.stack([one.to_numpy() for one in batch.columns], 1))
    elif kind == "ROOT":
        import uproot

        for some in uproot.iterate(path, step_size=5000, library="np"):
            yield from _cut(np.stack(list(some.values()), 1))
    elif kind == "Zarr":
        import zarr

        data = zarr.open(path, mode="r")["x"]
        for start in range(0, data.shape[0], 5000):
            yield from _cut(data[start : start + 5000])
    else:
        data = np.load(path, mmap_mode="r")
        for start in range(0, len(data), 5000):
            yield from _cut(data[start : start + 5000])


def _cut(rows: Any) -> Iterator[Any]:
    order = np.random.default_rng(0).permutation(len(rows))
    for start in range(0, len(rows), BATCH):
        yield rows[order[start : start + BATCH]]


def seconds(epoch: Callable[[], Iterator[Any]], samples: int) -> float:
    """Return the median time of an epoch."""
    found = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        assert sum(len(one) for one in epoch()) == samples
        found.append(time.perf_counter() - begun)
    return median(found)


def ours(path: str, names: str, cache: Any, samples: int) -> float:
    """Return the median time of a shuffled epoch of ours, after a first one."""
    with closing(FileSource(path, features=names, cache=cache)) as source:
        batches = Batches(source, batch_size=BATCH, shuffle=True)
        numbers = iter(range(1000))
        for _ in batches.epoch(next(numbers)):
            pass
        spent = seconds(lambda: (x for (x,) in batches.epoch(next(numbers))), samples)
        batches.close()
    return spent


def tensor(samples: int) -> float:
    """Return the time of a shuffled epoch of a tensor in memory, each batch indexed."""
    import torch

    x = torch.randn(samples, 300)
    draw = torch.Generator().manual_seed(0)

    def epoch() -> Iterator[Any]:
        order = torch.randperm(samples, generator=draw)
        for start in range(0, samples, BATCH):
            yield x[order[start : start + BATCH]]

    return seconds(epoch, samples)


def main() -> None:
    """Measure, print and assert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--check", action="store_true", help="fail if it is slower than that")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        files = write(Path(name), asked.samples)
        print(f"{'format':12} {'by hand':>12} {'ours':>12} {'ratio':>6} {'from memory':>12}   samples/s")
        for kind, (path, names) in files.items():
            hand = asked.samples / seconds(lambda: by_hand(kind, path), asked.samples)  # noqa: B023
            found = asked.samples / ours(path, names, "none", asked.samples)
            kept = asked.samples / ours(path, names, "memory", asked.samples)
            print(f"{kind:12} {hand:12,.0f} {found:12,.0f} {found / hand:6.2f} {kept:12,.0f}", flush=True)
            assert not asked.check or kind in ("HDF5", "npy") or found > 0.8 * hand, kind
        memory = asked.samples / ours(*files["HDF5, gzip"], "memory", asked.samples)
        one = asked.samples / tensor(asked.samples)
        print(f"an epoch from memory {memory:,.0f}, of a tensor {one:,.0f}: {memory / one:.2f}")
        assert not asked.check or memory > 0.95 * one


if __name__ == "__main__":
    main()
