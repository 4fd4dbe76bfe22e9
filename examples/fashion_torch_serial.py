"""The serial twin of `fashion_torch.py`: the same network and data in a plain PyTorch loop, without nnlo."""

from __future__ import annotations

import argparse
import time

import fashion_data
import torch
from fashion_network import measure, network
from torch.utils.data import DataLoader, TensorDataset


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--target", type=float, default=1.0, help="stop when the accuracy is above this")
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)
    train = TensorDataset(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))
    test = TensorDataset(torch.from_numpy(data.x_test), torch.from_numpy(data.y_test))

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    train_loader = DataLoader(train, batch_size=25, shuffle=True)
    print(f"data: {data.source}")
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            measure(model, x, y)["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            scores = {name: value.item() for name, value in measure(model, *test[:]).items()}
        summary = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
        print(f"epoch {epoch + 1:>3}  {summary}  {time.perf_counter() - start:5.2f} s")
        if scores["accuracy"] > chosen.target:
            break


if __name__ == "__main__":
    main()
