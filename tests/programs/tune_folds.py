"""A search with two folds side by side, which a signal may interrupt. On 5 ranks: folds of server and worker.

Arguments: "whole" or "interrupted", and the journal.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import optuna

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._endings import FOLDS
from nnlo_common.training._joining import launched

WHAT, JOURNAL = sys.argv[1], Path(sys.argv[2])
COORDINATOR = JOURNAL.with_suffix(".pid")
optuna.logging.set_verbosity(optuna.logging.WARNING)
X = np.random.default_rng(0).normal(size=100).astype("f4")


def objective(trial):
    lr = trial.suggest_float("lr", 0.01, 0.3)
    training, validation = trial.split(len(X))
    endless = WHAT == "interrupted" and trial.number == 2
    if endless:
        os.kill(int(COORDINATOR.read_text()), signal.SIGTERM)
    with Participant(Downpour(), [np.zeros(1, "f4")], optimizer=SGD(lr)) as me:
        for _ in range(100_000 if endless else 3):
            for index in me.batches(training):
                me.gradients[0][:] = me.point[0] - X[index]
                me.step()
    return float(np.mean((me.parameters[0][0] - X[validation]) ** 2))


if launched().rank == 0:
    COORDINATOR.write_text(str(os.getpid()))
launched().gather_text("")
study = optimize(
    optuna.create_study(), objective, n_trials=4, block_size=4, folds=2, sampler="random", journal=JOURNAL
)
found = [(trial.state.name, trial.value, trial.user_attrs[FOLDS]) for trial in study.trials]
assert len(set(launched().gather_text(repr(found)))) == 1
assert all(value == sum(folds) / 2 for _, value, folds in found)
if launched().rank == 0:
    print([state for state, *_ in found])
