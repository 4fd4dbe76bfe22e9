"""Train in groups of ranks in PyTorch; each rank leaves its weights, its samples and its loss behind."""

import sys
from pathlib import Path

import numpy as np
import torch

import nnlo_torch as nt
from tests.helpers.torch_cases import WRAPPERS, data, loss_of, model_of

SIZE, BATCH, EPOCHS = 53, 4, 2


def train(name, servers, group_size, way="auto"):
    """Train with one wrapper; the wrapper, the weights, the samples of this rank, and the loss at the end."""
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    ranks = {"servers": servers, "group_size": group_size, "all_reduce": way}
    optimizer = getattr(nt, name)(plain, **ranks, **WRAPPERS[name])
    inputs, targets = data()
    loader = torch.utils.data.DataLoader(range(SIZE), batch_size=BATCH, sampler=nt.ShardSampler(range(SIZE)))
    seen = []
    for _ in range(EPOCHS):
        for indices in loader:
            optimizer.zero_grad()
            loss_of(model, inputs[indices], targets[indices]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen += indices.tolist()
    loss = optimizer.evaluate(
        lambda rows: {"loss": loss_of(model, inputs[rows], targets[rows])},
        torch.utils.data.DataLoader(range(60), sampler=nt.ShardSampler(range(60), evaluation=True)),
    )["loss"]
    optimizer.close()
    vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    return optimizer.rank, {"vector": vector, "seen": np.array(seen, np.int64), "loss": loss}


folder, *numbers = sys.argv[1:4]
for each in sys.argv[4:]:
    name, _, way = each.partition(":")
    rank, saved = train(name, *map(int, numbers), way or "auto")
    np.savez(Path(folder) / f"{each}.rank{rank}.npz", **saved)
