"""A Keras model as flat vectors: its weights, the sum of its gradients, its statistics, its optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError, FlatVector
from nnlo_common._flat import Vector
from nnlo_common._team import unwired, vectors_in_turn
from nnlo_keras._layout import averaged, layout_of
from nnlo_keras._roads import road
from nnlo_keras._stepping import stepper
from nnlo_keras._wrapper import Wrapper

__all__ = ["CenterOptimizer", "RateOption", "Statistics", "Weights"]


class Weights:
    """A model's trainable weights and the sum of its gradients; fits `nnlo_common._team.Model`.

    Attributes:
        parameters: the weights.
        gradients: what sums are brought to, in turn.

    Args:
        model: the model.
        wrapper: its optimizer.
    """

    def __init__(self, model: Any, wrapper: Wrapper) -> None:
        self.variables = list(model.trainable_variables)
        self.layout = layout_of(self.variables)
        self.parameters = FlatVector(self.layout)
        self._road = road(self.variables, self.parameters, model)
        self._sum, lag = wrapper.sum, wrapper.algorithm.lag
        self.gradients = [FlatVector(self.layout) for _ in range(vectors_in_turn(self.layout, lag))]
        self._turn = 0
        if self._sum is not None:
            if tied := next((s for s in self.layout.segments if s.tied_to), None):
                raise ConfigurationError(
                    f"the variable {tied.name!r} is the same tensor as {tied.tied_to!r}; make one variable "
                    "of both, or use an algorithm that exchanges weights, such as EASGD"
                )
            self._sum.tie(self.gradients, model)
            self._sum.restart(0)
        self.absorb()

    def collect(self) -> None:
        """Bring the sum of gradients into its vector."""
        assert self._sum is not None  # only algorithms that send gradients collect
        self._sum.collect()

    def clear(self) -> None:
        """Begin a new sum."""
        assert self._sum is not None  # only algorithms that send gradients collect
        self._sum.restart(self._turn)

    @property
    def gradient(self) -> FlatVector:
        """The vector that the next sum comes into."""
        return self.gradients[self._turn]

    def turn(self) -> bool:
        """Let the next sum come into another vector, while this one travels."""
        self._turn = (self._turn + 1) % len(self.gradients)
        return True

    def check(self) -> None:
        """Nothing can change behind our back: Keras keeps its variables."""

    def absorb(self) -> None:
        """Bring the weights into their vector."""
        self._road.read()

    def publish(self) -> None:
        """Bring the vector into the weights."""
        self._road.write()


class Statistics:
    """A model's running statistics and the like; fits `nnlo_common._team.Buffers`."""

    def __init__(self, model: Any) -> None:
        variables = averaged(model)
        self.flat = FlatVector(layout_of(variables))
        self._road = road(variables, self.flat, model)
        self.gather()

    @classmethod
    def of(cls, model: Any) -> Statistics | None:
        """Return those of a model, if it has any."""
        return cls(model) if averaged(model) else None

    def gather(self) -> None:
        """Copy the statistics into their vector."""
        self._road.read()

    def scatter(self) -> None:
        """Copy the vector into the statistics."""
        self._road.write()


class RateOption:
    """The learning rate that a callback has set; a schedule counts by itself where the optimizer runs."""

    def __init__(self, wrapper: Wrapper) -> None:
        self._wrapper = wrapper

    def read(self) -> tuple[float, ...]:
        """Return it; 0 if none was set."""
        return (self._wrapper.rate_set or 0.0,)


class CenterOptimizer:
    """Steps one shard of the centre with the user's Keras optimizer; fits `nnlo_common.VectorOptimizer`.

    Args:
        wrapper: the wrapper of the user's optimizer.
        weights: the server's model.
        place: the part of the vector that this server holds.
    """

    def __init__(self, wrapper: Wrapper, weights: Weights, place: slice) -> None:
        self._optimizer, self._weights, self._place = wrapper.inner_optimizer, weights, place
        segments, mine = weights.layout.segments, weights.layout.inside(place)
        self._marks = weights.layout.marks()[mine] - place.start
        self._step = stepper(
            self._optimizer, [weights.variables[i] for i in mine], [segments[i] for i in mine], place.start
        )

    @property
    def learning_rate(self) -> float:
        """The learning rate now."""
        return float(keras.ops.convert_to_numpy(self._optimizer.learning_rate))

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._optimizer.learning_rate = value

    def configure(self, options: Vector) -> None:
        """Set the learning rate as a worker's callback has set it there."""
        (rate,) = unwired(options)
        if rate and rate != self.learning_rate:
            self.learning_rate = rate

    def step(self, x: Vector, gradient: Vector) -> None:  # noqa: ARG002 - x is read from the weights
        """Step with the gradient that lies in `gradient`; leave the weights in the centre."""
        present = tuple((gradient[self._marks] != 0).tolist())
        if any(present):
            self._step(gradient, present)
            self._weights.absorb()

    def state(self) -> dict[str, Any]:
        """Return the optimizer's variables."""
        variables: Sequence[Any] = self._optimizer.variables
        return {"keras": [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
        variables = self._optimizer.variables
        if set(state) != {"keras"} or len(state["keras"]) != len(variables):
            raise ConfigurationError(
                f"the state of a Keras optimizer with {len(variables)} variables was expected, not "
                f"{sorted(state)}"
            )
        for variable, value in zip(variables, state["keras"], strict=True):
            variable.assign(value)
