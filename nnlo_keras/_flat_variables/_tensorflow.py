"""TensorFlow variables in a flat vector: read and written without a copy on TensorFlow's side.

Constraints that shaped this module:

* every eager operation costs microseconds, so one compiled function reads or writes all small variables;
* a numpy array can be lent to TensorFlow (DLPack), but a variable assigned from it *is* the array then. So a
  copy of the vector is lent, and reused only once no tensor shares it: values read from a variable must never
  change;
* an array that does not start on a cache line aborts the process at the next operation; all of ours do;
* if no other code reads a variable between two steps, it may be lent the vector itself. TensorFlow never
  writes to memory that it does not own: a step that changes such a variable gives it new memory, so reads
  compare addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from nnlo_common import FlatVector, Frame, Segment
from nnlo_common.plugin import Vector
from nnlo_keras._compat import memory_of_tensor

__all__ = ["TensorFlowVariables", "memory_of"]

# Variables of at least this many numbers (256 KB) are copied by one operation each, not by the function.
_LARGE = 65536
# Up to this many variables, one operation each costs less than the function.
_FEW = 32


def memory_of(variable: keras.Variable) -> Callable[[], Vector]:
    """Return a function that returns a variable's own memory; `numpy` would copy it."""
    return partial(_memory, variable.value.handle)


def _memory(handle: Any) -> Any:
    return memory_of_tensor(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32))


class TensorFlowVariables:
    """Copies of `tf.Variable`s in the vector."""

    def __init__(self, variables: list[keras.Variable], flat: FlatVector) -> None:
        self._vector, self._copies = flat.vector, _Copies()
        places = list(zip(variables, flat.layout.segments, flat.views(), strict=True))
        places = [place for place in places if place[1].tied_to is None and place[1].size]
        # tf.distribute's values on several devices have their own way to read and write.
        spread = [isinstance(variable.value, tf.distribute.DistributedValues) for variable, _, _ in places]
        self._spread = [(v.value, view) for (v, _, view), apart in zip(places, spread, strict=True) if apart]
        plain = [
            _VariableSlice(variable.value, segment, view)
            for (variable, segment, view), apart in zip(places, spread, strict=True)
            if not apart
        ]
        self._floats = [place for place in plain if place.segment.dtype == "float32"]
        # Large variables, or few, are copied one by one.
        large = 0 if len(plain) <= _FEW else _LARGE
        self._alone = [place for place in self._floats if place.segment.size >= large]
        self._small = _Together([place for place in self._floats if place.segment.size < large], flat)
        self._other = _Together([place for place in plain if place.segment.dtype != "float32"], flat)
        self.aliased = False

    def read(self) -> None:
        """Copy the variables into the vector."""
        for place in self._floats if self.aliased else self._alone:
            value = place.read()
            if not (self.aliased and _address(value) == place.address):
                np.copyto(place.view, value)
                if self.aliased:
                    place.lend(place.view)
        if not self.aliased:
            self._small.read()
        self._other.read()
        for variable, view in self._spread:
            np.copyto(view, variable.numpy(), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        if not self.aliased or self._other:
            copy = self._copies.of(self._vector)
            if not self.aliased:
                for place in self._alone:
                    place.lend(copy.part(place.segment))
                self._small.write(copy)
            self._other.write(copy)
        for variable, view in self._spread:
            variable.assign(tf.cast(tf.constant(view), variable.dtype))

    def attach(self) -> None:
        """Make the variables views of the vector."""
        self.write()
        for place in self._floats:
            place.lend(place.view)
        self.aliased = bool(self._floats)

    def detach(self) -> None:
        """Give the variables their own memory."""
        if self.aliased:
            self.aliased = False
            self.write()


class _VariableSlice:
    """A variable and its slice of the vector."""

    def __init__(self, variable: Any, segment: Segment, view: Any) -> None:
        self.variable, self.segment, self.view = variable, segment, view
        self.address = _address(view)

    def read(self) -> Any:
        """Return the variable's own memory."""
        return _memory(self.variable.handle)

    def lend(self, memory: Any) -> None:
        """Make the variable use this memory."""
        tensor = tf.experimental.dlpack.from_dlpack(memory.__dlpack__())
        tf.raw_ops.AssignVariableOp(resource=self.variable.handle, value=tensor)


class _Copy:
    """A copy of the vector whose memory tensors may share."""

    def __init__(self, size: int) -> None:
        self.vector = Frame(size).vector
        self._lent: list[weakref.ref[Any]] = []

    @property
    def free(self) -> bool:
        """Whether no tensor shares it any more."""
        return all(piece() is None for piece in self._lent)

    def part(self, segment: Segment) -> Any:
        """Return the memory of a segment; it is in use as long as that array lives."""
        piece = self.vector[segment.place].reshape(segment.shape)
        self._lent.append(weakref.ref(piece))
        return piece

    def lend(self) -> Any:
        """Return a tensor that shares all of it."""
        piece = self.vector[:]
        self._lent.append(weakref.ref(piece))
        return tf.experimental.dlpack.from_dlpack(piece.__dlpack__())

    def begin(self) -> None:
        """Forget earlier loans."""
        self._lent.clear()


class _Copies:
    """Pool of copies of a vector."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def of(self, vector: Vector) -> _Copy:
        """Return a copy of `vector` that no tensor shares yet."""
        copy = next((one for one in self._copies if one.free), None)
        if copy is None:
            copy = _Copy(vector.size)
            self._copies.append(copy)
        copy.begin()
        np.copyto(copy.vector, vector)
        return copy


class _Together:
    """Variables read by one compiled function and written by another."""

    def __init__(self, places: list[_VariableSlice], flat: FlatVector) -> None:
        self._pieces = [flat.vector[place.segment.place] for place in places]
        if places:
            self._read, self._write = _reader(places), _writer(places, flat.vector.size)

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def read(self) -> None:
        """Copy the variables into the vector."""
        if self:
            packed, start = memory_of_tensor(self._read()), 0
            for piece in self._pieces:
                np.copyto(piece, packed[start : start + piece.size])
                start += piece.size

    def write(self, copy: _Copy) -> None:
        """Write the copied vector into the variables."""
        if self:
            self._write(copy.lend())


def _reader(places: list[_VariableSlice]) -> Any:
    """Make a function that returns the variables concatenated."""

    def read() -> Any:
        return tf.concat([tf.reshape(tf.cast(place.variable, tf.float32), [-1]) for place in places], 0)

    return tf.function(read, autograph=False).get_concrete_function()


def _writer(places: list[_VariableSlice], size: int) -> Any:
    """Make a function that cuts variables out of the vector."""

    def write(vector: Any) -> None:
        for place in places:
            segment, variable = place.segment, place.variable
            piece = tf.cast(tf.slice(vector, [segment.offset], [segment.size]), variable.dtype)
            variable.assign(tf.reshape(piece, segment.shape), read_value=False)

    signature = [tf.TensorSpec([size], tf.float32)]
    return tf.function(write, input_signature=signature, autograph=False).get_concrete_function()


def _address(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
