"""Overhead of a Report: the time of a training with it over that without, in turn in one run.

    mpiexec -n 3 python benchmarks/report_overhead.py

One rank serves the centre, the others train. Each round has a training without a report, one with it, and
one with the timeline, too, in an order that changes; a round is compared with itself, so that drift of the
machine cancels. Prints the median ratio with its interval of 95 %, the quartiles, and the load of the
machine. Many short rounds say more than few long ones: the interval narrows with their number.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

import nnlo_torch as nt

WAYS = {"none": None, "report": False, "timeline": True}  # whether there is a timeline; None: no report


def train(folder: Path, timeline: bool | None, batches: int, width: int) -> tuple[float, str]:
    """Train an epoch, and return its seconds on this rank and its role."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
    optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=1e-3), model=model)
    report = None if timeline is None else nt.Report(optimizer, folder, timeline=timeline)
    data = [torch.ones(64, width)] * batches
    for _ in optimizer.epoch(data[:1]):  # all ranks begin together after it
        pass
    optimizer.mean({})
    began_s = time.perf_counter()
    for x in optimizer.epoch(data):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if report is not None:
        report.epoch({})
    seconds = time.perf_counter() - began_s
    optimizer.close()
    return seconds, optimizer.role


def interval(found: list[float]) -> tuple[float, float]:
    """Return the interval of 95 % of the median, from the ranks of the values: it assumes no distribution."""
    half = 0.98 * len(found) ** 0.5
    last = len(found) - 1
    return tuple(sorted(found)[min(max(round(last / 2 + one), 0), last)] for one in (-half, half))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--rounds", type=int, default=15)
    asked.add_argument("--batches", type=int, default=300)
    asked.add_argument("--width", type=int, default=256)
    options = asked.parse_args()
    ratios: dict[str, list[float]] = {name: [] for name in WAYS if WAYS[name] is not None}
    role = ""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            names = sorted(WAYS, key=lambda name: (list(WAYS).index(name) + number) % len(WAYS))
            taken = {}
            for name in names:
                taken[name], role = train(Path(folder), WAYS[name], options.batches, options.width)
            for name, found in ratios.items():
                found.append(taken[name] / taken["none"])
    if role == "worker 0":
        load = " ".join(f"{one:.1f}" for one in os.getloadavg())
        print(f"{options.rounds} rounds of {options.batches} batches, width {options.width}; load {load}")
        for name, found in ratios.items():
            low, middle, high = (100 * (one - 1) for one in statistics.quantiles(found, n=4))
            least, most = (100 * (one - 1) for one in interval(found))
            print(f"{name:8}  {middle:+.1f} % [{least:+.1f}, {most:+.1f}] (quartiles {low:+.1f} {high:+.1f})")


if __name__ == "__main__":
    main()
