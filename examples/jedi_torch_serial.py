"""The serial twin of `jedi_torch.py`: the same network and files in a plain PyTorch loop."""

from __future__ import annotations

import time

import jets
import torch
from fashion_network import measure
from jet_networks import JEDINet

import nnlo_torch as nt


def main():
    chosen = jets.options(__doc__, ["none"], epochs=6).parse_args()
    train, held_out = jets.files(chosen)
    reading = jets.reading(train, chosen.particles)

    torch.manual_seed(1)
    model = JEDINet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.epochs)
    train_loader = nt.H5Batches(train, batch_size=50, **reading)
    test_loader = nt.H5Batches(held_out, batch_size=500, shuffle=False, **reading)
    start = time.perf_counter()
    for epoch in range(chosen.epochs):
        for x, y in train_loader:
            optimizer.zero_grad()
            measure(model, x, y)["loss"].backward()
            optimizer.step()
        schedule.step()
        with torch.no_grad():
            right = torch.cat([model(x).argmax(dim=1) == y for x, y in test_loader])
        accuracy = right.float().mean().item()
        print(f"epoch {epoch + 1:>3}  accuracy {accuracy:.4f}  {time.perf_counter() - start:5.2f} s")


if __name__ == "__main__":
    main()
