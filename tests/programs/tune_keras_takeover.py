"""A search of MPITuner whose first rank is killed in the middle. On 4 ranks, under ULFM."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import keras
import keras_tuner
import numpy as np

import nnlo_keras as nk
from nnlo_common.training._joining import launched

RANK = launched().rank
X = np.random.default_rng(0).standard_normal((96, 3)).astype("f4")
Y = X.sum(1, keepdims=True)


def kill():
    while not (folder / "untitled_project" / "trial_2").exists():
        time.sleep(1e-3)
    os.kill(os.getpid(), signal.SIGKILL)


def build(hp):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-1, sampling="log")), loss="mse")
    return model


folder = Path(launched().gather_text(tempfile.mkdtemp() if RANK == 0 else "")[0])
oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=6, seed=1)
tuner = nk.MPITuner(build, oracle, distribute=nk.Downpour, spares=1, directory=folder)
if RANK == 0:
    threading.Thread(target=kill, daemon=True).start()
tuner.search(X, Y, batch_size=8, epochs=2, verbose=0)
states = [trial.status for trial in tuner.oracle.trials.values()]
tuner.get_best_models()[0].evaluate(X, Y, verbose=0)
print(f"{states.count('COMPLETED')} completed, owner {RANK if tuner.has_directory else None}", flush=True)
