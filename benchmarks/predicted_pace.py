"""Paces that the simulator predicts, beside those of the same trainings on this host; print a table.

python benchmarks/predicted_pace.py --assert

As many ranks as there are workers probe a dense network at the same time, as `mpiexec -n W nnlo advise` does.
The simulator predicts several layouts on the cores of this host, and each of them trains. Before and after it
the same workers run the plain loop: that a host is faster in the probe than minutes later is no fault of the
simulator's. So a prediction is "met" if its ratio to the plain loop is within 15 % of what was measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy read it

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from accuracy_all import mpiexec
from overhead import BATCH
from predictions import MOST, begin_table, end_table

import nnlo_torch as nt
from nnlo_common import SGD
from nnlo_common.base._cores import usable_cores
from nnlo_common.simulation import Advice, Ranks, rehearse, simulate

WIDTHS = {"90k": (784, 100, 100, 10), "1.8M": (784, 1000, 1000, 10)}
#: Wrapper, options, servers.
LAYOUTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Downpour": ("Downpour", {}, 1),
    "Downpour, lag=1": ("Downpour", {"lag": 1}, 1),
    "EASGD, every=10": ("EASGD", {"every": 10}, 1),
    "Steady, every=4": ("Steady", {"every": 4}, 1),
    "Synchronous": ("Synchronous", {}, 1),
    "Steady, servers=0": ("Steady", {}, 0),
}


def network(size: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a dense network with the user's optimizer."""
    torch.manual_seed(1)
    widths = WIDTHS[size]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def data(count: int) -> torch.utils.data.TensorDataset:
    """Return samples of noise."""
    return torch.utils.data.TensorDataset(torch.randn(count, 784), torch.randint(10, (count,)))


def predict(chosen: argparse.Namespace) -> None:
    """Print the pace of each layout, as predicted from a probe of all ranks."""
    model, optimizer = network(chosen.size)
    loader = torch.utils.data.DataLoader(data(50 * BATCH), batch_size=BATCH)
    advice = nt.advise(model, torch.nn.functional.cross_entropy, loader, optimizer, seconds=chosen.probe)
    found = {"plain": chosen.workers / advice.costs.step.mean}
    for name, (wrapper, options, servers) in LAYOUTS.items():
        rule = getattr(__import__("nnlo_common"), wrapper)(**options)
        ranks = Ranks.of(rule, chosen.workers + servers, servers=servers)
        times = rehearse(rule, advice.facts.parameters, optimizer=SGD(0.1, momentum=0.9))
        tried = Advice(replace(advice.facts, exchanges={rule: times}, one_host=True, link=None))
        costs = replace(tried.costs_of(rule), cores=usable_cores(), read=None)
        found[name] = simulate(ranks, costs).batches_per_s
    print(json.dumps(found), flush=True)


def train(chosen: argparse.Namespace) -> None:
    """Print the batches per second of this rank, as a worker: in the training, and in the plain loop."""
    wrapper, options, servers = LAYOUTS[chosen.layout]
    torch.set_num_threads(1)
    model, inner = network(chosen.size)
    alone, own = network(chosen.size)
    plain = max(chosen.steps // 4, 10)
    optimizer = getattr(nt, wrapper)(inner, servers=servers, **options)
    optimizer.begin_epoch()
    if not optimizer.serves:
        paces = [pace(alone, own, plain), pace(model, optimizer, chosen.steps), pace(alone, own, plain)]
        print(f"PACE {paces[1]} {(paces[0] + paces[2]) / 2}", flush=True)
    optimizer.close()


def pace(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Return the batches per second of a loop, without its first fifth."""
    batches = [tuple(data(BATCH).tensors) for _ in range(8)]
    times = [time.perf_counter()]
    while len(times) <= steps:
        x, y = batches[len(times) % len(batches)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        times.append(time.perf_counter())
    first = len(times) // 5
    return (len(times) - 1 - first) / (times[-1] - times[first])


def run(ranks: int, *words: str, script: str = __file__) -> list[str]:
    """Run a script, this one by default, on several ranks; return the lines that they print."""
    command = [mpiexec(), "--oversubscribe", "-n", str(ranks), sys.executable, script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout.splitlines()


def compare(chosen: argparse.Namespace) -> int:
    """Print the table; return how many predictions are off."""
    begin_table("parameters", "workers", "layout", "predicted", "of plain", "measured", "of plain", "off by")
    missed = 0
    for size in chosen.sizes:
        for workers in chosen.numbers:
            common = ("--size", size, "--workers", str(workers))
            probed = run(workers, "predict", *common, "--probe", str(chosen.probe))
            predicted = json.loads(probed[0])
            for name, (_, _, servers) in LAYOUTS.items():
                steps = str(max(40, int(chosen.seconds * predicted[name] / workers)))
                paces, ratios = [], []
                for _ in range(chosen.runs):
                    lines = run(workers + servers, "train", *common, "--layout", name, "--steps", steps)
                    found = [[*map(float, line.split()[1:])] for line in lines if line.startswith("PACE")]
                    trained, plain = map(sum, zip(*found, strict=True))
                    paces.append(trained)
                    ratios.append(trained / plain)
                ratio = predicted[name] / predicted["plain"]
                off = ratio / median(ratios) - 1
                missed += abs(off) > MOST
                each = ", ".join(f"{one:.2f}" for one in ratios)
                row = f"| {size} | {workers} | {name} | {predicted[name]:.0f} | {ratio:.2f}"
                print(f"{row} | {median(paces):.0f} | {each} | {100 * off:+.0f} % |", flush=True)
    end_table(missed, MOST)
    return missed


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compare", "predict", "train"), nargs="?", default="compare")
    parser.add_argument("--sizes", nargs="+", choices=WIDTHS, default=[*WIDTHS])
    parser.add_argument("--numbers", nargs="+", type=int, default=[1, 2], help="of workers")
    parser.add_argument("--probe", type=float, default=20.0, help="seconds of a probe")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a training")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--size", choices=WIDTHS, default="1.8M", help="of one run")
    parser.add_argument("--workers", type=int, default=1, help="of one run")
    parser.add_argument("--layout", choices=LAYOUTS, default="Downpour", help="of one run")
    parser.add_argument("--steps", type=int, default=100, help="of one run")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    chosen = parser.parse_args()
    if chosen.what != "compare":
        {"predict": predict, "train": train}[chosen.what](chosen)
        return 0
    return 1 if compare(chosen) and chosen.insist else 0


if __name__ == "__main__":
    raise SystemExit(main())
