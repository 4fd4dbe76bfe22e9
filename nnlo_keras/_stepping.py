"""One step of a Keras optimizer with a gradient that lies in a flat vector, per back end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from nnlo_common._flat import Vector

__all__ = ["stepper"]

#: Steps with a gradient; the second argument says of which variables there is one.
Step: TypeAlias = Callable[[Vector, tuple[bool, ...]], None]


def stepper(
    optimizer: Any,
    variables: Sequence[Any],
    pieces: Sequence[slice],
    views: Sequence[Vector],
    absorb: Callable[[], None],
) -> Step:
    """Return what steps some variables, and leaves what they are then in the centre.

    Args:
        optimizer: the user's; built for these variables and perhaps others.
        variables: which.
        pieces: where the gradient of each lies.
        views: where each lies in the centre, in its shape.
        absorb: brings all variables there.
    """
    shapes = [view.shape for view in views]
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return _tensorflow(optimizer, variables, pieces, views)
    if backend == "jax":
        step = _jax(optimizer, variables, pieces, shapes)
    else:
        step = _torch(optimizer, variables, pieces, shapes)

    def step_and_absorb(gradient: Vector, present: tuple[bool, ...]) -> None:
        step(gradient, present)
        absorb()

    return step_and_absorb


def _torch(
    optimizer: Any, variables: Sequence[Any], pieces: Sequence[slice], shapes: Sequence[tuple[int, ...]]
) -> Step:
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
    optimizer: Any, variables: Sequence[Any], pieces: Sequence[slice], views: Sequence[Vector]
) -> Step:
    import tensorflow as tf

    compiled: dict[tuple[bool, ...], Any] = {}
    keeps = False  # whether the optimizer keeps gradients as they are

    def make(present: tuple[bool, ...]) -> Any:
        chosen = [variable for variable, there in zip(variables, present, strict=True) if there]

        def apply(*gradients: Any) -> list[Any]:
            optimizer.apply(gradients, chosen)
            # Read here they cost a tenth of what it takes to read them one by one afterwards.
            return [tf.cast(variable.value, tf.float32) for variable in chosen]

        # A call of the concrete function is spared the search for it.
        signature = [tf.TensorSpec(variable.shape, tf.float32) for variable in chosen]
        return tf.function(apply, autograph=False).get_concrete_function(*signature)

    def step(gradient: Vector, present: tuple[bool, ...]) -> None:
        nonlocal keeps
        # One graph for each pattern of used variables; there is hardly ever more than one.
        if present not in compiled:
            compiled[present] = make(present)
        # These tensors are the message's memory, which is used again.
        memory = gradient.copy() if keeps else gradient
        chosen = [(p, view) for p, view, there in zip(pieces, views, present, strict=True) if there]
        lent = [memory[piece].reshape(view.shape) for piece, view in chosen]
        values = compiled[present](*(_tensor(tf, array) for array in lent))
        for value, (_, view) in zip(values, chosen, strict=True):
            np.copyto(view, value._numpy())
        owners = [weakref.ref(array) for array in lent]
        del lent
        if not keeps and any(owner() is not None for owner in owners):
            keeps = True
            for variable in optimizer.variables:
                variable.assign(np.array(keras.ops.convert_to_numpy(variable)))

    return step


def _tensor(tf: Any, array: Any) -> Any:
    """Return a tensor that is the same memory, which TensorFlow wants to begin on a cache line."""
    if array.__array_interface__["data"][0] % 64:
        return tf.constant(array)
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


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
