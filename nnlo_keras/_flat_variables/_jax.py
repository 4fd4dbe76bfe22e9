"""JAX variables in a flat vector: read in place, written by compiled functions.

Constraints that shaped this module:

* during an epoch the model holds the state, not the variables. `jax_state_sync` copies it back and makes the
  next step read the variables; a write without it is silently lost;
* JAX uses an aligned numpy array without a copy and computes later, so a write must wait until the vector has
  been read. The function's results never share the vector's memory, since a segment is always shorter;
* new memory costs more than what is computed in it. So the functions write where the old values are, which
  are gone then, as Keras does in its own training steps.
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
        self._vector, self._split = flat.vector, _splitter([segment for _, segment, _ in untied])

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
        pieces = self._split(self._vector, spent_values(self._variables))
        for variable, piece in zip(self._variables, pieces, strict=True):
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


def _splitter(segments: list[Segment]) -> Any:
    """Make a function that cuts variables out of the vector, into the memory of their old values."""

    def split(vector: Any, old: Any) -> list[Any]:  # noqa: ARG001 - their memory is used
        return [vector[one.place].reshape(one.shape).astype(one.dtype) for one in segments]

    return jax.jit(split, donate_argnums=1, keep_unused=True)


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
