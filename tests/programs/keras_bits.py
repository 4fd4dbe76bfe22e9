"""Train a model with each optimizer, plainly or through Downpour, and leave every rank's weights behind."""

import sys
from pathlib import Path

import keras
import numpy as np

import nnlo_keras as nk
from tests.helpers import keras_cases
from tests.helpers.keras_cases import Case, cases, step_by_step, train, train_case, weights

folder, table, wrapper = Path(sys.argv[1]), getattr(keras_cases, sys.argv[2]), sys.argv[3]


def leave(name, role, model):
    np.savez(folder / f"{name}.{role}.npz", *weights(model))


def exchanged(name, training, case, **options):
    """Train in this rank's part."""
    distribute = nk.Distribute()
    model = training(case, lambda optimizer: getattr(nk, wrapper)(optimizer, **options), [distribute])
    leave(name, "server" if distribute.role.startswith("server") else "worker", model)


for name in filter(step_by_step, cases(table)):
    if wrapper == "plain":
        leave(name, "plain", train(name, lambda optimizer: optimizer))
    else:
        exchanged(name, train, name)

if wrapper == "Downpour" and keras.backend.backend() != "torch":
    # Of five batches an epoch Keras lets us see the third and the fifth.
    at_once = Case(compile={"steps_per_execution": 3})
    exchanged("at once three", train_case, at_once)
    exchanged("every three", train_case, Case(), every=3)
