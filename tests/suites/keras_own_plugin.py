"""A plug-in for pytest: Keras' own tests get every optimizer in a wrapper, and `Distribute` in every `fit`.

Only what the tests themselves and `compile` see is replaced: Keras makes its optimizers as ever.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from types import ModuleType

import keras
import pytest
from keras.src import optimizers
from keras.src.trainers import trainer

import nnlo_keras
from nnlo_keras._wrapper import Wrapper, wrapper_of

WRAPPER = os.environ.get("NNLO_SUITE_WRAPPER", "")
#: Those that hold other optimizers are Keras' own; what they hold is wrapped.
HOLDERS = tuple(
    getattr(keras.optimizers, name)
    for name in ("LossScaleOptimizer", "MultiOptimizer")
    if hasattr(keras.optimizers, name)
)


def wrapped(optimizer):
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, (Wrapper, *HOLDERS)):
        return optimizer
    return getattr(nnlo_keras, WRAPPER)(optimizer, name=optimizer.name)


class Making(type):
    """The type of a class that stands for an optimizer's, and makes it in a wrapper."""

    def __call__(cls, *args, **kwargs):
        return wrapped(cls.stands_for(*args, **kwargs))

    def __instancecheck__(cls, one):
        return isinstance(getattr(one, "inner_optimizer", one), cls.stands_for)

    def __getattr__(cls, name):
        return getattr(cls.stands_for, name)

    def from_config(cls, config, **options):
        return wrapped(cls.stands_for.from_config(config, **options))


def replacement(value):
    """What a test gets in place of something that it has imported."""
    if isinstance(value, type) and issubclass(value, keras.optimizers.Optimizer):
        plain = value in HOLDERS or value is keras.optimizers.Optimizer or issubclass(value, Wrapper)
        return value if plain else Making(value.__name__, (), {"stands_for": value})
    if value in (optimizers, keras.optimizers):
        return Seen(value)
    return Seen(keras) if value is keras else value


class Seen(ModuleType):
    """A module, in which optimizers are wrapped."""

    def __init__(self, module):
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name):
        value = getattr(self._module, name)
        if name in ("get", "deserialize") and self._module is not keras:
            return lambda *args, **kwargs: wrapped(value(*args, **kwargs))
        return replacement(value)


def with_distribute(fit):
    signature = inspect.signature(fit)

    @functools.wraps(fit)
    def fitted(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        callbacks, model = given.arguments.get("callbacks"), given.arguments["self"]
        listed = isinstance(callbacks, keras.callbacks.CallbackList)
        if not listed and wrapper_of(model.optimizer) is not None:
            several = isinstance(callbacks, (list, tuple))
            callbacks = callbacks if several else [callbacks] if callbacks else []
            given.arguments["callbacks"] = [*callbacks, nnlo_keras.Distribute()]
        return fit(*given.args, **given.kwargs)

    return fitted


def skip_if_backend(backend, reason):
    """What the tests import from Keras' conftest, which is not in its source distribution."""
    return pytest.mark.skipif(keras.backend.backend() == backend, reason=reason)


def pytest_configure(config):
    config.addinivalue_line("markers", "requires_trainable_backend: Keras' own; all of ours can train")
    sys.modules["conftest"] = sys.modules[__name__]
    if WRAPPER:
        trainer.optimizers = Seen(optimizers)
        keras.Model.fit = with_distribute(keras.Model.fit)
        keras.src.optimizers = Seen(optimizers)  # for what the tests keep when they are imported


def pytest_collection_modifyitems(items):
    keras.src.optimizers = optimizers
    for module in {item.module for item in items} if WRAPPER else ():
        for name, value in list(vars(module).items()):
            if isinstance(value, (type, ModuleType)):
                setattr(module, name, replacement(value))
