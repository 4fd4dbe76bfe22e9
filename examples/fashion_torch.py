"""Train a small network on Fashion-MNIST with PyTorch, on any number of ranks.

python examples/fashion_torch.py                    # one process
mpiexec -n 3 python examples/fashion_torch.py       # 1 server, 2 workers: Steady
mpiexec -n 3 python examples/fashion_torch.py --algorithm easgd

`fashion_torch_serial.py` is the same script without nnlo, for comparison.
"""

from __future__ import annotations

import argparse

import fashion_data
import torch
from fashion_network import measure, network
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt

WRAPPERS = {
    "steady": nt.Steady,
    "downpour": nt.Downpour,
    "synchronous": nt.Synchronous,
    "easgd": nt.EASGD,
    "gem": nt.GEM,
    "agn": nt.AGN,
    "dynsgd": nt.DynSGD,
    "localsgd": nt.LocalSGD,
    "diloco": lambda optimizer: nt.DiLoCo(optimizer, every=20),
}


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--algorithm", choices=WRAPPERS, default="steady")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--target", type=float, default=1.0, help="stop when the accuracy is above this")
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)
    train = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
    test = TensorDataset(torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))

    model = network()
    optimizer = WRAPPERS[chosen.algorithm](torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    train_loader = DataLoader(train, batch_size=25, sampler=nt.ShardSampler(train))
    test_loader = DataLoader(test, batch_size=500, sampler=nt.ShardSampler(test, evaluation=True))
    progress = nt.Progress(optimizer, model, lambda center: measure(center, *test[:500])["loss"].item())
    target, stopping = nt.Target(above=chosen.target), nt.EarlyStopping(patience=5)
    optimizer.say(f"{type(optimizer).__name__} on {optimizer.size} ranks; data: {data.source}")
    for _ in range(chosen.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            measure(model, x, y)["loss"].backward()
            optimizer.step()
        scores = optimizer.evaluate(lambda batch: measure(model, *batch), test_loader)
        progress.epoch(scores)
        if target(scores["accuracy"]) or stopping(scores["loss"]):
            optimizer.stop()
            break
    progress.end(scores)


if __name__ == "__main__":
    main()
