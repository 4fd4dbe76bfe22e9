"""Train with one process's settings, unchanged, under mpiexec; print a line of JSON for each seed.

python benchmarks/settings_kept_mpi.py --data FOLDER                  # one process
mpiexec -n 3 python benchmarks/settings_kept_mpi.py --data FOLDER     # 1 server, 2 workers

The problems and settings of `settings_kept.py`, which simulates the workers. The learning rate falls with
the epochs here, not with every batch, so compare with one process of this script.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from settings_problems import BATCH, PROBLEMS, accuracy, given, loss_of
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt
from nnlo_torch._wrappers import Steady

RULES = {"steady": Steady, "downpour": nt.Downpour}


def plain(name, parameters, rate):
    if name == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def train(chosen, optimizer_name, seed):
    """Train, and print what is known of it afterwards."""
    problem, begun = PROBLEMS[chosen.problem], time.perf_counter()
    rows, epochs = given(chosen, chosen.problem)
    data = TensorDataset(rows.x, rows.y)
    torch.manual_seed(seed)
    model = problem.network()
    optimizer = RULES[chosen.rule](plain(optimizer_name, model.parameters(), problem.rates[optimizer_name]))
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    loader = DataLoader(data, batch_size=BATCH, sampler=nt.ShardSampler(data, seed=seed))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()
        schedule.step()
    report = optimizer.report()
    facts = {
        "problem": chosen.problem,
        "optimizer": optimizer_name,
        "rule": chosen.rule,
        "seed": seed,
        "workers": max(optimizer.size - 1, 1),
        "accuracy": accuracy(model, rows.x_test, rows.y_test),
        "passes": report.samples / len(data),
        "staleness": report.mean_staleness,
        "seconds": time.perf_counter() - begun,
    }
    optimizer.say(json.dumps(facts))
    optimizer.close()


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=PROBLEMS, default="cnn")
    parser.add_argument("--optimizers", choices=["sgd", "adam"], nargs="+", default=["sgd", "adam"])
    parser.add_argument("--rule", choices=RULES, default="steady")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--data", help="a folder with the full Fashion-MNIST; else the embedded subset")
    parser.add_argument("--samples", type=int, help="to train on")
    parser.add_argument("--epochs", type=int)
    return parser.parse_args()


def main():
    chosen = options()
    torch.set_num_threads(1)
    for seed in chosen.seeds:
        for optimizer in chosen.optimizers:
            train(chosen, optimizer, seed)


if __name__ == "__main__":
    main()
