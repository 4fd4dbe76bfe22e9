"""Counts of how often the layers of a Keras model update their moving statistics.

Keras keeps no such count. A layer updates its statistics once per call in training mode, so calls are counted
while `fit` runs:

* on torch by Python, which makes all calls; with a compiled model the number is unknown;
* on TensorFlow by a variable within the training step, wherever in it the call is;
* on JAX by Python while it traces the training step. A call within a JAX loop or branch cannot update
  statistics, so a batch has as many calls as a trace. Each trace applies the optimizer once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nnlo_common.plugin import Moving
from nnlo_keras._compat import layers_of
from nnlo_keras._wrapper import Wrapper

__all__ = ["TrainingCalls", "moving_layers"]

_OURS = "nnlo_counts"


def moving_layers(model: Any, places: Mapping[int, slice]) -> dict[Any, Moving]:
    """Return the layers whose statistics are moving averages over batches, with the statistics' positions.

    Layers that override `call` are left out: they may update statistics differently.

    Args:
        model: the model.
        places: positions of variables, by identity.
    """
    found = {}
    norm = keras.layers.BatchNormalization
    for layer in layers_of(model):
        if isinstance(layer, norm) and not getattr(layer, "renorm", False) and _calls_that_of(layer, norm):
            mean, variance = (places.get(id(one)) for one in (layer.moving_mean, layer.moving_variance))
            if mean is not None and variance is not None:
                found[layer] = Moving(mean, variance)
    return found


def _calls_that_of(layer: Any, kind: Any) -> bool:
    own = vars(layer).get("call")
    return type(layer).call is kind.call and (own is None or hasattr(own, _OURS))


class _Calls:
    """A counter in Python."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """Count a call."""
        self._count += 1

    def read(self) -> int:
        """Return how many there have been."""
        return self._count


class _TracedCalls:
    """A counter in a TensorFlow variable, which also counts in a graph."""

    def __init__(self) -> None:
        import tensorflow as tf

        self._count = tf.Variable(0, trainable=False, dtype=tf.int64)

    def add(self) -> None:
        """Count a call."""
        self._count.assign_add(1)

    def read(self) -> int:
        """Return how many there have been."""
        return int(self._count.numpy())


class _Counts:
    """Counters of one training step.

    Args:
        layers: the number of layers.
        applied: how often the optimizer was applied before.
    """

    def __init__(self, layers: int, applied: int) -> None:
        kind = _TracedCalls if keras.backend.backend() == "tensorflow" else _Calls
        self.calls = [kind() for _ in range(layers)]
        self.applied = applied

    def read(self) -> npt.NDArray[np.float64]:
        """Return the calls of each layer."""
        return np.array([one.read() for one in self.calls], np.float64)


#: Counters by training function: it is traced in its first `fit` and reused in later ones.
_COUNTED: weakref.WeakKeyDictionary[Any, _Counts] = weakref.WeakKeyDictionary()


class TrainingCalls:
    """Counts how often layers have updated their statistics in a `fit`.

    Args:
        model: the model; `fit` has made its training function.
        layers: the model's layers to count.
        wrapper: the model's wrapped optimizer.

    Attributes:
        batches: number of batches that the model has been trained on.
    """

    def __init__(self, model: Any, layers: Sequence[Any], wrapper: Wrapper) -> None:
        self._layers, self._wrapper = layers, wrapper
        backend, step = keras.backend.backend(), model.train_function
        self._compiled = bool(backend == "torch" and model.jit_compile and not model.run_eagerly)
        self._traced = bool(backend == "jax" and model.jit_compile and not model.run_eagerly)
        counts = _COUNTED.get(step)
        if counts is None or len(counts.calls) != len(layers):
            counts = _COUNTED[step] = _Counts(len(layers), wrapper.applied)
        self._counts = counts
        self.batches = 0
        self.mark()

    def begin(self) -> list[Callable[[], object]]:
        """Start counting; return functions that stop it."""
        return [_counted(layer, one) for layer, one in zip(self._layers, self._counts.calls, strict=True)]

    def mark(self) -> None:
        """Count from here."""
        self._marked = self.batches, self._counts.read()

    def since(self) -> npt.NDArray[np.float64]:
        """Return how often each layer has updated its statistics since `mark`; nan: unknown."""
        batches, before = self._marked
        calls, done = self._counts.read(), self.batches - batches
        if not done:
            return np.zeros(calls.size)
        if self._compiled:
            return np.full(calls.size, np.nan)
        if not self._traced:
            return calls - before
        traces = self._wrapper.applied - self._counts.applied
        if not traces:
            return np.full(calls.size, np.nan)
        return np.where(calls % traces == 0, done * calls / traces, np.nan)


def _counted(layer: Any, calls: _Calls | _TracedCalls) -> Callable[[], object]:
    """Count a layer's calls in training mode; return a function that stops it."""
    vars(layer).pop("call", None)  # left over from a failed fit
    call = layer.call

    def counted(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training and layer.trainable:
            calls.add()
        return call(inputs, training=training, mask=mask)

    setattr(counted, _OURS, True)
    # Bypass Keras's __setattr__, which would search `counted` for variables and layers.
    object.__setattr__(layer, "call", counted)
    return lambda: vars(layer).pop("call", None)
