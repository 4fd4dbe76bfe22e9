"""A plug-in for pytest: keras-tuner's own tests of tuners get `MPITuner` as the base of every tuner.

They were written for 1.3.5, whose modules have moved; the installed ones stand in their places.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

import keras_tuner

WRAPPER = os.environ.get("NNLO_SUITE_WRAPPER", "")
MOVED = [
    *(f"engine.{name}" for name in ("base_tuner", "hypermodel", "hyperparameters", "oracle")),
    *(f"engine.{name}" for name in ("trial", "tuner", "tuner_utils")),
    *(f"tuners.{name}" for name in ("bayesian", "gridsearch", "hyperband", "randomsearch")),
]


def put_in_place(name, module):
    """Let a module be imported by another name."""
    parent, _, last = name.rpartition(".")
    setattr(importlib.import_module(parent), last, module)
    sys.modules[name] = module


def pytest_configure(config):
    tuners = [importlib.import_module(f"keras_tuner.src.{name}") for name in MOVED]
    for name, module in zip(MOVED, tuners, strict=True):
        put_in_place(f"keras_tuner.{name}", module)
    if importlib.util.find_spec("tensorboard") is None:  # one test of converting parameters needs it
        for name in ("tensorboard", "tensorboard.plugins", "tensorboard.plugins.hparams"):
            sys.modules[name] = ModuleType(name)
        put_in_place("tensorboard.plugins.hparams.api", ModuleType("api"))
    if WRAPPER:
        use_ours(tuners)


def use_ours(modules):
    from nnlo_keras.tune import MPITuner

    class Ours(MPITuner):
        """Takes the oracle first, as `keras_tuner.Tuner` does."""

        def __init__(self, oracle, hypermodel=None, **options):
            super().__init__(hypermodel, oracle, **options)

    plain = keras_tuner.Tuner
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type) and plain in value.__bases__:
                value.__bases__ = (Ours,)
    keras_tuner.Tuner = sys.modules["keras_tuner.engine.tuner"].Tuner = Ours
