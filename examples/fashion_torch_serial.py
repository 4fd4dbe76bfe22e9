"""The serial twin of `fashion_torch.py`: the same network and data in a plain PyTorch loop, without nnlo."""

from __future__ import annotations

import argparse
import time

import fashion_data
import torch
from fashion_network import evaluate, network
from torch.utils.data import DataLoader, TensorDataset


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)
    x_test, y_test = torch.from_numpy(data.x_test), torch.from_numpy(data.y_test)
    train = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    loader = DataLoader(train, batch_size=25, shuffle=True)
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy, loss = evaluate(model, x_test, y_test)
        print(
            f"epoch {epoch + 1}  test accuracy {accuracy:.3f}  test loss {loss:.3f}  "
            f"{time.perf_counter() - start:5.2f} s"
        )


if __name__ == "__main__":
    main()
