"""Search for the best learning rate and network of Fashion-MNIST with keras-tuner, over blocks of ranks.

python examples/optimise_keras.py                    # one trial after another, as keras-tuner does
mpiexec -n 5 python examples/optimise_keras.py       # 1 coordinator, 2 blocks of 1 server and 1 worker
mpiexec -n 5 python examples/optimise_keras.py --folds 2 --block-size 4 --oracle evolutionary
"""

from __future__ import annotations

import argparse

import fashion_data
import keras

import nnlo_keras as nk


def build(hp):
    width = hp.Int("width", 8, 128, sampling="log")
    layers = [keras.layers.Dense(width, activation="relu") for _ in range(hp.Int("layers", 1, 2))]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    rate = hp.Float("rate", 1e-3, 0.5, sampling="log")
    model.compile(
        optimizer=nk.Downpour(keras.optimizers.SGD(rate)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--block-size", type=int, default=2)
    options.add_argument("--trials", type=int, default=8)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--folds", type=int, default=1)
    options.add_argument("--oracle", default="bayesian")
    options.add_argument(
        "--directory", default="search", help="rerun the same command to resume the search in it"
    )
    chosen = options.parse_args()
    data = fashion_data.load(None)
    tuner = nk.MPITuner(
        build,
        chosen.oracle,
        objective="val_accuracy",
        max_trials=chosen.trials,
        seed=0,
        block_size=chosen.block_size,
        folds=chosen.folds,
        directory=chosen.directory,
        project_name="fashion",
    )
    held_out = {"validation_data": (data.x_test, data.y_test)} if chosen.folds == 1 else {}
    tuner.search(data.x_train, data.y_train, batch_size=25, epochs=chosen.epochs, **held_out)
    tuner.results_summary(3)


if __name__ == "__main__":
    main()
