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
# With so few variables the calls cost less than the function.
_FEW = 32


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
        # float32 variables that are large, or few, are taken one by one.
        alone = [s.dtype == "float32" and (s.size >= _LARGE or len(plain) <= _FEW) for _, s, _ in plain]
        self._alone = [(value, view) for (value, _, view), one in zip(plain, alone, strict=True) if one]
        together = [place for place, one in zip(plain, alone, strict=True) if not one]
        self._together = [(value, view) for value, _, view in together]
        self._pieces = [flat.vector[segment.place] for _, segment, _ in together]
        self._read = _reader([value for value, _, _ in together])
        self._write = _writer([(value, segment) for value, segment, _ in together], flat.vector.size)

    def read(self) -> None:
        """Copy the variables into the vector."""
        # What `_numpy` returns is TensorFlow's own memory, where `numpy` would copy it first.
        for value, view in self._alone:
            tensor = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=tf.float32)
            np.copyto(view, tensor._numpy())
        if self._together:
            packed, start = self._read()._numpy(), 0
            for piece in self._pieces:
                np.copyto(piece, packed[start : start + piece.size])
                start += piece.size
        for value, view in self._spread:
            np.copyto(view, value.numpy(), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        if self._vector.ctypes.data % _ALIGNMENT:
            for value, view in (*self._alone, *self._together):
                _assign(value, view)
        else:
            for value, view in self._alone:
                with self._host:
                    copy = tf.raw_ops.DeepCopy(x=_lent(view))
                tf.raw_ops.AssignVariableOp(resource=value.handle, value=copy)
            if self._together:
                self._write(_lent(self._vector))
        for value, view in self._spread:
            _assign(value, view)


def _reader(values: list[Any]) -> Any:
    """Make the function that returns variables one behind the other."""

    def read() -> Any:
        flat = [tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values]
        return tf.concat(flat, 0) if flat else tf.zeros(0)

    return tf.function(read, autograph=False).get_concrete_function()


def _writer(places: list[tuple[Any, Segment]], size: int) -> Any:
    """Make the function that cuts variables out of the vector."""

    def write(vector: Any) -> None:
        for value, segment in places:
            # To copy piece by piece leaves each variable with memory of its own, which a step can use again.
            with tf.device("CPU:0"):
                own = tf.raw_ops.DeepCopy(x=tf.slice(vector, [segment.offset], [segment.size]))
            own = tf.cast(own, value.dtype)
            value.assign(tf.reshape(own, segment.shape), read_value=False)

    signature = [tf.TensorSpec([size], tf.float32)]
    return tf.function(write, input_signature=signature, autograph=False).get_concrete_function()


def _lent(array: np.ndarray[Any, Any]) -> Any:
    """The array as a tensor that is the same memory."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _assign(value: Any, view: np.ndarray[Any, Any]) -> None:
    """The slow way: `tf.constant` copies."""
    value.assign(tf.cast(tf.constant(view), value.dtype))
