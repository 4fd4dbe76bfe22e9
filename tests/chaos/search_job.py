"""A search of two blocks of two ranks, to be killed: every trial notes its parameter when it begins."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize

FOLDER, N_TRIALS = Path(sys.argv[1]), int(sys.argv[2])
optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    rate = trial.suggest_float("rate", 0.01, 0.3)
    with Participant(Downpour(), [np.ones(1, "f4")], optimizer=SGD(rate)) as me:
        if me.rank == 0:
            with (FOLDER / "begun").open("a") as begun:
                begun.write(f"{rate!r}\n")
        for _ in me.batches(range(10)):
            time.sleep(5e-3)
            me.gradients[0][:] = me.point[0]
            me.step()
    return float(me.parameters[0][0])


optimize(
    optuna.create_study(),
    objective,
    n_trials=N_TRIALS,
    block_size=2,
    sampler="random",
    journal=FOLDER / "search.jsonl",
    export=FOLDER / "search.log",
)
