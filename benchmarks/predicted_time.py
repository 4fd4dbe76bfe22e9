"""Time to a loss that the simulator predicts for two workers, beside that of the same training on this host.

python benchmarks/predicted_time.py --assert

One process trains a dense network on labels with noise until its mean loss of late is low enough: that takes
it so many batches. From half of them a probe finds the noise scale and what a step and an exchange take, and
the simulator says how long a server and two workers with `Steady` need on the cores of this host for the same
loss. Then they train, beside one process in turn. "Met" is a prediction within 25 %.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch and numpy read it

import argparse
import time
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from predicted_pace import run
from predictions import begin_table, end_table

import nnlo_torch as nt
from nnlo_common import Steady
from nnlo_common.base._cores import usable_cores
from nnlo_common.simulation import Advice, Ranks, simulate

SAMPLES, FEATURES, CLASSES = 20_000, 784, 10
LATELY = 50  # batches whose losses make the mean
CASES = (("80k", 50), ("80k", 1000), ("800k", 50))  # with batches of so many samples
WIDTHS = {"80k": 100, "800k": 1000}
MOST = 0.25


def data() -> torch.utils.data.TensorDataset:
    """Return samples whose labels a linear network has given, a tenth of them at random."""
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=draws)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=draws)).argmax(1)
    wrong = torch.rand(SAMPLES, generator=draws) < 0.1
    y[wrong] = torch.randint(CLASSES, (int(wrong.sum()),), generator=draws)
    return torch.utils.data.TensorDataset(x, y)


def network(chosen: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a dense network with its optimizer."""
    torch.manual_seed(chosen.seed)
    width = WIDTHS[chosen.size]
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
    )
    return model, torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)


def trained(
    model: torch.nn.Module, optimizer: Any, loader: Any, chosen: argparse.Namespace
) -> tuple[int, float]:
    """Train until the loss is reached, or for so many batches; return the batches and the seconds."""
    losses: deque[float] = deque(maxlen=LATELY)
    count, began_s = 0, time.perf_counter()
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            count += 1
            if count == chosen.batches or (len(losses) == LATELY and sum(losses) / LATELY < chosen.loss):
                return count, time.perf_counter() - began_s


def alone(chosen: argparse.Namespace) -> None:
    """Print how many batches and seconds one process takes."""
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(data(), batch_size=chosen.batch, shuffle=True)
    count, seconds = trained(*network(chosen), loader, chosen)
    print(count, seconds, flush=True)


def predict(chosen: argparse.Namespace) -> None:
    """Train for half of the batches, probe, and print the seconds that two workers would take for all."""
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(data(), batch_size=chosen.batch, shuffle=True)
    model, optimizer = network(chosen)
    trained(model, optimizer, loader, argparse.Namespace(batches=chosen.batches // 2, loss=0.0))
    found = nt.advise(model, torch.nn.functional.cross_entropy, loader, optimizer, seconds=chosen.probe)
    here = Advice(replace(found.facts, one_host=True, link=None))
    costs = replace(here.costs_of(Steady()), cores=usable_cores())
    forecast = simulate(Ranks.of(Steady(), 3), costs)
    noise = [scale / chosen.batch for scale in (here.noise.scale, here.noise.low, here.noise.high)]
    times = [forecast.seconds_to(chosen.batches, one) for one in noise]
    plain = chosen.batches / here.alone.batches_per_s
    print(times[0], min(times), max(times), plain, noise[0], flush=True)


def train(chosen: argparse.Namespace) -> None:
    """Print the seconds in which the first worker reaches the loss."""
    torch.set_num_threads(1)
    model, inner = network(chosen)
    optimizer = nt.Steady(inner)
    optimizer.begin_epoch()  # a server serves until the workers have left
    if not optimizer.serves:
        torch.manual_seed(100 + optimizer.rank)  # each draws batches of its own
        loader = torch.utils.data.DataLoader(data(), batch_size=chosen.batch, shuffle=True)
        count, seconds = trained(model, optimizer, loader, chosen)
        if optimizer.share[0] == 0:
            print(f"TOOK {count} {seconds}", flush=True)
    optimizer.close()


def compare(chosen: argparse.Namespace) -> int:
    """Print the table; return how many predictions are off."""
    given = ("parameters", "batch", "seed", "one process")
    begin_table(*given, "predicted", "range", "two workers took", "off by")
    missed = 0
    for size, batch in CASES:
        for seed in range(chosen.seeds):
            words = ("--size", size, "--batch", str(batch), "--seed", str(seed), "--loss", str(chosen.loss))
            before, alone_s = map(float, run(1, "alone", *words, script=__file__)[0].split())
            halfway = ("--batches", str(int(before)), "--probe", str(chosen.probe))
            said = [float(one) for one in run(1, "predict", *words, *halfway, script=__file__)[0].split()]
            # The probe's host may be faster or slower than that of the training: in times of one process.
            predicted, low, high = (one / said[3] for one in said[:3])
            (line,) = [one for one in run(3, "train", *words, script=__file__) if one.startswith("TOOK")]
            again_s = float(run(1, "alone", *words, script=__file__)[0].split()[1])
            plain_s = (alone_s + again_s) / 2
            took = float(line.split()[2]) / plain_s
            off = predicted / took - 1
            missed += abs(off) > MOST
            row = f"| {size} | {batch} | {seed} | {int(before)} batches, {plain_s:.1f} s | {predicted:.2f} "
            print(f"{row}| {low:.2f} to {high:.2f} | {took:.2f} | {100 * off:+.0f} % |", flush=True)
    end_table(missed, MOST)
    return missed


def main() -> int:
    """Do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "what", choices=("compare", "alone", "predict", "train"), nargs="?", default="compare"
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--loss", type=float, default=0.8, help="to reach")
    parser.add_argument("--probe", type=float, default=20.0, help="seconds of a probe")
    parser.add_argument("--size", choices=WIDTHS, default="800k", help="of one run")
    parser.add_argument("--batch", type=int, default=50, help="of one run")
    parser.add_argument("--seed", type=int, default=0, help="of one run")
    parser.add_argument("--batches", type=int, default=20_000, help="of one run, at most")
    parser.add_argument("--assert", dest="insist", action="store_true", help="fail unless all are met")
    chosen = parser.parse_args()
    if chosen.what != "compare":
        {"alone": alone, "predict": predict, "train": train}[chosen.what](chosen)
        return 0
    return 1 if compare(chosen) and chosen.insist else 0


if __name__ == "__main__":
    raise SystemExit(main())
