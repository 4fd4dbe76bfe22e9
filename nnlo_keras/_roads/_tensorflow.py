"""TensorFlow: variables are read and written without a copy on TensorFlow's side.

What shaped this module:

* every eager operation costs microseconds, so that small variables go through one compiled function, which
  reads or writes them all;
* a numpy array can be lent to TensorFlow (DLPack), but what is assigned from it *is* the array then, until it
  is updated in place: so a copy of the vector is lent, and copied into again when no tensor is a part of it
  any more. Whatever somebody has read from a variable never changes;
* if the array does not start on a cache line the process is aborted by the next operation: ours all do;
* the address of a variable changes at nearly every step, so that none is kept.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nnlo_common import FlatVector, Frame, Segment
from nnlo_common._flat import Vector

__all__ = ["TensorFlowRoad"]

# From so many numbers on (256 KB) to call an operation costs less than a function's way of copying.
_LARGE = 65536
# With so few variables the calls cost less than the function.
_FEW = 32


class TensorFlowRoad:
    """A road to `tf.Variable`s."""

    aliased = False

    def __init__(self, variables: list[keras.Variable], flat: FlatVector) -> None:
        self._vector, self._copies = flat.vector, _Copies()
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
        self._alone = [(value, segment) for (value, segment, _), one in zip(plain, alone, strict=True) if one]
        together = [place for place, one in zip(plain, alone, strict=True) if not one]
        self._together = bool(together)
        self._pieces = [flat.vector[segment.place] for _, segment, _ in together]
        self._read = _reader([value for value, _, _ in together])
        self._write = _writer([(value, segment) for value, segment, _ in together], flat.vector.size)

    def read(self) -> None:
        """Copy the variables into the vector."""
        # What `_numpy` returns is TensorFlow's own memory, where `numpy` would copy it first.
        for value, segment in self._alone:
            tensor = tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=tf.float32)
            np.copyto(self._vector[segment.place].reshape(segment.shape), tensor._numpy())
        if self._together:
            packed, start = self._read()._numpy(), 0
            for piece in self._pieces:
                np.copyto(piece, packed[start : start + piece.size])
                start += piece.size
        for value, view in self._spread:
            np.copyto(view, value.numpy(), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        copy = self._copies.of(self._vector)
        for value, segment in self._alone:
            piece = copy.lend(segment.place, segment.shape)
            tf.raw_ops.AssignVariableOp(resource=value.handle, value=piece)
        if self._together:
            self._write(copy.lend(slice(None), self._vector.shape))
        for value, view in self._spread:
            value.assign(tf.cast(tf.constant(view), value.dtype))


class _Copy:
    """A copy of the vector that tensors may be parts of."""

    def __init__(self, size: int) -> None:
        self.vector = Frame(size).vector
        self._lent: list[weakref.ref[Any]] = []

    @property
    def free(self) -> bool:
        """Whether no tensor is a part of it any more."""
        return all(piece() is None for piece in self._lent)

    def lend(self, place: slice, shape: tuple[int, ...]) -> Any:
        """Return a tensor that is the same memory; it keeps the array that we have an eye on."""
        piece = self.vector[place].reshape(shape)
        self._lent.append(weakref.ref(piece))
        return tf.experimental.dlpack.from_dlpack(piece.__dlpack__())

    def begin(self) -> None:
        """Forget who had it."""
        self._lent.clear()


class _Copies:
    """As many copies of a vector as are in use."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def of(self, vector: Vector) -> _Copy:
        """Return a copy of `vector` that nobody has yet."""
        copy = next((one for one in self._copies if one.free), None)
        if copy is None:
            copy = _Copy(vector.size)
            self._copies.append(copy)
        copy.begin()
        np.copyto(copy.vector, vector)
        return copy


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
            piece = tf.cast(tf.slice(vector, [segment.offset], [segment.size]), value.dtype)
            value.assign(tf.reshape(piece, segment.shape), read_value=False)

    signature = [tf.TensorSpec([size], tf.float32)]
    return tf.function(write, input_signature=signature, autograph=False).get_concrete_function()
