"""A training for job scripts: each worker notes which samples it trains on, in the working directory.

The first start of a job never comes to its end by itself; the later ones are quick.
"""

import os
import time
from pathlib import Path

import torch

import nnlo_torch

EPOCHS, SAMPLES = 3, 1200
pause_s = 0.002 if "SLURM_RESTART_COUNT" in os.environ else 1.0
torch.manual_seed(1)
model = torch.nn.Linear(3, 1)
data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3), torch.arange(SAMPLES))
optimizer = nnlo_torch.Downpour(torch.optim.SGD(model.parameters(), lr=1e-3))
sampler = nnlo_torch.ShardSampler(data, assignment="dynamic", unit=10)
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=sampler)
checkpoint = nnlo_torch.Checkpoint("run", optimizer)
with Path(f"used{optimizer.rank}").open("a") as used:
    for _ in checkpoint.epochs(EPOCHS):
        for inputs, numbers in checkpoint.batches(loader):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            print(*numbers.tolist(), file=used, flush=True)
            time.sleep(pause_s)
optimizer.close()
Path("finished").touch()
optimizer.say(f"finished on {optimizer.size} ranks")
