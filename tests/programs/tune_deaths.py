"""A search of which a rank is killed in the middle of a training. On 5 ranks, under ULFM, with a folder."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._trial_results import FAILURE
from nnlo_common.training._joining import launched

VICTIM, OTHER = 2, 4  # the workers of both blocks
RANK = launched().rank
DIES = Path(sys.argv[1]) / "dies"
optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 0.3)
    with Participant(Downpour(), [np.zeros(20_000, "f4")], optimizer=SGD(lr)) as me:
        for index in me.batches(range(20)):
            while RANK == OTHER and trial.number > 1 and not DIES.exists():
                time.sleep(0.01)  # or this block might do all trials
            if RANK == VICTIM and trial.number > 0 and index > 5:
                DIES.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            me.gradients[0][:] = me.point[0] - 1
            me.step()
    return float(me.parameters[0][0])


study = optimize(optuna.create_study(), objective, n_trials=4, block_size=2, retries=1, sampler="random")
complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
died = [trial for trial in study.trials if trial.user_attrs.get(FAILURE) == "died"]
print(f"{len(complete)} complete, {len(died)} died", flush=True)
