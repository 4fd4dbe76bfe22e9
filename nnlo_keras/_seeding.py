"""Seeding of all random generators, without loading a TensorFlow that nothing uses."""

from __future__ import annotations

import importlib
import sys

import keras

from nnlo_common.plugin import seed_random
from nnlo_keras._compat import seed_layers

__all__ = ["seed_generators"]


def seed_generators(number: int) -> None:
    """Seed Python, NumPy, Keras and its back end, and TensorFlow where it is loaded.

    `keras.utils.set_random_seed` does the same, but loads an installed TensorFlow on every back end, which
    takes each rank seconds and hundreds of megabytes.
    """
    seed_layers(number)  # an old Keras does not do this itself
    if sys.modules.get("tensorflow") is not None:
        keras.utils.set_random_seed(number)
        return
    seed_random(number)
    if keras.backend.backend() == "torch":
        importlib.import_module("torch").manual_seed(number)
