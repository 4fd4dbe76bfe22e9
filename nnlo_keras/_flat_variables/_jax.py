"""JAX variables in a flat vector: read in place, written by compiled functions.

Constraints that shaped this module:

* during an epoch the model holds the state, not the variables. `jax_state_sync` copies it back and makes the
  next step read the variables; a write without it is silently lost;
* JAX uses an aligned numpy array without a copy and computes later, so a write must wait until the vector has
  been read. The function's results never share the vector's memory, since a segment is always shorter;
* a function allocates all its results before an old array is freed. So a large model is written in parts:
  each part reuses the memory of the previous one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np

from nnlo_common import ConfigurationError, FlatVector, Segment
from nnlo_common.plugin import Vector
from nnlo_keras._compat import away, is_spread, put_value, value_of

__all__ = ["JaxVariables", "memory_of", "set_value", "spent_values"]

# Numbers (16 MB) that one function writes at most; fewer cost more calls, more cost new memory.
_PART = 1 << 22


def memory_of(variable: keras.Variable, model: keras.Model | None) -> Callable[[], Vector]:
    """Return a function that returns a variable's own memory; no step can reuse it while the array lives."""

    def look() -> Vector:
        _sync(model, [variable])
        memory: Vector = np.asarray(value_of(variable))
        return memory

    return look


class JaxVariables:
    """Copies of JAX arrays in the vector."""

    aliased = False

    def __init__(self, variables: list[keras.Variable], flat: FlatVector, model: keras.Model | None) -> None:
        self._model = model
        places = zip(variables, flat.layout.segments, flat.views(), strict=True)
        untied = [place for place in places if place[1].tied_to is None and place[1].size]
        self._places = [(variable, view) for variable, _, view in untied]
        self._variables = [variable for variable, _ in self._places]
        self._parts = [
            (_splitter(segments), flat.vector[_reach(segments)], members)
            for members, segments in _parts([(variable, segment) for variable, segment, _ in untied])
        ]

    def read(self) -> None:
        """Copy the variables into the vector."""
        _sync(self._model, self._variables)
        for variable, view in self._places:
            # `asarray` returns the array's own memory. Drop it at once: a step cannot reuse the memory while
            # a reference exists.
            np.copyto(view, np.asarray(value_of(variable)), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        _sync(self._model, self._variables)
        for split, vector, variables in self._parts:
            for variable, piece in zip(variables, split(vector), strict=True):
                set_value(variable, piece.block_until_ready())

    def attach(self) -> None:
        """Do nothing: JAX arrays are immutable."""

    def detach(self) -> None:
        """Do nothing."""


def _sync(model: keras.Model | None, variables: Iterable[keras.Variable]) -> None:
    """Put the values that `fit` holds back into these variables."""
    if model is not None:
        model.jax_state_sync()
    for variable in variables:
        if away(variable):
            raise ConfigurationError(
                f"the variable {variable.path!r} has no value while fit() runs; pass flat_variables() the "
                "model that owns it, and call it from a callback"
            )


def _parts(
    places: list[tuple[keras.Variable, Segment]],
) -> list[tuple[list[keras.Variable], list[Segment]]]:
    """Cut the variables, in the order of the vector, into parts that are written together."""
    parts: list[tuple[list[keras.Variable], list[Segment]]] = []
    for variable, segment in places:
        if not parts or segment.place.stop - parts[-1][1][0].offset > _PART:
            parts.append(([], []))
        parts[-1][0].append(variable)
        parts[-1][1].append(segment)
    return parts


def _reach(segments: list[Segment]) -> slice:
    """Return the part of the vector with these segments and at least one number more."""
    return slice(segments[0].offset, segments[-1].place.stop + 1)


def _splitter(segments: list[Segment]) -> Any:
    """Make a function that cuts variables out of their part of the vector."""
    start = segments[0].offset

    def split(vector: Any) -> list[Any]:
        return [
            vector[segment.offset - start : segment.place.stop - start]
            .reshape(segment.shape)
            .astype(segment.dtype)
            for segment in segments
        ]

    return jax.jit(split)


def spent_values(variables: Iterable[keras.Variable]) -> list[Any]:
    """Return the values of variables whose memory a compiled function may use for the next ones."""
    values = [value_of(variable) for variable in variables]
    # One that several variables have, e.g. by `assign`, is copied: memory can be used once.
    first = {id(value): index for index, value in reversed([*enumerate(values)])}
    return [
        value if first[id(value)] == index else jax.numpy.copy(value) for index, value in enumerate(values)
    ]


def set_value(variable: keras.Variable, value: Any) -> None:
    """Let a variable have a value that a compiled function has returned."""
    if is_spread(variable):
        variable.assign(value)
    else:
        put_value(variable, value)
