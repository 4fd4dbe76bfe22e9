"""Train a small network on Fashion-MNIST with PyTorch, on any number of ranks.

python examples/fashion_torch.py                    # plainly
mpiexec -n 3 python examples/fashion_torch.py       # 1 server, 2 workers: Downpour SGD
mpiexec -n 3 python examples/fashion_torch.py --algorithm easgd

`fashion_torch_serial.py` is the same script without nnlo: compare the two.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import fashion_data
import torch
from fashion_network import evaluate, network
from torch.utils.data import DataLoader, TensorDataset

import nnlo_torch as nt

WRAPPERS = {
    "downpour": nt.Downpour,
    "synchronous": nt.Synchronous,
    "easgd": nt.EASGD,
    "gem": nt.GEM,
    "agn": nt.AGN,
    "dynsgd": nt.DynSGD,
    "localsgd": nt.LocalSGD,
    "diloco": partial(nt.DiLoCo, every=20),
}


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--algorithm", choices=WRAPPERS, default="downpour")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)
    x_test, y_test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    train = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))

    model = network()
    optimizer = WRAPPERS[chosen.algorithm](torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
    loader = DataLoader(train, batch_size=25, sampler=nt.ShardSampler(train))
    optimizer.say(f"{optimizer.algorithm.describe()}; data: {data.source}")
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy, loss = evaluate(model, x_test, y_test)
        optimizer.say(
            f"epoch {epoch + 1}  test accuracy {accuracy:.3f}  test loss {loss:.3f}  "
            f"{time.perf_counter() - start:5.2f} s"
        )
    report = optimizer.report()
    optimizer.say(f"{report.exchanges} exchanges, {report.mean_staleness:.2f} commits stale on average")


if __name__ == "__main__":
    main()
