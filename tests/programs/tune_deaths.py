"""A search of which a rank is killed in the middle of a training. On 5 ranks, under ULFM."""

from __future__ import annotations

import os
import signal

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._endings import FAILURE
from nnlo_common.training._joining import launched

VICTIM = 2
RANK = launched().rank
optuna.logging.set_verbosity(optuna.logging.WARNING)


def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 0.3)
    with Participant(Downpour(), [np.zeros(20_000, "f4")], optimizer=SGD(lr)) as me:
        for index in me.batches(range(20)):
            if RANK == VICTIM and trial.number > 1 and index > 5:
                os.kill(os.getpid(), signal.SIGKILL)
            me.gradients[0][:] = me.point[0] - 1
            me.step()
    return float(me.parameters[0][0])


study = optimize(optuna.create_study(), objective, n_trials=4, block_size=2, retries=1, sampler="random")
complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
died = [trial for trial in study.trials if trial.user_attrs.get(FAILURE) == "died"]
print(f"{len(complete)} complete, {len(died)} died", flush=True)
