"""Steps of a Keras optimizer with a gradient in a flat vector, for each back end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from nnlo_common.plugin import Vector
from nnlo_keras._compat import memory_of_tensor, trained_by

__all__ = ["stepper"]

# A compiled step returns values of at least this many numbers one by one, smaller ones concatenated: one
# more copy, but fewer calls.
_LARGE = 1 << 16

#: Steps with a gradient; the second argument says which variables have one.
Step: TypeAlias = Callable[[Vector, tuple[bool, ...]], None]


def stepper(
    optimizer: Any,
    variables: Sequence[Any],
    pieces: Sequence[slice],
    views: Sequence[Vector],
    absorb: Callable[[], None],
) -> Step:
    """Return a function that steps variables and copies them into the centre.

    Args:
        optimizer: the user's optimizer, built for these variables and perhaps others.
        variables: the variables to step.
        pieces: the slice of the gradient vector for each.
        views: the view of the centre for each, in its shape.
        absorb: copies all variables into the centre.
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
        # These tensors share the message's memory; `apply` is done with them before it is reused.
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

    compiled: dict[tuple[bool, ...], tuple[Any, list[Vector], list[Vector]]] = {}
    keeps = False  # whether the optimizer holds on to the gradient's memory

    def make(size: int, present: tuple[bool, ...]) -> tuple[Any, list[Vector], list[Vector]]:
        places = zip(variables, pieces, views, present, strict=True)
        chosen = [(variable, piece, view) for variable, piece, view, there in places if there]
        large = [index for index, (_, _, view) in enumerate(chosen) if view.size >= _LARGE]
        small = [index for index in range(len(chosen)) if index not in large]

        def apply(flat: Any) -> list[Any]:
            gradients = [tf.reshape(flat[piece], view.shape) for _, piece, view in chosen]
            optimizer.apply(gradients, [variable for variable, _, _ in chosen])
            # Reading them inside the graph costs a tenth of reading them one by one afterwards.
            values = [tf.cast(variable.value, tf.float32) for variable, _, _ in chosen]
            packed = [tf.concat([tf.reshape(values[index], [-1]) for index in small], 0)] if small else []
            return [*(values[index] for index in large), *packed]

        # Calling the concrete function skips the lookup; each further argument would cost time.
        function = tf.function(apply, autograph=False)
        concrete = function.get_concrete_function(tf.TensorSpec([size], tf.float32))
        return concrete, [chosen[index][2] for index in large], [chosen[index][2] for index in small]

    def step(gradient: Vector, present: tuple[bool, ...]) -> None:
        nonlocal keeps
        # One graph for each set of variables with gradients; there is hardly ever more than one.
        if present not in compiled:
            compiled[present] = make(gradient.size, present)
        function, large, small = compiled[present]
        # The tensor shares the message's memory, which is reused.
        lent = gradient.copy() if keeps else gradient[:]
        values = function(_tensor(tf, lent))
        for view, value in zip(large, values, strict=False):
            np.copyto(view, memory_of_tensor(value))
        if small:
            packed, start = memory_of_tensor(values[-1]), 0
            for view in small:
                np.copyto(view, packed[start : start + view.size].reshape(view.shape))
                start += view.size
        owner = weakref.ref(lent)
        del lent
        if not keeps and owner() is not None:
            keeps = True
            for variable in optimizer.variables:
                variable.assign(np.array(keras.ops.convert_to_numpy(variable)))

    return step


def _tensor(tf: Any, array: Any) -> Any:
    """Return a tensor that shares the array's memory; copy it if it does not start on a cache line."""
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
            # JAX may read the gradient, which is the message's memory, until every result is ready.
            variable.assign(value.block_until_ready())

    return step


def _state(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer step may change."""
    return [*trained_by(optimizer), *optimizer.variables]
