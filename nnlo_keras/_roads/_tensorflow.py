"""TensorFlow: variables are read and written without a copy on TensorFlow's side.

What shaped this module:

* every eager operation costs microseconds, so that small variables go through one compiled function, which
  reads or writes them all;
* a function that handles everything makes all new buffers before it frees an old one; large variables are
  written one by one, so that the memory of one is used again for the next;
* a numpy array can be lent to TensorFlow (DLPack), but what is assigned from it *is* the array then, until
  it is updated: hence DeepCopy. If the array does not start on a cache line the process is aborted by the
  next operation, so that such memory is never lent;
* the address of a variable changes at nearly every step, so that none is kept.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nnlo_common import FlatVector, Segment

__all__ = ["TensorFlowRoad"]

_ALIGNMENT = 64
# From so many numbers on (256 KB) to call an operation costs less than a function's way of copying.
_LARGE = 65536


class TensorFlowRoad:
    """A road to `tf.Variable`s."""

    aliased = False

    def __init__(self, variables: list[keras.Variable], flat: FlatVector) -> None:
        self._vector = flat.vector
        # A copy on the host has been made when the call returns; one to another device may still go on.
        self._host = tf.device("CPU:0")
        places = list(zip(variables, flat.layout.segments, flat.views(), strict=True))
        places = [place for place in places if place[1].tied_to is None and place[1].size]
        # Values spread over devices by tf.distribute know by themselves how they are read and written.
        spread = [isinstance(variable.value, tf.distribute.DistributedValues) for variable, _, _ in places]
        self._spread = [(v.value, view) for (v, _, view), apart in zip(places, spread, strict=True) if apart]
        plain = [
            (variable.value, segment, view)
            for (variable, segment, view), apart in zip(places, spread, strict=True)
            if not apart
        ]
        self._large = [(value, view) for value, segment, view in plain if _is_large(segment)]
        self._small = [(value, view) for value, segment, view in plain if not _is_large(segment)]
        self._read = _reader([value for value, _ in self._large], [value for value, _ in self._small])
        few = [(value, segment) for value, segment, _ in plain if not _is_large(segment)]
        self._write = _writer(few, flat.vector.size)

    def read(self) -> None:
        """Copy the variables into the vector."""
        large, small = self._read()
        for (_, view), tensor in zip(self._large, large, strict=True):
            # The view `_numpy` returns is the variable's own memory, where `numpy` would copy it first.
            np.copyto(view, _flat_view(tensor).reshape(view.shape))
        together, start = _flat_view(small), 0
        for _, view in self._small:
            np.copyto(view, together[start : start + view.size].reshape(view.shape))
            start += view.size
        for value, view in self._spread:
            np.copyto(view, value.numpy(), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        if self._vector.ctypes.data % _ALIGNMENT:
            for value, view in (*self._large, *self._small):
                _assign(value, view)
        else:
            for value, view in self._large:
                with self._host:
                    copy = tf.raw_ops.DeepCopy(x=_lent(view))
                tf.raw_ops.AssignVariableOp(resource=value.handle, value=copy)
            if self._small:
                self._write(_lent(self._vector))
        for value, view in self._spread:
            _assign(value, view)


def _is_large(segment: Segment) -> bool:
    return segment.size >= _LARGE and segment.dtype == "float32"


def _reader(large: list[Any], small: list[Any]) -> Any:
    """Make the function that returns each large variable, and all small ones in one tensor."""

    def read() -> tuple[list[Any], Any]:
        flat = [tf.reshape(tf.cast(value, tf.float32), [-1]) for value in small]
        values = [tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=tf.float32) for value in large]
        return values, tf.concat(flat, 0) if flat else tf.zeros(0)

    return tf.function(read, autograph=False).get_concrete_function()


def _writer(few: list[tuple[Any, Segment]], size: int) -> Any:
    """Make the function that cuts the small variables out of the vector."""

    def write(vector: Any) -> None:
        for value, segment in few:
            # To copy piece by piece leaves each variable with memory of its own, which a step can use again.
            with tf.device("CPU:0"):
                own = tf.raw_ops.DeepCopy(x=tf.slice(vector, [segment.offset], [segment.size]))
            own = tf.cast(own, value.dtype)
            value.assign(tf.reshape(own, segment.shape), read_value=False)

    signature = [tf.TensorSpec([size], tf.float32)]
    return tf.function(write, input_signature=signature, autograph=False).get_concrete_function()


def _flat_view(tensor: Any) -> Any:
    return tensor._numpy().reshape(-1)


def _lent(array: np.ndarray[Any, Any]) -> Any:
    """The array as a tensor that is the same memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _assign(value: Any, view: np.ndarray[Any, Any]) -> None:
    """The slow way: `tf.constant` copies."""
    value.assign(tf.cast(tf.constant(view), value.dtype))
