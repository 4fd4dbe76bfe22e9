"""Train a small convolutional network on Fashion-MNIST; print the accuracy of the centre for each seed.

python benchmarks/accuracy_torch.py                                     # one process: the baseline
mpiexec -n 3 python benchmarks/accuracy_torch.py --algorithm easgd      # 1 server, 2 workers

Both see the same number of samples in the same batches. `accuracy_all.py` runs and compares them.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
from accuracy_options import options
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_data

WRAPPERS = {"downpour": nt.Downpour, "easgd": nt.EASGD, "gem": nt.GEM}


def plain(chosen, parameters):
    if chosen.optimizer == "adam":
        betas = (chosen.momentum, 0.999)
        return torch.optim.Adam(parameters, lr=chosen.learning_rate, betas=betas)
    return torch.optim.SGD(parameters, lr=chosen.learning_rate, momentum=chosen.momentum)


def wrapper(chosen):
    names = ("every", "group_size", "kappa", "lag", "wire")
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    return partial(WRAPPERS[chosen.algorithm], **given)


def split(data, validation):
    """Return training data and the data to measure on."""
    x, y, x_test, y_test = data
    if not validation:
        return TensorDataset(x, y), x_test, y_test
    return TensorDataset(x[:-validation], y[:-validation]), x[-validation:], y[-validation:]


def images(data):
    """Return samples and labels of training and test set."""
    rows = (data.x_train, data.y_train, data.x_test, data.y_test)
    x, y, x_test, y_test = (torch.from_numpy(one) for one in rows)
    return x.reshape(-1, 1, 28, 28), y, x_test.reshape(-1, 1, 28, 28), y_test


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 7 * 7, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


@torch.no_grad()
def accuracy(model, x, y):
    right = sum(
        int((model(some).argmax(dim=1) == labels).sum())
        for some, labels in zip(x.split(500), y.split(500), strict=True)
    )
    return right / len(y)


def train(chosen, seed, network, parts):
    data, x_test, y_test = parts
    torch.manual_seed(seed)
    model = network()
    optimizer = wrapper(chosen)(plain(chosen, model.parameters()))
    schedule = lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs),
            lr_scheduler.ConstantLR(optimizer, chosen.warmup, total_iters=1),
        ]
    )
    loader = DataLoader(data, batch_size=chosen.batch, sampler=nt.ShardSampler(data, seed=seed))
    start = time.perf_counter()
    for _ in range(chosen.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - start
    reached = accuracy(model, x_test, y_test)
    report = optimizer.report()
    optimizer.say(
        f"seed={seed} accuracy={reached:.4f} seconds={seconds:.1f} samples={chosen.epochs * len(data)} "
        f"exchanges={report.exchanges} staleness={report.mean_staleness:.3f}"
    )
    optimizer.close()
    return reached, optimizer


def compare(chosen, network, data, source):
    """Train with each seed and print the accuracies."""
    parts = split(data, chosen.validation)
    start = time.perf_counter()
    reached = []
    for seed in chosen.seeds:
        result, optimizer = train(chosen, seed, network, parts)
        reached.append(result)
    optimizer.say(
        f"summary mean={statistics.mean(reached):.4f} min={min(reached):.4f} max={max(reached):.4f} "
        f"seconds={time.perf_counter() - start:.1f} "
        f"samples={len(chosen.seeds) * chosen.epochs * len(parts[0])} data={source!r}"
    )


def main():
    chosen = options(__doc__)
    data = fashion_data.load(chosen.data)
    compare(chosen, network, images(data), data.source)


if __name__ == "__main__":
    main()
