"""A network for Fashion-MNIST, Keras, and what `nnlo tune` is to search; see `fashion_files.py`."""

from __future__ import annotations

import keras


def get_model(width=64, depth=1, dropout=0.0):
    layers = [keras.layers.Input((784,))]
    for _ in range(depth):
        layers += [keras.layers.Dense(width, activation="relu"), keras.layers.Dropout(dropout)]
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def get_space():
    return {
        "width": {"low": 16, "high": 128, "log": True},
        "depth": [1, 2],
        "dropout": (0.0, 0.5),
        "learning_rate": {"low": 1e-4, "high": 3e-2, "log": True},
    }


cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
