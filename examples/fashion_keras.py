"""Train a small network on Fashion-MNIST with Keras, on any number of ranks and any back end.

KERAS_BACKEND=torch python examples/fashion_keras.py                  # one process
KERAS_BACKEND=torch mpiexec -n 3 python examples/fashion_keras.py     # 1 server, 2 workers: Steady
KERAS_BACKEND=tensorflow mpiexec -n 3 python examples/fashion_keras.py --algorithm easgd

`fashion_keras_serial.py` is the same script without nnlo, for comparison.
"""

from __future__ import annotations

import argparse
import time

import fashion_data
import keras

import nnlo_keras as nk

WRAPPERS = {
    "steady": nk.Steady,
    "downpour": nk.Downpour,
    "synchronous": nk.Synchronous,
    "easgd": nk.EASGD,
    "gem": nk.GEM,
    "agn": nk.AGN,
    "dynsgd": nk.DynSGD,
    "localsgd": nk.LocalSGD,
    "diloco": lambda optimizer: nk.DiLoCo(optimizer, every=20),
}


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--algorithm", choices=WRAPPERS, default="steady")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--data", help="a folder with the full Fashion-MNIST")
    chosen = options.parse_args()
    data = fashion_data.load(chosen.data)

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        optimizer=WRAPPERS[chosen.algorithm](keras.optimizers.SGD(0.05, momentum=0.5)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    distribute, stopping = nk.Distribute(), keras.callbacks.EarlyStopping(patience=5)
    start = time.perf_counter()
    model.fit(
        *nk.shard(data.x_train, data.y_train),
        batch_size=25,
        epochs=chosen.epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=[distribute, stopping],
        verbose=2,
    )
    seconds = time.perf_counter() - start
    scores = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0, return_dict=True)
    summary = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
    distribute.say(f"{chosen.algorithm}, {data.source}: {summary}  {seconds:.2f} s")


if __name__ == "__main__":
    main()
