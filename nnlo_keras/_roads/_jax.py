"""JAX: arrays are read where they lie, and written by one compiled function.

What shaped this module:

* during an epoch the state is not in the variables but in the model. `jax_state_sync` brings it back, and
  makes the next step take it from there; what is written without it is lost without a word;
* JAX takes an aligned numpy array over without a copy and computes later, so that a write must wait until
  the vector has been read; what the function returns is never the vector, since a segment is always
  shorter than it.
"""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from nnlo_common import ConfigurationError, FlatVector, Segment

__all__ = ["JaxRoad"]


class JaxRoad:
    """A road to JAX arrays."""

    aliased = False

    def __init__(self, variables: list[keras.Variable], flat: FlatVector, model: keras.Model | None) -> None:
        self._model = model
        self._vector = flat.vector
        places = zip(variables, flat.layout.segments, flat.views(), strict=True)
        untied = [place for place in places if place[1].tied_to is None and place[1].size]
        self._places = [(variable, view) for variable, _, view in untied]
        self._split = _splitter([segment for _, segment, _ in untied])

    def read(self) -> None:
        """Copy the variables into the vector."""
        self._sync()
        for variable, view in self._places:
            # What `asarray` returns is the array's own memory. It is dropped at once: as long as anybody
            # looks at it, a step cannot use it again.
            np.copyto(view, np.asarray(variable._value), casting="unsafe")

    def write(self) -> None:
        """Copy the vector into the variables."""
        self._sync()
        pieces = self._split(self._vector)
        for (variable, _), piece in zip(self._places, pieces, strict=True):
            piece.block_until_ready()
            if variable._layout is None:
                variable._value = piece  # `assign` would do no more, in fifty times the time
            else:
                variable.assign(piece)  # spreads it over the devices of a keras.distribution

    def _sync(self) -> None:
        if self._model is not None:
            self._model.jax_state_sync()
        for variable, _ in self._places:
            if variable._value is None:
                raise ConfigurationError(
                    f"the variable {variable.path!r} is away while fit() runs; give road() the model it "
                    "belongs to, and call it from a callback"
                )


def _splitter(segments: list[Segment]) -> Any:
    """Make the function that cuts the variables out of the vector."""

    def split(vector: Any) -> list[Any]:
        cut = [vector[segment.place].reshape(segment.shape) for segment in segments]
        return [piece.astype(segment.dtype) for piece, segment in zip(cut, segments, strict=True)]

    return jax.jit(split)
