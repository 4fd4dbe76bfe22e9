"""Overhead of a Report: the time of a training with it over that without, in turn within one epoch.

    mpiexec -n 2 python benchmarks/report_overhead.py

One rank serves the centre, the other trains and exchanges in each batch. Both record where their time goes
in every other block of batches, so that a block is compared with its two neighbours and drift of the machine
cancels. Prints the median ratio with its interval of 95 %, the quartiles, and the load of the machine; then
what happens but once: an epoch's line, and a sample of the usage, of which a thread takes one each second.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import nnlo_torch as nt
from nnlo_common.base._spans import record, recorder


def train(
    folder: Path, timeline: bool, blocks: int, block: int, width: int
) -> tuple[list[float], list[float]]:
    """Train an epoch; return the seconds of each block on this rank, and those of what happens once."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
    report = nt.Report(optimizer, folder, timeline=timeline)
    spans = recorder()

    def switch(done: int) -> None:
        record(spans if done // block % 2 else None)

    commits = itertools.count(1)
    optimizer.after_commit(lambda: switch(next(commits)))  # called where the centre is
    data = [torch.ones(64, width)] * (blocks * block + 1)
    ends: list[float] = []
    for number, x in enumerate(optimizer.epoch(data)):
        if number % block == 0:
            ends.append(time.perf_counter())
            switch(number)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    record(spans)
    once = [timed(lambda: report.epoch({})), timed(report._facts._try_to_sample)]
    optimizer.close()
    return [end - begin for begin, end in itertools.pairwise(ends)], once


def timed(what: Callable[[], object]) -> float:
    """Return the seconds that a call takes: the median of several."""
    found = []
    for _ in range(25):
        began_s = time.perf_counter()
        what()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def interval(found: list[float]) -> tuple[float, float]:
    """Return the interval of 95 % of the median, from the ranks of the values: it assumes no distribution."""
    half, last = 0.98 * len(found) ** 0.5, len(found) - 1
    low, high = (min(max(round(last / 2 + one), 0), last) for one in (-half, half))
    return sorted(found)[low], sorted(found)[high]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--blocks", type=int, default=1001)
    asked.add_argument("--block", type=int, default=20, help="batches of each")
    asked.add_argument("--width", type=int, default=256)
    options = asked.parse_args()
    for timeline in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            taken, once = train(Path(folder), timeline, options.blocks, options.block, options.width)
        if not taken:
            continue  # a server
        ratios = [
            2 * taken[place] / (taken[place - 1] + taken[place + 1])
            for place in range(1, len(taken) - 1, 2)
        ]  # fmt: skip
        low, middle, high = (100 * (one - 1) for one in statistics.quantiles(ratios, n=4))
        least, most = (100 * (one - 1) for one in interval(ratios))
        batch_ms, line_ms, sample_ms = (
            1e3 * one for one in (statistics.median(taken) / options.block, *once)
        )
        print("timeline" if timeline else "report")
        print(f"  {middle:+.2f} % [{least:+.2f}, {most:+.2f}] (quartiles {low:+.1f} {high:+.1f})")
        print(f"  of {len(ratios)} pairs of blocks of {options.block} batches of {batch_ms:.2f} ms")
        print(f"  once: an epoch's line {line_ms:.2f} ms, a sample {sample_ms:.2f} ms")
        print("  load " + " ".join(f"{one:.1f}" for one in os.getloadavg()), flush=True)


if __name__ == "__main__":
    main()
