"""Train with frozen weights; write the running statistics after each epoch as the first server has them."""

import sys
from pathlib import Path

import numpy as np
import torch

import nnlo_torch as nt
from tests.helpers.torch_cases import initialised

EPOCHS, BATCHES, SIZE = 3, 7, 8
#: Of `BatchNorm1d`, by the number of the layer.
MOMENTA = (0.01, 0.1, None)


def model_of():
    layers = [torch.nn.BatchNorm1d(3, momentum=momentum) for momentum in MOMENTA]
    return initialised(torch.nn.Sequential(torch.nn.Linear(3, 3), *layers, torch.nn.Linear(3, 1)))


def batches_of(different):
    """Batches of the same samples in another order or, if they are to be `different`, of others."""
    draw = np.random.default_rng(2)
    same = draw.standard_normal((SIZE, 3)).astype("f4")
    rows = [draw.standard_normal((SIZE, 3)) + place if different else same for place in range(BATCHES)]
    return [torch.tensor(draw.permutation(row).astype("f4")) for row in rows]


def train(wrapper=nt.Downpour, *, different=False, world=None, model=None, **options):
    """The statistics after each epoch."""
    model = model or model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if wrapper is not None:
        optimizer = wrapper(optimizer, world=world, **options)
    batches, seen = batches_of(different), []
    sampler = range(BATCHES)
    if wrapper is not None:
        sampler = nt.ShardSampler(batches, shuffle=False, optimizer=optimizer)
    for _ in range(EPOCHS):
        for index in sampler:
            optimizer.zero_grad()
            model(batches[index]).square().mean().backward()
            optimizer.step()
        if wrapper is not None:
            optimizer.mean({})  # so that nobody is an epoch ahead
        seen.append({name: value.clone().numpy() for name, value in model.named_buffers()})
    role = "alone"
    if wrapper is not None:
        role = optimizer.role
        optimizer.close()
    return role, seen


if __name__ == "__main__":
    for different in (False, True):
        role, seen = train(different=different)
        if role in ("alone", "server 0"):
            found = {
                f"{epoch} {name}": value for epoch, each in enumerate(seen) for name, value in each.items()
            }
            np.savez(Path(sys.argv[1], f"different{different}.npz"), **found)
