"""A search of MPITuner of which a rank is killed in the middle of a training. On 5 ranks, under ULFM."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import keras
import keras_tuner
import numpy as np

import nnlo_keras as nk
from nnlo_common.training._joining import launched

VICTIM, OTHER = 2, 4  # the workers of both blocks
RANK = launched().rank
X = np.random.default_rng(0).standard_normal((96, 3)).astype("f4")
Y = X.sum(1, keepdims=True)


class Death(keras.callbacks.Callback):
    """Kills the worker of the first block; the second block begins no third trial before."""

    def on_train_batch_end(self, batch, logs=None):
        while RANK == OTHER and len(tuner.oracle.trials) > 2 and not (folder / "dies").exists():
            time.sleep(0.01)  # or this block might do all trials
        if RANK == VICTIM and batch == 3 and len(tuner.oracle.trials) > 1:
            (folder / "dies").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def build(hp):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-1, sampling="log")), loss="mse")
    return model


folder = Path(launched().gather_text(tempfile.mkdtemp() if RANK == 0 else "")[0])
oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=5, seed=1, max_retries_per_trial=1)
tuner = nk.MPITuner(build, oracle, distribute=nk.Downpour, block_size=2, directory=folder)
tuner.search(X, Y, batch_size=8, epochs=2, callbacks=[Death()], verbose=0)
states = [trial.status for trial in tuner.oracle.trials.values()]
tries = sum(tuner.oracle._run_times.values())
tuner.get_best_models()[0].evaluate(X, Y, verbose=0)
print(f"{states.count('COMPLETED')} completed in {tries} tries", flush=True)
