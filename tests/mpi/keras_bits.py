"""Train a model with each optimizer, plainly or through Downpour, and leave every rank's weights behind."""

import sys
from pathlib import Path

import numpy as np
from keras_cases import CASES, train, weights

import nnlo_keras as nk

folder, wrapper = Path(sys.argv[1]), sys.argv[2]
for name in CASES:
    if wrapper == "plain":
        np.savez(folder / f"{name}.plain.npz", *weights(train(name, lambda optimizer: optimizer)))
        continue
    distribute = nk.Distribute()

    def wrap(optimizer):
        return getattr(nk, wrapper)(optimizer)

    model = train(name, wrap, [distribute])
    role = "server" if distribute.role.startswith("server") else "worker"
    np.savez(folder / f"{name}.{role}.npz", *weights(model))
