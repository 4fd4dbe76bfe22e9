"""A search of which a search rank is killed while it chooses. On 5 ranks, under ULFM, with a folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import optuna

from nnlo_common.search import optimize
from nnlo_common.training._joining import launched

VICTIM, OTHER = 2, 1
RANK = launched().rank
DIES = Path(sys.argv[1]) / "dies"
optuna.logging.set_verbosity(optuna.logging.WARNING)


class Deadly(optuna.samplers.TPESampler):
    def sample_relative(self, study, trial, search_space):
        while RANK == OTHER and trial.number > 5 and not DIES.exists():
            time.sleep(0.01)  # or it might choose for all trials
        if RANK == VICTIM and trial.number > 3:
            DIES.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().sample_relative(study, trial, search_space)


def objective(trial):
    return trial.suggest_float("x", -1, 1) ** 2


study = optimize(optuna.create_study(sampler=Deadly()), objective, n_trials=30, search_ranks=2)
print(sum(trial.state.name == "COMPLETE" for trial in study.trials), "complete", flush=True)
