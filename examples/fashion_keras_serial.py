"""The serial twin of `fashion_keras.py`: the same network and data in a plain Keras `fit`, without nnlo."""

from __future__ import annotations

import argparse
import time

import fashion_data
import keras


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        optimizer=keras.optimizers.SGD(0.05, momentum=0.5),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    stopping = keras.callbacks.EarlyStopping(patience=5)
    start = time.perf_counter()
    model.fit(
        data.x_train,
        data.y_train,
        batch_size=25,
        epochs=chosen.epochs,
        validation_data=(data.x_test, data.y_test),
        callbacks=[stopping],
        verbose=2,
    )
    seconds = time.perf_counter() - start
    scores = model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0, return_dict=True)
    summary = "  ".join(f"{name} {value:.4f}" for name, value in scores.items())
    print(f"serial, {data.source}: {summary}  {seconds:.2f} s")


if __name__ == "__main__":
    main()
