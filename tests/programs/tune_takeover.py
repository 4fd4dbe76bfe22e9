"""A search whose coordinator is killed after the first trial has begun. On 6 ranks, under ULFM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

RANK = launched().rank
FOLDER, AFTER_S = Path(sys.argv[1]), float(sys.argv[2])
TRIALS = 60
optuna.logging.set_verbosity(optuna.logging.WARNING)


def kill():
    while not (FOLDER / "begun").exists():
        time.sleep(1e-3)
    time.sleep(AFTER_S)
    os.kill(os.getpid(), signal.SIGKILL)


def objective(trial):
    if RANK % 2:  # the first of its block
        with (FOLDER / "begun").open("a") as file:
            file.write(f"{trial.number}\n")
    lr = trial.suggest_float("lr", 0.01, 0.3)
    with Participant(Downpour(), [np.zeros(2000, "f4")], optimizer=SGD(lr)) as me:
        for epoch in range(3):
            for _ in me.batches(range(5)):
                me.gradients[0][:] = me.point[0] - 1
                me.step()
            trial.report(float(epoch), epoch)
            trial.should_prune()
    return float(me.parameters[0][0])


if RANK == 0:
    threading.Thread(target=kill, daemon=True).start()
study = optimize(
    optuna.create_study(),
    objective,
    n_trials=TRIALS,
    block_size=2,
    spares=1,
    sampler="random",
    journal=FOLDER / "search.jsonl",
)
states = {trial.state.name for trial in study.trials}
print(f"{len(study.trials)} {sorted(states)}", flush=True)
