"""Readers of every format beside the library used by hand, and an epoch from memory beside a tensor.

    python benchmarks/reading_formats.py
    python benchmarks/reading_formats.py --check

Ours shuffles over the whole file: windows of blocks from everywhere, read ahead by a thread. By hand there
are two loops over the library's own calls, in one thread:

    in pieces         pieces of 5000 samples in the order of the file, each shuffled and cut into batches.
                      A batch has neighbours only; a piece fits the processor's cache, a window may not.
    the same shuffle  the same blocks, windows and batches as ours.

Where `pip install ROOT` has been run, its own loader is measured, too, which mixes 140 batches at a time.

The three take turns in one process, and the least of many epochs counts, so that other programs disturb
little: in seconds, and in CPU seconds of all threads, of which ours has two. All files are in the page cache.
--check asserts at least 0.8 of the pace by hand for every format and both loops, and an epoch from memory at
0.95 of the pace of one that indexes a tensor. Measure on a machine with a core for the thread.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.data import Batches, FileSource
from nnlo_common.data._blocks import Blocks

BATCH, PIECE = 100, 5000
Epoch: TypeAlias = Callable[[int], Iterator[Any]]


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


def in_pieces(kind: str, path: str) -> Iterator[Any]:
    """Yield batches by the library's own loop over pieces."""
    if kind == "Parquet":
        import pyarrow.parquet as pq

        for batch in pq.ParquetFile(path).iter_batches(PIECE):
            yield from _cut(np.stack([one.to_numpy() for one in batch.columns], 1))
    elif kind == "ROOT":
        import uproot

        for some in uproot.iterate(path, step_size=PIECE, library="np"):
            yield from _cut(np.stack(list(some.values()), 1))
    else:
        with closing(Slices(kind, path)) as slices:
            for start in range(0, slices.rows, PIECE):
                yield from _cut(slices.read(start, min(start + PIECE, slices.rows)))


class Slices:
    """Slices of a file, by the library.

    Args:
        kind: its format.
        path: of the file.
    """

    def __init__(self, kind: str, path: str) -> None:
        self._file: Any = None
        if kind.startswith("HDF5"):
            import h5py

            self._file = h5py.File(path)
            self._data = self._file["x"]
            self.read = self._slice
        elif kind == "Zarr":
            import zarr

            self._data, self.read = zarr.open(path, mode="r")["x"], self._slice
        elif kind == "npy":
            self._data, self.read = np.load(path, mmap_mode="r"), self._slice
        elif kind == "Parquet":
            import pyarrow.parquet as pq

            self._file = self._data = pq.ParquetFile(path)
            self.read = self._row_groups
        else:
            import uproot

            self._data = uproot.open(path)
            self._file, self.read = self._data.file, self._entries
        counts = {"Parquet": lambda: self._data.metadata.num_rows, "ROOT": lambda: self._data.num_entries}
        self.rows: int = counts.get(kind, lambda: self._data.shape[0])()

    def _slice(self, start: int, stop: int) -> Any:
        return self._data[start:stop]

    def _row_groups(self, start: int, stop: int) -> Any:
        size = self._data.metadata.row_group(0).num_rows
        groups = self._data.read_row_groups([*range(start // size, -(-stop // size))])
        return np.stack([one.to_numpy() for one in groups.columns], 1)

    def _entries(self, start: int, stop: int) -> Any:
        return np.stack([*self._data.arrays(entry_start=start, entry_stop=stop, library="np").values()], 1)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def same_shuffle(kind: str, path: str, batches: Batches, epoch: int) -> Iterator[Any]:
    """Yield batches of the blocks and windows of ours, by the library's slices."""
    order = Blocks(batches.source.lengths, block=batches.block, shuffle=True)
    (field,) = batches.source.fields
    window = field.empty(batches.window_size)
    with closing(Slices(kind, path)) as slices:
        for start in range(0, slices.rows, batches.window_size):
            at = 0
            for first, last in order.ranges(epoch, start, min(start + batches.window_size, slices.rows)):
                window[at : at + last - first] = slices.read(first, last)
                at += last - first
            yield from _cut(window[:at])


def _cut(rows: Any) -> Iterator[Any]:
    order = np.random.default_rng(0).permutation(len(rows))
    for start in range(0, len(rows), BATCH):
        yield rows[order[start : start + BATCH]]


def root_loader(path: str) -> Epoch | None:
    """Return ROOT's own loader, where it is installed."""
    try:
        import ROOT
    except ImportError:
        return None
    file, tree = path.rsplit(":", 1)
    loader = ROOT.Experimental.ML.RDataLoader(
        ROOT.RDataFrame(tree, file), BATCH, batches_in_memory=140, target="c0", drop_remainder=False
    )
    return lambda _: (x for x, _ in loader.as_numpy())


def least(epochs: Mapping[str, Epoch], samples: int, times: int) -> dict[str, tuple[float, float]]:
    """Return the least CPU seconds and seconds of an epoch of each way, which take turns."""
    found = dict.fromkeys(epochs, (math.inf, math.inf))
    for number in range(times + 1):
        for name, epoch in epochs.items():
            begun = time.process_time(), time.perf_counter()
            assert sum(len(one) for one in epoch(number)) == samples
            spent = time.process_time() - begun[0], time.perf_counter() - begun[1]
            if number:  # the first one fills caches
                found[name] = min(found[name][0], spent[0]), min(found[name][1], spent[1])
    return found


def read(kind: str, path: str, names: str, samples: int, times: int) -> dict[str, tuple[float, float]]:
    """Return what an epoch takes by hand and by ours, not kept in memory."""
    with closing(FileSource(path, features=names, cache="none")) as source:
        batches = Batches(source, batch_size=BATCH, shuffle=True)
        ways: dict[str, Epoch] = {
            "pieces": lambda _: in_pieces(kind, path),
            "same": lambda epoch: same_shuffle(kind, path, batches, epoch),
            "ours": lambda epoch: (x for (x,) in batches.epoch(epoch)),
        }
        loader = root_loader(path) if kind == "ROOT" else None
        found = least({**ways, "ROOT's loader": loader} if loader else ways, samples, times)
        batches.close()
    return found


def kept(path: str, names: str, samples: int, times: int) -> tuple[float, float]:
    """Return the pace of an epoch kept in memory, and of one that indexes a tensor."""
    import torch

    x = torch.randn(samples, 300)
    draw = torch.Generator().manual_seed(0)

    def indexed(_: int) -> Iterator[Any]:
        order = torch.randperm(samples, generator=draw)
        for start in range(0, samples, BATCH):
            yield x[order[start : start + BATCH]]

    with closing(FileSource(path, features=names, cache="memory")) as source:
        batches = Batches(source, batch_size=BATCH, shuffle=True)
        found = least(
            {"ours": lambda epoch: (x for (x,) in batches.epoch(epoch)), "tensor": indexed}, samples, times
        )
        batches.close()
    return samples / found["ours"][0], samples / found["tensor"][0]


def main() -> None:
    """Measure, print and assert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=10, help="epochs of each way")
    parser.add_argument("--formats", nargs="+", help="only these")
    parser.add_argument("--check", action="store_true", help="fail if it is slower than that")
    asked = parser.parse_args()
    slow: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        files = write(Path(name), asked.samples)
        print(
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; pace of ours / by hand, "
            "in seconds (in CPU seconds)"
        )
        print(f"{'format':12} {'in pieces':>15} {'same shuffle':>15} {'ours, samples per second':>30}")
        for kind in asked.formats or files:
            found = read(kind, *files[kind], asked.samples, asked.times)
            ratios = {way: [a / b for a, b in zip(found[way], found["ours"], strict=True)] for way in found}
            shown = [f"{ratios[way][1]:.2f} ({ratios[way][0]:.2f})" for way in ("pieces", "same")]
            pace = asked.samples / found["ours"][1]
            print(f"{kind:12} {shown[0]:>15} {shown[1]:>15} {pace:30,.0f}", flush=True)
            if other := ratios.get("ROOT's loader"):
                print(f"{'':12} beside ROOT's own loader {other[1]:.1f} ({other[0]:.1f})")
            slow += [f"{kind}: {way} {one[1]:.2f}" for way, one in ratios.items() if one[1] < 0.8]
        if not asked.formats:
            ours, tensor = kept(*files["HDF5, gzip"], asked.samples, asked.times)
            print(f"an epoch from memory {ours:,.0f}, of a tensor {tensor:,.0f}: {ours / tensor:.2f}")
            slow += ["from memory"] * (ours < 0.95 * tensor)
    assert not (asked.check and slow), slow


if __name__ == "__main__":
    main()
