"""A small training of PyTorch that notes which samples each worker has trained on; someone may be killed."""

import os
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

import nnlo_torch

folder, algorithm, servers = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
EPOCHS, SAMPLES = 3, 1200

rank = MPI.COMM_WORLD.Get_rank()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3), torch.arange(SAMPLES))
plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if algorithm == "GEM" else 0.0)
(folder / f"pid{rank}").write_text(str(os.getpid()))
optimizer = getattr(nnlo_torch, algorithm)(plain, servers=servers)
sampler = nnlo_torch.ShardSampler(data, shuffle=True, assignment="dynamic", unit=10)
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
with (folder / f"used{rank}").open("a") as used:
    for epoch in range(EPOCHS):
        for inputs, numbers in loader:
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            used.write("".join(f"{epoch} {number}\n" for number in numbers.tolist()))
            used.flush()
            time.sleep(0.01)
        optimizer.mean({"ranks": 1.0})
optimizer.close()
optimizer.say(f"finished: {optimizer.report().lost}")
