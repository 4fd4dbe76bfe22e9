"""Options of Keras' SGD, Adam and AdamW as stretches of the flat vector, and their clipping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from nnlo_common import ConfigurationError, Layout
from nnlo_common.plugin import Stretch, Vector
from nnlo_keras._compat import decays, schedule_of

__all__ = [
    "OVERWRITTEN",
    "OptionsByPlace",
    "own_momentum",
    "rate_at",
    "refuse_options",
    "rule_of",
    "without_momentum",
]

#: Attribute of variables that an optimizer sets to their gradient, as the scales of float8 are.
OVERWRITTEN = "overwrite_with_gradient"

_OF_STRETCHES = ("SGD", "Adam", "AdamW")
#: Options that a step at the pace of several workers does not have.
_REFUSED = ("amsgrad", "use_ema", "gradient_accumulation_steps", "loss_scale_factor")


def refuse_options(optimizer: Any, wrapper: str) -> None:
    """Refuse options that the wrapper's steps do not have."""
    for name in _REFUSED:
        if value := getattr(optimizer, name, None):
            raise ConfigurationError(
                f"{wrapper} cannot wrap {type(optimizer).__name__} with {name}={value!r}: several workers "
                f"step without it; leave {name} out"
            )

    if not _has_stretches(optimizer) and schedule_of(optimizer) is not None:
        raise ConfigurationError(
            f"{wrapper} cannot wrap {type(optimizer).__name__} with a LearningRateSchedule: it scales the "
            "learning rate of each step, which must be a number; use SGD, Adam or AdamW, or a "
            "LearningRateScheduler callback"
        )


def _has_stretches(optimizer: Any) -> bool:
    # Each back end has its own subclasses of these, which step as they do; a user's may step otherwise.
    kind = type(optimizer)
    return kind.__name__ in _OF_STRETCHES and kind.__module__.partition(".")[0] == "keras"


def rule_of(variable: Any) -> str:
    """Return what else than steps sets a variable, which only its optimizer does in Keras; empty: nothing."""
    if getattr(variable, "constraint", None) is not None:
        return "a constraint"
    return OVERWRITTEN if getattr(variable, OVERWRITTEN, False) else ""


def own_momentum(optimizer: Any, owner: str) -> tuple[float, bool]:
    """Return the momentum of SGD, and whether it is Nesterov's; 0: it has none, or is not SGD.

    Args:
        optimizer: the user's.
        owner: what needs it, for the error.

    Raises:
        ConfigurationError: it clips, or waits for several gradients, which workers would have to do.
    """
    if not (_has_stretches(optimizer) and isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum):
        return 0.0, False
    for name in ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps"):
        if value := getattr(optimizer, name, None):
            raise ConfigurationError(
                f"{owner} cannot wrap SGD with a momentum and {name}={value!r}: what arrives at the server "
                f"are sums of workers' velocities, not gradients; leave {name} out, or use wire='int8'"
            )
    return float(optimizer.momentum), bool(optimizer.nesterov)


@contextmanager
def without_momentum(optimizers: Sequence[Any]) -> Iterator[None]:
    """Let SGD step without its momentum within a `with` block; Keras' weight decay has none anyhow."""
    before = [one.momentum for one in optimizers]
    for one in optimizers:
        one.momentum = 0.0
    try:
        yield
    finally:
        for one, momentum in zip(optimizers, before, strict=True):
            one.momentum = momentum


def rate_at(optimizer: Any, step: float) -> float:
    """Return the learning rate at a step of one process."""
    schedule = schedule_of(optimizer)
    rate = optimizer.learning_rate if schedule is None else schedule(int(step))
    return float(keras.ops.convert_to_numpy(rate))


class OptionsByPlace:
    """The options of an optimizer, by the places of its variables in the vector.

    Args:
        optimizer: the user's.
        variables: the model's, in the order of the layout.
        layout: their places in the vector.
        place: the part of the vector.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any], layout: Layout, place: slice) -> None:
        mine = layout.inside(place)
        segments = [layout.segments[index] for index in mine]
        self._optimizer = optimizer
        self._places = [slice(s.offset - place.start, s.offset - place.start + s.size) for s in segments]
        self._marks = layout.marks()[mine] - place.start
        self._variables = [variables[index] for index in mine]
        # Of all parts alike: one gain is measured for all.
        self._stretched = _has_stretches(optimizer) and not any(map(rule_of, variables))

    def read(self, gradient: Vector | None, progress: float) -> list[Stretch] | None:
        """Return the options as they are now; None: only the optimizer can make a step.

        Args:
            gradient: leave out variables that have no gradient in it; None: all of them.
            progress: the steps of one process so far, for a schedule.
        """
        optimizer = self._optimizer
        if not self._stretched:
            return None
        there = np.ones(len(self._places), bool) if gradient is None else gradient[self._marks] != 0
        adaptive = not isinstance(optimizer, keras.optimizers.SGD)
        rate, found = rate_at(optimizer, progress), list[Stretch]()
        for place, variable, present in zip(self._places, self._variables, there, strict=True):
            if not present:
                continue
            decay = float(optimizer.weight_decay or 0.0) if decays(optimizer, variable) else 0.0
            last = found[-1] if found else None
            if last is not None and last.weight_decay == decay and self._follows(last.place, place):
                place = slice(found.pop().place.start, place.stop)  # noqa: PLW2901 - one stretch of both
            found.append(
                Stretch(
                    place=place,
                    learning_rate=rate,
                    momentum=float(optimizer.beta_1 if adaptive else optimizer.momentum),
                    adaptive=adaptive,
                    beta2=float(optimizer.beta_2) if adaptive else 0.0,
                    epsilon=float(optimizer.epsilon) if adaptive else 0.0,
                    epsilon_outside=True,
                    weight_decay=decay,
                    decoupled=True,
                )
            )
        return found

    def clip(self, gradient: Vector) -> None:
        """Clip a gradient in place, as the optimizer does before its steps."""
        value, each, whole = (
            max(0.0, getattr(self._optimizer, name, None) or 0.0)  # Keras ignores 0 and less
            for name in ("clipvalue", "clipnorm", "global_clipnorm")
        )
        if value:
            np.clip(gradient, -np.float32(value), np.float32(value), out=gradient)
        if each:
            for place in self._places:
                _shorten(gradient[place], each)
        if whole:
            _shorten(gradient, whole)

    def _follows(self, before: slice, place: slice) -> bool:
        """Whether one place follows another, but for the mark between them."""
        return place.start - before.stop <= 64


def _shorten(vector: Vector, most: float) -> None:
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if length > most:
        np.multiply(vector, np.float32(most / length), out=vector)
