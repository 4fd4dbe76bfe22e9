"""One step of a Keras optimizer with a gradient that lies in a flat vector, per back end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from nnlo_common import Segment
from nnlo_common._flat import Vector

__all__ = ["stepper"]

#: Steps with a gradient; the second argument says of which variables there is one.
Step: TypeAlias = Callable[[Vector, tuple[bool, ...]], None]


def stepper(optimizer: Any, variables: Sequence[Any], segments: Sequence[Segment], start: int) -> Step:
    """Return what steps some variables.

    Args:
        optimizer: the user's; built for these variables and perhaps others.
        variables: which.
        segments: where the gradient of each lies.
        start: where the vector begins in the layout.
    """
    pieces = [slice(s.offset - start, s.offset - start + s.size) for s in segments]
    shapes = [s.shape for s in segments]
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _tensorflow(optimizer, variables, pieces, shapes)
    if backend == "jax":
        return _jax(optimizer, variables, pieces, shapes)

    def step(gradient: Vector, present: tuple[bool, ...]) -> None:
        # These tensors are the message's memory, and are given back before it is used again.
        grads = [
            keras.ops.convert_to_tensor(gradient[piece].reshape(shape))
            for piece, shape, there in zip(pieces, shapes, present, strict=True)
            if there
        ]
        optimizer.apply(grads, [v for v, there in zip(variables, present, strict=True) if there])

    return step


def _tensorflow(
    optimizer: Any, variables: Sequence[Any], pieces: Sequence[slice], shapes: Sequence[tuple[int, ...]]
) -> Step:
    import tensorflow as tf

    compiled: dict[tuple[bool, ...], Any] = {}

    def make(present: tuple[bool, ...]) -> Any:
        chosen = [
            (v, p, s) for v, p, s, there in zip(variables, pieces, shapes, present, strict=True) if there
        ]

        @tf.function
        def apply(flat: Any) -> None:
            grads = [tf.reshape(flat[piece], shape) for _, piece, shape in chosen]
            optimizer.apply(grads, [variable for variable, _, _ in chosen])

        return apply

    def step(gradient: Vector, present: tuple[bool, ...]) -> None:
        # One graph for each pattern of used variables; there is hardly ever more than one.
        if present not in compiled:
            compiled[present] = make(present)
        compiled[present](tf.convert_to_tensor(gradient))

    return step


def _jax(
    optimizer: Any, variables: Sequence[Any], pieces: Sequence[slice], shapes: Sequence[tuple[int, ...]]
) -> Step:
    import jax

    compiled: dict[tuple[bool, ...], Any] = {}

    def make(present: tuple[bool, ...]) -> Any:
        chosen = [
            (v, p, s) for v, p, s, there in zip(variables, pieces, shapes, present, strict=True) if there
        ]

        @jax.jit
        def apply(state: list[Any], flat: Any) -> list[Any]:
            stateful = _state(optimizer)
            with keras.StatelessScope(state_mapping=list(zip(stateful, state, strict=True))) as scope:
                optimizer.apply(
                    [flat[piece].reshape(shape) for _, piece, shape in chosen],
                    [variable for variable, _, _ in chosen],
                )
            return [scope.get_current_value(variable) for variable in stateful]

        return apply

    def step(gradient: Vector, present: tuple[bool, ...]) -> None:
        if present not in compiled:
            compiled[present] = make(present)
        stateful = _state(optimizer)
        values = compiled[present]([variable.value for variable in stateful], gradient)
        for variable, value in zip(stateful, values, strict=True):
            # The gradient is the message's memory, which JAX may read until all is done.
            variable.assign(value.block_until_ready())

    return step


def _state(optimizer: Any) -> list[Any]:
    """What a step of an optimizer may change."""
    return [*optimizer._trainable_variables, *optimizer.variables]
