"""Several ranks on one GPU, or on the CPU in its place: servers on the CPU, workers on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import nnlo_torch as nt
from tests.helpers import torch_cases as cases


def main(where: str, folder: str) -> None:
    device = nt.device() if where == "cuda" else torch.device("cpu")
    model = cases.model_of().to(device)
    optimizer = nt.Downpour(torch.optim.Adam(model.parameters(), lr=0.02), model=model)
    x, y = (part.to(device) for part in cases.data())
    loader = torch.utils.data.DataLoader(range(60), batch_size=6, sampler=nt.ShardSampler(range(60), seed=3))
    for _ in range(12):
        for rows in loader:
            optimizer.zero_grad()
            cases.loss_of(model, x[rows], y[rows]).backward()
            optimizer.step()
    with optimizer.evaluation():
        centre = torch.cat([one.detach().flatten().cpu() for one in model.parameters()])
        loss = float(cases.loss_of(model, x, y).detach())
    optimizer.close()
    found = {"centre": centre, "device": device.type, "loss": loss}
    torch.save(found, Path(folder) / f"rank{optimizer.rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
