"""JAX: arrays are read where they lie, and written by compiled functions.

What shaped this module:

* during an epoch the state is not in the variables but in the model. `jax_state_sync` brings it back, and
  makes the next step take it from there; what is written without it is lost without a word;
* JAX takes an aligned numpy array over without a copy and computes later, so that a write must wait until
  the vector has been read; what the function returns is never the vector, since a segment is always
  shorter than it;
* a function makes all its new arrays before an old one is freed. A large model is written in parts, so that
  the memory of one is used again for the next.
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

__all__ = ["JaxVariables", "memory_of"]

# As many numbers (16 MB) as one function writes; fewer cost more calls, more cost new memory.
_PART = 1 << 22


def memory_of(variable: keras.Variable, model: keras.Model | None) -> Callable[[], Vector]:
    """Return what shows a variable's own memory, which no step can use again meanwhile."""

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
            # What `asarray` returns is the array's own memory. It is dropped at once: as long as anybody
            # looks at it, a step cannot use it again.
            np.copyto(view, np.asarray(value_of(variable)), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        _sync(self._model, self._variables)
        for split, vector, variables in self._parts:
            for variable, piece in zip(variables, split(vector), strict=True):
                piece.block_until_ready()
                if is_spread(variable):
                    variable.assign(piece)
                else:
                    put_value(variable, piece)

    def attach(self) -> None:
        """Do nothing: the arrays of JAX never change."""

    def detach(self) -> None:
        """Do nothing."""


def _sync(model: keras.Model | None, variables: Iterable[keras.Variable]) -> None:
    """Have the values of these variables in them, where `fit` has taken them away."""
    if model is not None:
        model.jax_state_sync()
    for variable in variables:
        if away(variable):
            raise ConfigurationError(
                f"the variable {variable.path!r} is away while fit() runs; give flat_variables() the model "
                "it belongs to, and call it from a callback"
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
    """The part of the vector these segments lie in, with at least one number more."""
    return slice(segments[0].offset, segments[-1].place.stop + 1)


def _splitter(segments: list[Segment]) -> Any:
    """Make the function that cuts variables out of their part of the vector."""
    start = segments[0].offset

    def split(vector: Any) -> list[Any]:
        return [
            vector[segment.offset - start : segment.place.stop - start]
            .reshape(segment.shape)
            .astype(segment.dtype)
            for segment in segments
        ]

    return jax.jit(split)
