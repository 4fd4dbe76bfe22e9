"""A search whose coordinator is killed. On 5 ranks, under ULFM."""

from __future__ import annotations

import os
import signal
import threading

import optuna

from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

optuna.logging.set_verbosity(optuna.logging.WARNING)
if launched().rank == 0:
    threading.Timer(2, os.kill, [os.getpid(), signal.SIGKILL]).start()


def objective(trial):
    threading.Event().wait(0.2)
    return trial.suggest_float("x", 0, 1)


study = optuna.create_study()
optimize(study, objective, n_trials=500, block_size=2, sampler="random", journal="search.jsonl")
