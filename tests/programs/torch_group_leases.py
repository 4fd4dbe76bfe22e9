"""Groups of two ranks lease samples; one rank may be killed; the others leave behind what they have had."""

import os
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import torch

import nnlo_torch as nt
from tests.helpers.torch_cases import data, loss_of, model_of

SIZE = 101
folder, source, dies = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
model = model_of()
optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.01), group_size=2)
if source == "file":
    path = folder / f"rank{optimizer.rank}.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(SIZE)
    options = {"features": "x", "batch_size": 2, "window": 1, "assignment": "dynamic"}
    loader = nt.H5Batches(str(path), **options)
else:
    sampler = nt.ShardSampler(range(SIZE), assignment="dynamic", unit=2)
    loader = torch.utils.data.DataLoader(range(SIZE), batch_size=2, sampler=sampler)
inputs, targets = data()
seen = {}
for epoch in range(3):
    mine = seen.setdefault(f"epoch{epoch}", [])
    for batch in loader:
        indices = batch if source == "sampler" else batch[0]
        mine += indices.tolist()
        optimizer.zero_grad()
        loss_of(model, inputs[indices % len(inputs)], targets[indices % len(inputs)]).backward()
        if optimizer.rank == dies and epoch == 1 and len(mine) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
optimizer.close()
np.savez(folder / f"rank{optimizer.rank}.npz", **seen)
