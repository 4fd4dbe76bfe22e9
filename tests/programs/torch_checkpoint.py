"""Train with checkpoints; be interrupted where asked to be; leave every rank's weights behind at the end.

Started again with the same arguments but without an interruption it goes on.
"""

import os
import random
import signal
import sys
from pathlib import Path

import h5py
import numpy as np
import torch

import nnlo_torch as nt
from tests.helpers.torch_cases import SAMPLES, data, initialised, loss_of

EPOCHS = 3


def samples_of_epoch(model, optimizer, loader, after_step=lambda: None):
    """Train on what a loader has, and return how many samples that was."""
    taken = 0
    for x in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        taken += len(x)
        after_step()
    return taken


def train(
    folder,
    wrapper="Synchronous",
    stop_at=None,
    how="raise",
    assignment="static",
    file=None,
    waits=False,
    **options,
):
    """Train, and return the weights of this rank.

    Worker 0 stops before batch `stop_at`; with `waits` before the first one from there on at which a
    checkpoint is whole, as other ranks write their parts when they get to it.
    """
    torch.manual_seed(4)
    random.seed(4)
    np.random.seed(4)  # noqa: NPY002
    model = initialised(
        torch.nn.Sequential(
            torch.nn.Linear(5, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 3)
        )
    )
    makes = torch.optim.SGD if wrapper == "GEM" else torch.optim.Adam
    extra = {"momentum": 0.9} if wrapper == "GEM" else {}
    optimizer = getattr(nt, wrapper)(makes(model.parameters(), lr=0.01, **extra), model=model, **options)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[7, 15])
    x, y = data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y),
        batch_size=4,
        sampler=nt.ShardSampler(range(SAMPLES), seed=3, assignment=assignment),
    )
    if file is not None:
        loader = nt.H5Batches(
            file, features="x", labels="y", batch_size=4, seed=3, window=2, assignment=assignment
        )
    checkpoint = nt.Checkpoint(folder, optimizer, also={"schedule": schedule}, epochs=2, batches=3)
    done, used = 0, []
    for _ in checkpoint.epochs(EPOCHS):
        for inputs, targets in checkpoint.batches(loader):
            done += 1
            due = stop_at is not None and done >= stop_at and optimizer.share[0] == 0
            if due and (not waits or list(Path(folder).glob("checkpoint-*/manifest.json"))):
                stop_at = None
                if how == "raise":
                    raise KeyboardInterrupt
                os.kill(os.getpid(), signal.SIGUSR1)
            optimizer.zero_grad()
            noise = random.random() * np.random.random()  # noqa: NPY002
            loss_of(model, inputs + 0.1 * noise, targets).backward()
            optimizer.step()
            schedule.step()
            used.append(len(inputs))
        optimizer.mean({}, 0)
    optimizer.close()
    if file is not None:
        loader.close()
    weights = [tensor.detach().float().numpy().ravel() for tensor in model.state_dict().values()]
    return optimizer, np.concatenate(weights), done


def write(path):
    """Write the samples to a file."""
    x, y = data()
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = x.numpy(), y.numpy()


if __name__ == "__main__":
    folder, result, stop_at, how, *rest = sys.argv[1:]
    options = dict(item.split("=") for item in rest)
    optimizer, weights, done = train(
        folder,
        stop_at=int(stop_at) or None,
        how=how,
        waits=True,
        **{name: int(value) if value.isdecimal() else value for name, value in options.items()},
    )
    np.savez(Path(result) / f"rank{optimizer.rank}.npz", weights=weights, done=done)
