"""Cost of reading lists of HDF5 files: inspecting them, streaming them, and reading while computing.

    python benchmarks/reading_hdf5.py
    python benchmarks/reading_hdf5.py --folder /scratch/me --gigabytes 20

The files are made in a temporary folder, so they are read from the page cache unless they exceed the memory:
the rates are those of the reader, not of a disk.

Claims, checked with --assert: inspecting a file takes 5 ms; 2 GB are streamed, shuffled, in 300 MB of memory,
leased or not; 20 ms of reading beside 20 ms of computing take 25 ms and not 40, leased or not; the wait
between two epochs is at most 5 ms, or with leases one reading; from chunked data, a slice of 128 rows is read
in a tenth of the time of 128 random rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from nnlo_common.data import Arrays, Batches, HDF5Source, Lease, LeasedBatches, Leases
from nnlo_common.training.report._usage import Usage

ROW = 512  # numbers of four bytes


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--folder", default=None, help="the folder for the files (default: that for temporary files)"
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="how much to stream")
    parser.add_argument("--assert", dest="check", action="store_true", help="fail if a claim does not hold")
    args = parser.parse_args()
    held = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        held += [look(Path(folder, "many")), random_rows(Path(folder, "one"))]
        held += [stream(Path(folder, "large"), args.gigabytes, leased=leased) for leased in (False, True)]
    held += [overlap(), overlap_of_leases()]
    if args.check and not all(held):
        raise SystemExit("a claim does not hold")


def make(path: Path, rows: int, **layout: tuple[int, int]) -> None:
    path.parent.mkdir(exist_ok=True)
    with h5py.File(path, "w") as file:
        data = file.create_dataset("x", (rows, ROW), "f4", **layout)
        for start in range(0, rows, 10_000):
            data[start : start + 10_000] = np.ones((min(10_000, rows - start), ROW), "f4")


def look(folder: Path, count: int = 1000) -> bool:
    for index in range(count):
        make(folder / f"{index}.h5", 1)
    start = time.perf_counter()
    HDF5Source(folder / "*.h5", features="x").close()
    each = 1e3 * (time.perf_counter() - start) / count
    print(f"inspecting {count} files: {each:.2f} ms each")
    return each < 5


def random_rows(folder: Path) -> bool:
    make(folder / "a.h5", 20_000, chunks=(256, ROW))
    draw, source = np.random.default_rng(0), HDF5Source(folder / "a.h5", features="x")
    into = np.empty((128, ROW), "f4")

    def in_a_row() -> None:
        start = int(draw.integers(20_000 - 128))
        source.read(start, start + 128, [into])

    with h5py.File(folder / "a.h5") as file:

        def anywhere() -> None:
            into[:] = file["x"][np.sort(draw.choice(20_000, 128, replace=False))]

        one, other = timed(in_a_row), timed(anywhere)
    print(f"128 rows of {4 * ROW} bytes: {1e6 * one:.0f} us in a row, {1e6 * other:.0f} us anywhere")
    return other > 10 * one


def timed(do: Callable[[], None], times: int = 50) -> float:
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        do()
        taken.append(time.perf_counter() - start)
    return median(taken)


def stream(folder: Path, gigabytes: float, *, leased: bool) -> bool:
    files = 8
    for index in range(files):
        if not leased:  # the first call has made them
            make(folder / f"{index}.h5", int(gigabytes * 1e9 / files / ROW / 4))
    before, most = Usage.now().memory_mb, 0.0
    start = time.perf_counter()
    source = HDF5Source(folder / "*.h5", features="x")
    batches = Batches(source, batch_size=128, shuffle=True, leased=leased)
    for (x,) in all_leased(batches, epochs=1) if leased else batches.epoch(0):
        float(x[0, 0])
        most = max(most, Usage.now().memory_mb - before)
    rate = gigabytes * 1e3 / (time.perf_counter() - start)
    how = "shuffled and leased" if leased else "shuffled"
    print(f"streaming {gigabytes:g} GB, {how}: {rate:.0f} MB/s, in {most:.0f} MB of memory")
    return most < 300


def all_leased(batches: Batches, epochs: int) -> Iterator[Any]:
    """Yield the batches that a single worker leases from a server that answers at once."""

    class Alone(Leases):
        def take(self, epoch: int, unused: int) -> Lease | None:
            lease = self.ask(0, epoch, unused)
            return lease if isinstance(lease, Lease) else None

    mine = LeasedBatches(batches, Alone(batches.size, [0], unit=batches.window_size))
    for epoch in range(epochs):
        while mine.more(epoch):
            yield mine.take(epoch)[0]


class Slow(Arrays):
    """A source as slow as a remote disk."""

    def read(self, start: int, stop: int, out: Sequence[npt.NDArray[np.float32]]) -> None:
        """Sleep, then copy."""
        time.sleep(0.02)
        super().read(start, stop, out)


def overlap(steps: int = 100) -> bool:
    batches = Batches(Slow(np.zeros(10 * steps, "f4")), batch_size=10, window=1)
    both = (batches.get(epoch, index, then=epoch + 1) for epoch in range(2) for index in range(steps))
    each, gap = waits(both, steps)
    batches.close()
    print(f"20 ms to read beside 20 ms to compute: {each:.1f} ms a step; {gap:.1f} ms between two epochs")
    return each < 25 and gap < 5


def overlap_of_leases(steps: int = 100) -> bool:
    batches = Batches(Slow(np.zeros(10 * steps, "f4")), batch_size=10, window=1, leased=True)
    each, gap = waits(all_leased(batches, epochs=2), steps)
    print(f"the same, leased: {each:.1f} ms a step; {gap:.1f} ms between two epochs")
    return each < 25 and gap < 30


def waits(batches: Iterator[Any], steps: int) -> tuple[float, float]:
    """Return the mean time of a step over two epochs, and the wait between the two, in ms."""
    taken, start = [], time.perf_counter()
    for _ in batches:
        taken.append(1e3 * (time.perf_counter() - start))
        time.sleep(0.02)
        start = time.perf_counter()
    rest = taken[1:]
    gap = rest.pop(steps - 1)
    return 20 + sum(rest) / len(rest), gap


if __name__ == "__main__":
    main()
