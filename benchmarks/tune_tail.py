"""Gain from `elastic`, where idle blocks join the last trials: the time of a search without and with it.

mpiexec -n 7 python benchmarks/tune_tail.py        2 blocks of a server and 2 workers, 3 trials of 7 s
mpiexec -n 13 python benchmarks/tune_tail.py       4 blocks, 5 trials

The worst case: one trial more than blocks. Workers sleep instead of computing, so that they need no cores of
their own; both searches run in turn. On two cores, in 5 rounds, three trials on two blocks took 11.8 s in
place of 14.3 s, five trials on four blocks 11.7 s in place of 14.8 s. Leaving and beginning again takes 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import optuna
import torch

import nnlo_torch as nt
from nnlo_common.cluster.transport._endpoint import DivisibleWorld
from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

BLOCK_SIZE, SAMPLES, BATCH = 3, 240, 4
LEAST_GAIN = 1.15


def searched(world: DivisibleWorld, folder: Path, *, elastic: bool, epochs: int, batch_s: float) -> float:
    """Return the time of a search, from the first start of an objective to the last end."""
    data = torch.utils.data.TensorDataset(torch.ones(SAMPLES, 1))
    times: list[float] = []

    def objective(trial: optuna.Trial) -> float:
        times.append(time.time())
        model = torch.nn.Linear(1, 1)
        rate = trial.suggest_float("rate", 1e-4, 1e-3)
        optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=rate))
        loader = torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=nt.ShardSampler(data))
        checkpoint = nt.Checkpoint(folder / trial.name, optimizer)  # type: ignore[attr-defined]
        for _ in checkpoint.epochs(epochs):
            for (x,) in checkpoint.batches(loader):
                time.sleep(batch_s)
                optimizer.zero_grad()
                model(x).mean().backward()
                optimizer.step()
        times.append(time.time())
        return rate

    blocks = (world.size - 1) // BLOCK_SIZE
    optimize(
        optuna.create_study(),
        objective,
        n_trials=blocks + 1,
        block_size=BLOCK_SIZE,
        elastic=elastic,
        sampler="random",
        world=world,
    )
    everyone = [json.loads(text) for text in world.gather_text(json.dumps(times))][1:]
    return float(max(map(max, everyone)) - min(map(min, everyone)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-s", type=float, default=0.02, help="seconds that a worker sleeps per batch")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    world = launched()
    assert world is not None, "start it with mpiexec"
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(world.gather_text(mine)[0])
        taken: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(1 + options.rounds):
            for elastic in (False, True):
                seconds = searched(
                    world,  # type: ignore[arg-type]
                    folder / f"{turn}-{elastic}",
                    elastic=elastic,
                    epochs=options.epochs,
                    batch_s=options.batch_s,
                )
                taken[elastic] += [seconds] if turn else []  # the first turn warms up
    if world.rank:
        return
    ratios = [plain / joint for plain, joint in zip(taken[False], taken[True], strict=True)]
    for elastic, seconds_taken in taken.items():
        low, middle, high = min(seconds_taken), statistics.median(seconds_taken), max(seconds_taken)
        print(f"elastic={elastic}: {middle:.1f} s ({low:.1f} to {high:.1f})")
    gain = statistics.median(ratios)
    print(f"shorter by {gain:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); load {os.getloadavg()[0]:.1f}")
    assert gain >= LEAST_GAIN, gain


main()
