"""A search whose idle blocks join running trials: what each trial has seen, on which rank, and with how many.

tune_elastic.py FOLDER TRIALS BLOCK_SIZE FOLDS [VICTIM]

A victim kills itself in the first epoch that more ranks train than a block has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import optuna
import torch

import nnlo_torch as nt
from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

FOLDER, (TRIALS, BLOCK_SIZE, FOLDS) = Path(sys.argv[1]), map(int, sys.argv[2:5])
VICTIM = int(sys.argv[5]) if sys.argv[5:] else None
RANK = launched().rank
TEAM = BLOCK_SIZE if BLOCK_SIZE % FOLDS else BLOCK_SIZE // FOLDS
optuna.logging.set_verbosity(optuna.logging.WARNING)
inputs = torch.linspace(-1, 1, 48).reshape(-1, 1)
data = torch.utils.data.TensorDataset(inputs, 2 * inputs + 1)


def objective(trial):
    torch.manual_seed(trial.seed)
    world, model = launched(), torch.nn.Linear(1, 1)
    rate = trial.suggest_float("rate", 0.01, 0.1)
    optimizer = nt.EASGD(torch.optim.SGD(model.parameters(), lr=rate), every=2)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=nt.ShardSampler(data))
    checkpoint = nt.Checkpoint(FOLDER / f"{trial.number}-{trial.fold}", optimizer)
    for epoch in checkpoint.epochs(3 + 5 * (trial.number == TRIALS - 1) + trial.fold):
        for x, target in checkpoint.batches(loader):
            if RANK == VICTIM and world.size > TEAM:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.005)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
        key = f"fold {trial.fold}"
        trial.set_user_attr(key, [*trial.user_attrs.get(key, []), [epoch, world.size]])
    return float(trial.seed % 97)


study = optimize(
    optuna.create_study(),
    objective,
    n_trials=TRIALS,
    block_size=BLOCK_SIZE,
    folds=FOLDS,
    retries=1,
    elastic=True,
    sampler="random",
)
seen = [
    {key: value for key, value in trial.user_attrs.items() if key.startswith(("fold ", "nnlo:failure"))}
    for trial in study.trials
]
if RANK == 0:
    print(json.dumps({"states": [trial.state.name for trial in study.trials], "seen": seen}), flush=True)
