"""A small training of PyTorch that notes which samples each worker has trained on; someone may be killed."""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from mpi4py import MPI

import nnlo_torch
from tests.chaos import moments

folder, algorithm, (servers, spares, heir) = Path(sys.argv[1]), sys.argv[2], map(int, sys.argv[3:])
EPOCHS, SAMPLES = 3, 1200
rank = MPI.COMM_WORLD.Get_rank()
moments.prepare(folder, rank)  # before nnlo registers what it does at the end
moments.write_where_it_hangs(folder, rank)


class Net(torch.nn.Module):
    """A small network that counts how often it was trained with each sample."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.register_buffer("times", torch.zeros(SAMPLES, dtype=torch.int64))

    def forward(self, inputs, numbers):
        self.times += torch.bincount(numbers, minlength=SAMPLES)
        return self.layers(inputs)


torch.manual_seed(1)
model = Net()
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3), torch.arange(SAMPLES))
plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if algorithm == "GEM" else 0.0)
(folder / f"pid{rank}").write_text(str(os.getpid()))
ranks = {"servers": servers, "spares": spares, "heir": bool(heir)}
optimizer = getattr(nnlo_torch, algorithm)(plain, model=model, **ranks)
sampler = nnlo_torch.ShardSampler(data, shuffle=True, assignment="dynamic", unit=10)
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
checkpoint = nnlo_torch.Checkpoint(folder / "run", optimizer, minutes=0.1 / 60)
with (folder / f"used{rank}").open("a") as used:
    for _ in checkpoint.epochs(EPOCHS):
        for inputs, numbers in checkpoint.batches(loader):
            model(inputs, numbers).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            used.write(f"{time.monotonic()} {' '.join(map(str, numbers.tolist()))}\n")
            used.flush()
            time.sleep(0.01)
        optimizer.mean({"ranks": 1.0})
optimizer.close()
np.save(folder / f"times{rank}", model.times.numpy())
optimizer.say(f"finished: {optimizer.report().lost}")
