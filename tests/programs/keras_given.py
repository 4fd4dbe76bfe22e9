"""Data given to `fit` in every way on three ranks; what is warned of on which rank, and what is refused."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import nnlo_keras as nk
from nnlo_common import ConfigurationError
from nnlo_common.training._joining import launched

WORLD = launched()
draw = np.random.default_rng(2)
X = draw.standard_normal((60, 5)).astype("f4")
Y = X.sum(1, keepdims=True)
MINE = X[WORLD.rank :: 3], Y[WORLD.rank :: 3]


class Batches(keras.utils.PyDataset):
    """Batches of ten."""

    def __init__(self, x, y):
        super().__init__()
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x) // 10

    def __getitem__(self, index):
        return self.x[10 * index : 10 * index + 10], self.y[10 * index : 10 * index + 10]


def loader(x, y):
    return DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=10)


def generated():
    while True:
        yield X[:10], Y[:10]


CASES = {
    "all arrays": lambda: {"x": X, "y": Y},
    "all tensors in a dictionary": lambda: {"x": {"x": torch.tensor(X)}, "y": Y},
    "all batches": lambda: {"x": Batches(X, Y)},
    "all in a loader": lambda: {"x": loader(X, Y)},
    "shares": lambda: dict(zip("xy", nk.shard(X, Y), strict=True)),
    "own arrays": lambda: dict(zip("xy", MINE, strict=True)),
    "own batches": lambda: {"x": Batches(*MINE)},
    "own in a loader": lambda: {"x": loader(*MINE)},
    "shares of batches": lambda: {"x": nk.shard(Batches(X, Y))},
    "generated": lambda: {"x": generated(), "steps_per_epoch": 2},
    "own, split": lambda: {**dict(zip("xy", MINE, strict=True)), "validation_split": 0.5},
}


def fit(**data):
    """Train, and return the warnings of nnlo that this rank gave."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((5,), name="x"), keras.layers.Dense(1)])
    model.compile(optimizer=nk.Downpour(keras.optimizers.SGD(0.01)), loss="mse")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.fit(**data, epochs=1, verbose=0, callbacks=[nk.Distribute()])
    return [str(one.message) for one in seen if one.filename == "nnlo"]


def refused():
    """Train a model in a distribution, and one of its devices."""
    found = []
    distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    keras.distribution.set_distribution(distribution)
    try:
        fit(**CASES["shares"]())
    except ConfigurationError as error:
        found.append(str(error))
    keras.distribution.set_distribution(None)
    return found + fit(**CASES["shares"]())


told = {name: fit(**case()) for name, case in CASES.items()} | {"distribution": refused()}
Path(sys.argv[1], f"{WORLD.rank}.json").write_text(json.dumps(told))
