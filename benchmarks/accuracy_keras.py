"""Train a small convolutional network on Fashion-MNIST with Keras; print the accuracy of the centre.

KERAS_BACKEND=torch python benchmarks/accuracy_keras.py                                  # one process
KERAS_BACKEND=torch mpiexec -n 3 python benchmarks/accuracy_keras.py --algorithm easgd   # 1 server, 2 workers

The network, the numbers of samples and the options are those of `accuracy_torch.py`. `accuracy_all.py` runs
and compares them.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from accuracy_options import options

import nnlo_keras as nk

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_data

WRAPPERS = {"downpour": nk.Downpour, "easgd": nk.EASGD, "gem": nk.GEM}


def plain(chosen):
    if chosen.optimizer == "adam":
        return keras.optimizers.Adam(chosen.learning_rate, beta_1=chosen.momentum)
    return keras.optimizers.SGD(chosen.learning_rate, momentum=chosen.momentum)


def wrapper(chosen):
    names = ("every", "group_size", "kappa", "lag")
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    return partial(WRAPPERS[chosen.algorithm], **given)


def rate_of(chosen):
    """Return the schedule of the learning rate by epoch."""

    def rate(epoch, _):
        cosine = (1 + math.cos(math.pi * epoch / chosen.epochs)) / 2
        return chosen.learning_rate * cosine * (chosen.warmup if epoch == 0 else 1.0)

    return rate


def split(data, validation):
    """Return training data and the data to measure on."""
    x, y = images(data.x_train), data.y_train
    if not validation:
        return (x, y), (images(data.x_test), data.y_test)
    return (x[:-validation], y[:-validation]), (x[-validation:], y[-validation:])


def images(rows):
    return rows.reshape(-1, 28, 28, 1)


def network():
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def train(chosen, seed, training, measured):
    keras.utils.set_random_seed(seed)
    model = network()
    model.compile(
        optimizer=wrapper(chosen)(plain(chosen)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distribute = nk.Distribute()
    start = time.perf_counter()
    model.fit(
        *nk.shard(*training, group_size=chosen.group_size),
        batch_size=chosen.batch,
        epochs=chosen.epochs,
        callbacks=[distribute, keras.callbacks.LearningRateScheduler(rate_of(chosen))],
        verbose=0,
    )
    seconds = time.perf_counter() - start
    reached = model.evaluate(*measured, batch_size=500, verbose=0, return_dict=True)["accuracy"]
    report = distribute.report
    distribute.say(
        f"seed={seed} accuracy={reached:.4f} seconds={seconds:.1f} "
        f"samples={chosen.epochs * len(training[0])} exchanges={report.exchanges} "
        f"staleness={report.mean_staleness:.3f}"
    )
    return reached, distribute


def main():
    chosen = options(__doc__)
    data = fashion_data.load(chosen.data)
    parts = split(data, chosen.validation)
    start = time.perf_counter()
    reached = []
    for seed in chosen.seeds:
        result, distribute = train(chosen, seed, *parts)
        reached.append(result)
    distribute.say(
        f"summary mean={statistics.mean(reached):.4f} min={min(reached):.4f} max={max(reached):.4f} "
        f"seconds={time.perf_counter() - start:.1f} "
        f"samples={len(chosen.seeds) * chosen.epochs * len(parts[0][0])} data={data.source!r}"
    )


if __name__ == "__main__":
    main()
