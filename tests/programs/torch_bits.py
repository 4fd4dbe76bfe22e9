"""Train a model with each optimizer through Downpour, and leave every rank's weights behind."""

import sys
from pathlib import Path

import numpy as np
import torch

import nnlo_torch as nt
from tests.helpers.torch_cases import OPTIMIZERS, SAMPLES, data, loss_of, model_of

folder, wrapper, width = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
for name, make in OPTIMIZERS.items():
    model = model_of(width)
    optimizer = getattr(nt, wrapper)(make(model))
    x, y = data()
    sampler = nt.ShardSampler(range(SAMPLES), seed=3)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=7 if wrapper == "Downpour" else 6, sampler=sampler
    )
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_of(model, inputs, targets).backward()
            optimizer.step()
    with optimizer.center_weights():
        center = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()
    optimizer.close()
    np.savez(folder / f"{name}.rank{optimizer.rank}.npz", center=center)
