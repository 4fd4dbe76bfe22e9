"""Train Keras with checkpoints; be interrupted where asked to be; leave all weights behind.

Started again with the same arguments but without an interruption it goes on.
"""

import os
import random
import signal
import sys
from pathlib import Path

import h5py
import keras
import numpy as np

import nnlo_keras as nk

EPOCHS = 3
SAMPLES = 40


class Stop(keras.callbacks.Callback):
    """Has the first worker stop before one of its batches; counts them; draws random numbers."""

    def __init__(self, at, how):
        super().__init__()
        self.at, self.how, self.done, self.drawn = at, how, 0, []

    def on_train_batch_begin(self, batch, logs=None):
        self.drawn.append(random.random() + np.random.random())  # noqa: NPY002

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.at:
            if self.how == "raise":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGUSR1)


def write(path):
    """Write a file of samples."""
    draw = np.random.default_rng(5)
    with h5py.File(path, "w") as file:
        file["x"] = draw.standard_normal((SAMPLES, 5)).astype("f4")
        file["y"] = draw.standard_normal((SAMPLES, 3)).astype("f4")


def train(
    folder,
    file,
    wrapper="Synchronous",
    stop_at=None,
    how="raise",
    data="hdf5",
    assignment="static",
    minutes=0,
    servers=1,
    group_size=None,
    **options,
):
    """Train; return the model, its history, and what was done."""
    keras.utils.set_random_seed(4)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2, seed=3),
            keras.layers.Dense(3),
        ]
    )
    makes, extra = keras.optimizers.Adam, {}
    if wrapper == "GEM":
        makes, extra = keras.optimizers.SGD, {"momentum": 0.9}
    ranks = {"servers": servers, "group_size": group_size}
    model.compile(getattr(nk, wrapper)(makes(0.01, **extra), **ranks, **options), "mse", metrics=["mae"])
    fitted = {"batch_size": 4, "shuffle": False}
    if data == "hdf5":
        given = {"features": "x", "labels": "y", "batch_size": 4, "window": 2, "assignment": assignment}
        samples = nk.H5Sequence(file, **given, **ranks)
        given, fitted = (samples,), {}
    else:
        with h5py.File(file) as opened:
            given = nk.shard(opened["x"][()], opened["y"][()], **ranks)
        fitted["shuffle"] = data == "shuffled"
    distribute = nk.Distribute()
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    stop = Stop(None, how)
    callbacks = [distribute, nk.Checkpoint(folder, minutes=minutes), scheduler, stop]
    if stop_at is not None:
        from nnlo_common.cluster._connecting import connect

        world = connect()
        alone = world is None or world.size == 1  # an earlier test may have begun MPI
        stop.at = stop_at if alone or world.rank == 1 else None
    history = model.fit(*given, epochs=EPOCHS, callbacks=callbacks, verbose=0, **fitted)
    if data == "hdf5":
        samples.close()
    state = [*model.weights, *model.optimizer.variables] if distribute.role == "alone" else model.weights
    weights = np.concatenate([np.ravel(keras.ops.convert_to_numpy(one)) for one in state])
    return weights, history, stop


if __name__ == "__main__":
    folder, result, stop_at, how, *rest = sys.argv[1:]
    options = dict(item.split("=") for item in rest)
    minutes = float(options.pop("minutes", 0))
    weights, history, stop = train(
        folder,
        Path(result).parent / "samples.h5",
        stop_at=int(stop_at) or None,
        how=how,
        minutes=minutes,
        **{name: int(value) if value.isdecimal() else value for name, value in options.items()},
    )
    from nnlo_common.cluster._connecting import connect

    np.savez(
        Path(result) / f"rank{connect().rank}.npz",
        weights=weights,
        done=stop.done,
        drawn=stop.drawn,
        loss=history.history["loss"],
        epochs=history.epoch,
    )
