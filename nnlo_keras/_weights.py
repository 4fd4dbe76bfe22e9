"""Flat vectors of a Keras model: weights, gradient sums, statistics; and its optimizers on the centre."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias, cast

import keras
import numpy as np
import numpy.typing as npt

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common.plugin import MadeGradients, Moves, Stretch, Vector, unwired
from nnlo_keras._compat import memory_of_tensor, synchronise, trained_by
from nnlo_keras._flat_variables import flat_variables
from nnlo_keras._stretches import OptionsByPlace, own_momentum, without_momentum
from nnlo_keras._training_calls import TrainingCalls, moving_layers
from nnlo_keras._variable_layout import averaged, layout_of
from nnlo_keras._wrapper import Wrapper

__all__ = ["KerasCenterOptimizer", "RateOption", "Statistics", "Weights", "stepper"]

# -- steps of a Keras optimizer with a gradient in a flat vector, for each back end --------------------

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

    from nnlo_keras._flat_variables._jax import set_value, spent_values

    compiled: dict[tuple[bool, ...], Any] = {}

    def make(present: tuple[bool, ...]) -> Any:
        chosen = [
            (v, p, s) for v, p, s, there in zip(variables, pieces, shapes, present, strict=True) if there
        ]

        @partial(jax.jit, donate_argnums=0)
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
        values = compiled[present](spent_values(stateful), gradient)
        for variable, value in zip(stateful, values, strict=True):
            # JAX may read the gradient, which is the message's memory, until every result is ready.
            set_value(variable, value.block_until_ready())

    return step


def _state(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer step may change."""
    return [*trained_by(optimizer), *optimizer.variables]


class Weights:
    """Weights that a model's optimizers train, and the sums of their gradients.

    It fits the core's protocol `Model`.

    Attributes:
        variables: the first optimizer's variables, then the second's, and so on.
        layout: the variables' layout in the vector.
        places: the part of the vector of each optimizer.
        parameters: the flat vector of the weights.
        gradients: the flat vectors that sums are collected in, in turn.

    Args:
        model: the model.
        wrappers: its wrapped optimizers, each built for its own variables.
    """

    def __init__(self, model: Any, wrappers: Sequence[Wrapper]) -> None:
        self._model = model
        owned = [wrapper.owned for wrapper in wrappers]
        self.variables = [variable for variables in owned for variable in variables]
        self.layout = layout_of(self.variables)
        parts = [layout_of(variables) for variables in owned]
        ends = np.cumsum([part.size for part in parts]).tolist()
        self.places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self.parameters = FlatVector(self.layout)
        self._flat_variables = flat_variables(self.variables, self.parameters, model)
        places = zip(self.variables, self.parameters.views(), strict=True)
        rules = [(getattr(variable, "constraint", None), view) for variable, view in places]
        self._constraints = [(rule, view) for rule, view in rules if rule is not None]
        self._sums = [wrapper.sum for wrapper in wrappers if wrapper.sum is not None]
        lag = 0 if not self._sums or wrappers[0].steps_workers else wrappers[0].algorithm.lag
        # Sums are copied out of the training step anyway, so each goes to a vector that can be sent.
        self.gradients = [FlatVector(self.layout) for _ in range(1 + lag)]
        self._turn = 0
        if self._sums:
            self._refuse_ties()
        for one, part, place in zip(self._sums, parts, self.places, strict=False):
            alone = len(parts) == 1
            one.tie([flat if alone else flat.part(part, place) for flat in self.gradients], model)
            one.restart(self._turn)
        self.absorb()

    def collect(self) -> None:
        """Copy the gradient sums into their vector."""
        for one in self._sums:
            one.collect()

    def twice(self) -> bool:
        """Whether a variable has more than one gradient in the collected sums."""
        return any(one.twice() for one in self._sums)

    def clear(self) -> None:
        """Begin new sums."""
        for one in self._sums:
            one.restart(self._turn)

    def resume(self, gradient: Vector) -> None:
        """Resume with saved sums."""
        np.copyto(self.gradient.vector, gradient)
        for one in self._sums:
            one.resume()

    def leaving(self) -> MadeGradients:
        """Return the gradients that may leave while they are made.

        Raises:
            ConfigurationError: there are several optimizers.
        """
        if len(self._sums) > 1:
            raise ConfigurationError(
                "a model with several optimizers cannot have overlap=True: a step may make gradients of one "
                "of them; leave overlap out"
            )
        one: Any = self._sums[0]  # only that of torch gets here: Wrapper.check_options
        return cast(MadeGradients, one)

    @property
    def gradient(self) -> FlatVector:
        """The vector for the next sum."""
        return self.gradients[self._turn]

    def turn(self) -> bool:
        """Switch to another vector for the next sum while this one is in flight."""
        self._turn = (self._turn + 1) % len(self.gradients)
        return True

    def synchronise(self) -> None:
        """On JAX copy the state that `fit` holds during an epoch back into the variables."""
        synchronise(self._model)

    def check(self) -> None:
        """Do nothing: Keras never replaces its variables."""

    def absorb(self) -> None:
        """Copy the weights into their vector."""
        self._flat_variables.read()

    def absorb_changes(self) -> None:
        """Copy the weights into their vector, which keeps its values for those of 16 bits."""
        vector = self.parameters.vector
        rounded = [segment.place for segment in self.layout.segments if segment.dtype != "float32"]
        kept = [vector[place].copy() for place in rounded]
        self._flat_variables.read()
        for place, values in zip(rounded, kept, strict=True):
            vector[place] = values

    def publish(self) -> None:
        """Copy the vector into the weights."""
        self._flat_variables.write()

    def constrain(self) -> bool:
        """Apply constraints to the vector, as an optimizer does to weights; return whether there are any."""
        for rule, view in self._constraints:
            np.copyto(view, keras.ops.convert_to_numpy(rule(keras.ops.convert_to_tensor(view))))
        return bool(self._constraints)

    def attach(self) -> None:
        """Make the weights views of their vector where possible; nothing else may read them meanwhile."""
        self._flat_variables.attach()

    def detach(self) -> None:
        """Give the weights their own memory again."""
        self._flat_variables.detach()

    def changed_since(self, before: Vector) -> str | None:
        """Return the name of a weight that differs from `before`, if there is one."""
        vector = self.parameters.vector
        # The vector has more precision than 16-bit weights: they are not compared.
        exact = [segment for segment in self.layout.segments if segment.dtype == "float32"]
        self.absorb_changes()
        changed = next((s.name for s in exact if not _same(vector[s.place], before[s.place])), None)
        if changed is not None:
            np.copyto(vector, before)
        return changed

    def _refuse_ties(self) -> None:
        if tied := next((segment for segment in self.layout.segments if segment.tied_to), None):
            raise ConfigurationError(
                f"the variables {tied.name!r} and {tied.tied_to!r} are the same tensor; use one variable "
                "for both, or an algorithm that exchanges weights, such as EASGD, without groups"
            )


class Statistics:
    """Variables that a model learns without an optimizer, e.g. statistics; fits the core's `Buffers`."""

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        self.flat = FlatVector(layout_of(variables))
        self._flat_variables = flat_variables(variables, self.flat, model)
        segments = self.flat.layout.segments
        places = {id(variable): one.place for variable, one in zip(variables, segments, strict=True)}
        self._model, self._moving = model, moving_layers(model, places)
        self._calls: TrainingCalls | None = None  # on a worker
        self._before = np.zeros(len(self._moving))  # updates made before this process started counting
        self.layers = list(self._moving.values())
        self.gather()

    @classmethod
    def of(cls, model: Any, trained: Sequence[Any]) -> Statistics | None:
        """Make the statistics of a model whose optimizers train these variables; None if it has none."""
        variables = averaged(model, trained)
        return cls(model, variables) if variables else None

    def gather(self) -> None:
        """Copy the statistics into their vector."""
        self._flat_variables.read()

    def scatter(self) -> None:
        """Copy the vector into the statistics."""
        self._flat_variables.write()

    def count(self, wrapper: Wrapper) -> list[Callable[[], object]]:
        """Start counting updates of the layers' statistics; return functions that stop it."""
        self._calls = TrainingCalls(self._model, list(self._moving), wrapper)
        return self._calls.begin()

    def add_batches(self, count: int) -> None:
        """Add to the number of batches that the model was trained on."""
        if self._calls is not None:
            self._calls.batches += count

    def moves(self) -> Moves:
        """Return how often each layer has updated its statistics."""
        decay = np.array([layer.momentum for layer in self._moving], np.float64)
        since = self._before if self._calls is None else self._before + self._calls.since()
        return Moves(since, decay, np.zeros(decay.size))

    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:  # noqa: ARG002 - a protocol's
        """Count from here; these layers keep no count."""
        self.set_since(np.zeros(len(self._moving)))

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Resume with this many updates since the last `mark`."""
        self._before = since
        if self._calls is not None:
            self._calls.mark()


class RateOption:
    """Learning rates that a callback has set; a schedule counts by itself where the optimizer runs."""

    def __init__(self, wrappers: Sequence[Wrapper]) -> None:
        self._wrappers = wrappers

    def read(self) -> tuple[float, ...]:
        """Return one rate for each optimizer; 0 if none was set."""
        return tuple(wrapper.rate_set or 0.0 for wrapper in self._wrappers)


class KerasCenterOptimizer:
    """Steps one shard of the centre with the user's Keras optimizers; fits `nnlo_common.VectorOptimizer`.

    Args:
        wrappers: the user's wrapped optimizers.
        weights: the server's model.
        place: the part of the vector that this server holds.
        optimizers: those that step, if not the wrapped ones.
    """

    def __init__(
        self,
        wrappers: Sequence[Wrapper],
        weights: Weights,
        place: slice,
        optimizers: Sequence[Any] | None = None,
    ) -> None:
        self._weights = weights
        self._optimizers = [one.inner_optimizer for one in wrappers] if optimizers is None else optimizers
        self._steps = []
        self._stretches = OptionsByPlace(self._optimizers[0], weights.variables, weights.layout, place)
        self._kept: tuple[Vector, ...] | None = None  # momentum and mean square, if not in variables
        self._commits, self._progress = 0, 0.0
        self._left = False  # workers have the momentum
        self._square: float | None = None  # of the centre, as scaled steps have left it
        segments, marks, mine = weights.layout.segments, weights.layout.marks(), weights.layout.inside(place)
        views = weights.parameters.views()
        for optimizer, owned in zip(self._optimizers, weights.places, strict=True):
            own = [index for index in mine if owned.start <= segments[index].offset < owned.stop]
            starts = [segments[index].offset - place.start for index in own]
            step = stepper(
                optimizer,
                [weights.variables[index] for index in own],
                [slice(at, at + segments[index].size) for at, index in zip(starts, own, strict=True)],
                [views[index] for index in own],
                weights.absorb,
            )
            self._steps.append((marks[own] - place.start, step))

    @property
    def learning_rate(self) -> float:
        """The first optimizer's current learning rate."""
        return _rate(self._optimizers[0])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for optimizer in self._optimizers:
            optimizer.learning_rate = value

    def configure(self, options: Vector) -> None:
        """Set the learning rates that a worker's callback has set."""
        for optimizer, rate in zip(self._optimizers, unwired(options), strict=True):
            if rate and rate != _rate(optimizer):
                optimizer.learning_rate = rate

    def step(self, x: Vector, gradient: Vector) -> None:  # noqa: ARG002 - x is read from the weights
        """Step with this gradient and copy the weights into the centre."""
        # A step that is compiled in here never has the momentum.
        with without_momentum(self._optimizers) if self._left else nullcontext():
            for marks, step in self._steps:
                present = tuple((gradient[marks] != 0).tolist())
                if any(present):
                    step(gradient, present)

    def own_momentum(self) -> tuple[float, bool]:
        """Return the momentum of SGD, and whether it is Nesterov's."""
        return own_momentum(self._optimizers[0], "wire='topk'")

    def leave_momentum(self) -> None:
        """Step without momentum from now on."""
        self._left = True

    def stretches(self, size: int, gradient: Vector | None) -> list[Stretch] | None:  # noqa: ARG002
        """Return the options of SGD, Adam or AdamW for each variable; None: it is another one."""
        return self._stretches.read(gradient, self._progress)

    def step_scaled(self, x: Vector, gradient: Vector, scale: float) -> None:
        """Step with `scale` times the learning rate, from `x` as it is now."""
        if self._square != float(np.dot(x, x)):  # it has been moved back: the variables are elsewhere
            self._weights.publish()
        rate = self.learning_rate
        self.learning_rate = rate * scale
        try:
            self.step(x, gradient)
        finally:
            self.learning_rate = rate
        self._square = float(np.dot(x, x))

    def keep_in(self, velocity: Vector, square: Vector) -> int:
        """Keep the momentum and Adam's mean square in these vectors; return the steps made so far."""
        if self._kept is None or self._kept[0] is not velocity:
            before, self._kept = self._kept, (velocity, square)
            for new, old in zip(self._kept, before or (), strict=False):
                np.copyto(new, old)
        return self._commits

    def count(self, steps: int) -> None:
        """Note that so many steps have been made with what is kept."""
        self._commits = steps

    def follow(self, progress: float) -> None:
        """Turn the schedule to what the steps so far were worth in steps of one process."""
        self._progress = progress

    def prepare(self, gradient: Vector) -> None:
        """Clip a gradient as the optimizer does."""
        self._stretches.clip(gradient)

    def state(self) -> dict[str, Any]:
        """Return the optimizers' variables, and what is kept elsewhere."""
        state: dict[str, Any] = {
            "keras": [np.array(keras.ops.convert_to_numpy(one)) for one in self._variables]
        }
        if self._kept is not None:
            state |= {"kept": [one.copy() for one in self._kept], "commits": self._commits}
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        variables = self._variables
        if "kept" in state:
            self._kept, self._commits = tuple(np.array(one) for one in state["kept"]), state["commits"]
        if not {"keras"} <= set(state) <= {"keras", "kept", "commits"} or len(state["keras"]) != len(
            variables
        ):
            raise ConfigurationError(
                f"expected the state of a Keras optimizer with {len(variables)} variables, found "
                f"{sorted(state)}; make the same optimizer as when the state was saved"
            )
        for variable, value in zip(variables, state["keras"], strict=True):
            variable.assign(value)

    @property
    def _variables(self) -> list[Any]:
        return [variable for optimizer in self._optimizers for variable in optimizer.variables]


def _same(one: Vector, other: Vector) -> bool:
    # Comparing bits is 50 times as fast as comparing numbers that may be NaN; but 0.0 equals -0.0.
    same_bits = np.array_equal(one.view(np.int32), other.view(np.int32))
    return same_bits or np.array_equal(one, other, equal_nan=True)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
