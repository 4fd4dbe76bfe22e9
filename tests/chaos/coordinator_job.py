"""A search whose coordinator and its spares are killed: every rank notes the trials that it begins."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.training._joining import launched
from tests.chaos import moments

folder, sampler, trials, spares = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANK = launched().rank
optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    rate = trial.suggest_float("rate", 0.01, 0.3)
    with Participant(Downpour(), [np.ones(1, "f4")], optimizer=SGD(rate)) as me:
        if me.rank == 0:
            begun.write(f"{time.monotonic()} {trial.number}\n")
            begun.flush()
        for _ in me.batches(range(10)):
            time.sleep(5e-3)
            me.gradients[0][:] = me.point[0]
            me.step()
    return float(me.parameters[0][0])


moments.write_where_it_hangs(folder, RANK)
(folder / f"pid{RANK}").write_text(str(os.getpid()))
with (folder / f"begun{RANK}").open("a") as begun:
    study = optimize(
        optuna.create_study(),
        objective,
        n_trials=trials,
        block_size=2,
        spares=spares,
        retries=1,
        sampler=sampler,
        journal=folder / "search.jsonl",
        export=folder / "search.log",
    )
states = sorted(trial.state.name for trial in study.trials)
(folder / f"ended{RANK}").write_text(" ".join(states))
