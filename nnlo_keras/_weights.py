"""A Keras model as flat vectors: its weights, the sum of its gradients, its statistics, its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common.plugin import Moves, Vector, unwired
from nnlo_keras._center_steps import stepper
from nnlo_keras._compat import synchronise
from nnlo_keras._flat_variables import flat_variables
from nnlo_keras._training_calls import TrainingCalls, moving_layers
from nnlo_keras._variable_layout import averaged, layout_of
from nnlo_keras._wrapper import Wrapper

__all__ = ["KerasCenterOptimizer", "RateOption", "Statistics", "Weights"]


class Weights:
    """What a model's optimizers train, and the sums of its gradients.

    It fits the core's protocol `Model`.

    Attributes:
        variables: those of the first optimizer, then those of the second, and so on.
        layout: where they lie.
        places: which part of the vector is each optimizer's.
        parameters: the weights.
        gradients: what sums are brought to, in turn.

    Args:
        model: the model.
        wrappers: its optimizers; built, each for variables of its own.
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
        self._sums = [wrapper.sum for wrapper in wrappers if wrapper.sum is not None]
        lag = wrappers[0].algorithm.lag if self._sums else 0
        # Sums are copied out of the training step in any case: each to where it can travel from.
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
        """Bring the sums of gradients into their vector."""
        for one in self._sums:
            one.collect()

    def clear(self) -> None:
        """Begin new sums."""
        for one in self._sums:
            one.restart(self._turn)

    def resume(self, gradient: Vector) -> None:
        """Go on with sums that were saved."""
        np.copyto(self.gradient.vector, gradient)
        for one in self._sums:
            one.resume()

    @property
    def gradient(self) -> FlatVector:
        """The vector that the next sum comes into."""
        return self.gradients[self._turn]

    def turn(self) -> bool:
        """Let the next sum come into another vector, while this one travels."""
        self._turn = (self._turn + 1) % len(self.gradients)
        return True

    def synchronise(self) -> None:
        """On JAX let the variables hold what `fit` has in their place during an epoch."""
        synchronise(self._model)

    def check(self) -> None:
        """Nothing can change behind our back: Keras keeps its variables."""

    def absorb(self) -> None:
        """Bring the weights into their vector."""
        self._flat_variables.read()

    def publish(self) -> None:
        """Bring the vector into the weights."""
        self._flat_variables.write()

    def attach(self) -> None:
        """Let the weights lie in their vector, where that is possible, while nobody else looks at them."""
        self._flat_variables.attach()

    def detach(self) -> None:
        """Let them have memory of their own again."""
        self._flat_variables.detach()

    def changed_since(self, before: Vector) -> str | None:
        """Return the name of a weight that is not what the vector was before, if there is one."""
        vector = self.parameters.vector
        # Of 16-bit weights the vector holds more than they do, so it keeps that, and they are not compared.
        exact = [segment for segment in self.layout.segments if segment.dtype == "float32"]
        rounded = [segment.place for segment in self.layout.segments if segment.dtype != "float32"]
        kept = [vector[place].copy() for place in rounded]
        self._flat_variables.read()
        for place, values in zip(rounded, kept, strict=True):
            vector[place] = values
        changed = next((s.name for s in exact if not _same(vector[s.place], before[s.place])), None)
        if changed is not None:
            np.copyto(vector, before)
        return changed

    def _refuse_ties(self) -> None:
        if tied := next((segment for segment in self.layout.segments if segment.tied_to), None):
            raise ConfigurationError(
                f"the variable {tied.name!r} is the same tensor as {tied.tied_to!r}; make one variable of "
                "both, or use an algorithm that exchanges weights, such as EASGD"
            )


class Statistics:
    """What a model learns without an optimizer, e.g. statistics; fits the core's `Buffers`."""

    def __init__(self, model: Any, variables: Sequence[Any]) -> None:
        self.flat = FlatVector(layout_of(variables))
        self._flat_variables = flat_variables(variables, self.flat, model)
        segments = self.flat.layout.segments
        places = {id(variable): one.place for variable, one in zip(variables, segments, strict=True)}
        self._model, self._moving = model, moving_layers(model, places)
        self._calls: TrainingCalls | None = None  # on a worker
        self._before = np.zeros(len(self._moving))  # updates before this process has begun to count
        self.layers = list(self._moving.values())
        self.gather()

    @classmethod
    def of(cls, model: Any, trained: Sequence[Any]) -> Statistics | None:
        """Return those of a model whose optimizers train these variables, if it has any."""
        variables = averaged(model, trained)
        return cls(model, variables) if variables else None

    def gather(self) -> None:
        """Copy the statistics into their vector."""
        self._flat_variables.read()

    def scatter(self) -> None:
        """Copy the vector into the statistics."""
        self._flat_variables.write()

    def count(self, wrapper: Wrapper) -> list[Callable[[], object]]:
        """Count how often layers move their statistics from now on; return what ends it."""
        self._calls = TrainingCalls(self._model, list(self._moving), wrapper)
        return self._calls.begin()

    def add_batches(self, count: int) -> None:
        """Note that the model was trained on so many batches."""
        if self._calls is not None:
            self._calls.batches += count

    def moves(self) -> Moves:
        """Return how often each layer has moved its statistics."""
        decay = np.array([layer.momentum for layer in self._moving], np.float64)
        since = self._before if self._calls is None else self._before + self._calls.since()
        return Moves(since, decay, np.zeros(decay.size))

    def mark(self, totals: npt.NDArray[np.float64] | None = None) -> None:  # noqa: ARG002 - a protocol's
        """Count from here; these layers keep no count."""
        self.set_since(np.zeros(len(self._moving)))

    def set_since(self, since: npt.NDArray[np.float64]) -> None:
        """Go on where so many updates had been made since the last `mark`."""
        self._before = since
        if self._calls is not None:
            self._calls.mark()


class RateOption:
    """The learning rates that a callback has set; a schedule counts by itself where the optimizer runs."""

    def __init__(self, wrappers: Sequence[Wrapper]) -> None:
        self._wrappers = wrappers

    def read(self) -> tuple[float, ...]:
        """Return one for each optimizer; 0 if none was set."""
        return tuple(wrapper.rate_set or 0.0 for wrapper in self._wrappers)


class KerasCenterOptimizer:
    """Steps one shard of the centre with the user's Keras optimizers; fits `nnlo_common.VectorOptimizer`.

    Args:
        wrappers: those of the user's optimizers.
        weights: the server's model.
        place: the part of the vector that this server holds.
    """

    def __init__(self, wrappers: Sequence[Wrapper], weights: Weights, place: slice) -> None:
        self._optimizers, self._weights = [wrapper.inner_optimizer for wrapper in wrappers], weights
        self._steps = []
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
        """The learning rate now, of the first optimizer."""
        return _rate(self._optimizers[0])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for optimizer in self._optimizers:
            optimizer.learning_rate = value

    def configure(self, options: Vector) -> None:
        """Set the learning rates as a worker's callback has set them there."""
        for optimizer, rate in zip(self._optimizers, unwired(options), strict=True):
            if rate and rate != _rate(optimizer):
                optimizer.learning_rate = rate

    def step(self, x: Vector, gradient: Vector) -> None:  # noqa: ARG002 - x is read from the weights
        """Step with the gradient that lies in `gradient`; leave the weights in the centre."""
        for marks, step in self._steps:
            present = tuple((gradient[marks] != 0).tolist())
            if any(present):
                step(gradient, present)

    def state(self) -> dict[str, Any]:
        """Return the optimizers' variables."""
        return {"keras": [np.array(keras.ops.convert_to_numpy(variable)) for variable in self._variables]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        variables = self._variables
        if set(state) != {"keras"} or len(state["keras"]) != len(variables):
            raise ConfigurationError(
                f"the state of a Keras optimizer with {len(variables)} variables was expected, not "
                f"{sorted(state)}"
            )
        for variable, value in zip(variables, state["keras"], strict=True):
            variable.assign(value)

    @property
    def _variables(self) -> list[Any]:
        return [variable for optimizer in self._optimizers for variable in optimizer.variables]


def _same(one: Vector, other: Vector) -> bool:
    # Bits are compared fifty times as fast as numbers that may be NaN; but 0.0 and -0.0 are the same.
    same_bits = np.array_equal(one.view(np.int32), other.view(np.int32))
    return same_bits or np.array_equal(one, other, equal_nan=True)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))
