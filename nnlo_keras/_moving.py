"""The layers of a Keras model that move statistics by each batch, and how often they do.

Keras has no count of its own. A layer moves its statistics once in each call in training mode, so calls are
counted while `fit` runs. Where Python runs the training step that is all. Where it only traces the step, the
calls in a trace are those of each batch; the optimizer is applied once in a trace, so that says how many
traces there were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nnlo_common.protocol import Moving
from nnlo_keras._wrapper import Wrapper

__all__ = ["TrainingCalls", "moving_layers"]

_COUNTS = "nnlo_counts"


def moving_layers(model: Any, places: Mapping[int, slice]) -> dict[Any, Moving]:
    """Return the layers whose statistics are a moving average of batches, and where these lie.

    A layer with a `call` of its own may do something else.

    Args:
        model: the model.
        places: of variables, by their identity.
    """
    found = {}
    norm = keras.layers.BatchNormalization
    for layer in model._flatten_layers():
        if isinstance(layer, norm) and not layer.renorm and _calls_that_of(layer, norm):
            mean, variance = (places.get(id(one)) for one in (layer.moving_mean, layer.moving_variance))
            if mean is not None and variance is not None:
                found[layer] = Moving(mean, variance)
    return found


def _calls_that_of(layer: Any, kind: Any) -> bool:
    own = vars(layer).get("call")
    return type(layer).call is kind.call and (own is None or hasattr(own, _COUNTS))


@dataclass(eq=False)
class _Counts:
    """What has been counted of one training step: calls of each layer, and what each optimizer had before."""

    calls: list[int]
    before: list[int]


#: By the function that `fit` calls for each batch: it is traced in its first `fit` and used in later ones.
_COUNTED: weakref.WeakKeyDictionary[Any, _Counts] = weakref.WeakKeyDictionary()


class TrainingCalls:
    """Counts how often layers have moved their statistics in a `fit`.

    Args:
        model: the model; `fit` has made its training function.
        layers: those of it that are counted.
        wrappers: of its optimizers.

    Attributes:
        batches: on how many batches the model has been trained.
    """

    def __init__(self, model: Any, layers: Sequence[Any], wrappers: Sequence[Wrapper]) -> None:
        self._layers, self._wrappers = layers, wrappers
        torch = keras.backend.backend() == "torch"
        self._traced = bool(not model.run_eagerly and (not torch or model.jit_compile))
        step, applied = model.train_function, [wrapper.applied for wrapper in wrappers]
        counts = _COUNTED.get(step)
        if counts is None or len(counts.calls) != len(layers) or len(counts.before) != len(wrappers):
            counts = _COUNTED[step] = _Counts([0] * len(layers), applied)
        self._counts = counts
        # What is traced once may be done many times there; and a compiled torch step says nothing.
        self._loops = (
            set(map(id, layers)) if torch else {id(one) for loop in _loops(model) for one in _inside(loop)}
        )
        self.batches = 0
        self.mark()

    def begin(self) -> list[Callable[[], object]]:
        """Begin to count; return what ends it."""
        return [_counted(layer, index, self._counts) for index, layer in enumerate(self._layers)]

    def mark(self) -> None:
        """Count from here."""
        self._marked = self.batches, np.array(self._counts.calls, np.float64)

    def since(self) -> npt.NDArray[np.float64]:
        """Return how often each layer has moved its statistics since then; nan: not known."""
        batches, before = self._marked
        calls = np.array(self._counts.calls, np.float64)
        if not self._traced:
            return calls - before
        if self.batches == batches:
            return np.zeros(calls.size)
        applied = zip(self._wrappers, self._counts.before, strict=True)
        traces = min(wrapper.applied - earlier for wrapper, earlier in applied)
        known = [
            traces > 0 and count % traces == 0 and id(layer) not in self._loops
            for count, layer in zip(self._counts.calls, self._layers, strict=True)
        ]
        return np.where(known, calls / max(traces, 1) * (self.batches - batches), np.nan)


def _counted(layer: Any, index: int, counts: _Counts) -> Callable[[], object]:
    """Count a layer's calls in training mode; return what ends it."""
    vars(layer).pop("call", None)  # of a fit that has failed
    call = layer.call

    def counted(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if training and layer.trainable:
            counts.calls[index] += 1
        return call(inputs, training=training, mask=mask)

    setattr(counted, _COUNTS, counts)
    # What Keras keeps track of are variables and layers.
    object.__setattr__(layer, "call", counted)
    return lambda: vars(layer).pop("call", None)


def _loops(model: Any) -> list[Any]:
    kinds = (keras.layers.RNN, keras.layers.TimeDistributed)
    return [layer for layer in model._flatten_layers() if isinstance(layer, kinds)]


def _inside(layer: Any) -> list[Any]:
    return list(layer._flatten_layers(include_self=False))
