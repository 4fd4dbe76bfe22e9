"""Conversion of keras-tuner's hyper-parameters to an Optuna sampler's parameters, and back.

For a parameter with steps, or an ordered choice, the sampler sees the index of the step, so neighbours stay
neighbours. Unordered choices are categories.
"""

from __future__ import annotations

from typing import Any

from keras_tuner.engine import hyperparameters as kinds
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

__all__ = ["distribution", "from_sampler", "to_sampler"]


def distribution(hp: Any) -> BaseDistribution | None:
    """Return the sampler's distribution for a parameter; None if there is nothing to choose.

    Example:
        >>> distribution(kinds.Int("width", 8, 32, step=8))
        IntDistribution(high=3, log=False, low=0, step=1)
        >>> distribution(kinds.Float("rate", 1e-4, 1e-2, sampling="log"))
        FloatDistribution(high=0.01, log=True, low=0.0001, step=None)
    """
    if isinstance(hp, kinds.Fixed):
        return None
    if isinstance(hp, kinds.Boolean):
        return CategoricalDistribution([False, True])
    if isinstance(hp, kinds.Choice) and not hp.ordered:
        return CategoricalDistribution(list(hp.values))
    if (count := _steps(hp)) is not None:
        return IntDistribution(0, count - 1)
    if hp.sampling == "reverse_log":
        return FloatDistribution(0.0, 1.0)
    kind = IntDistribution if isinstance(hp, kinds.Int) else FloatDistribution
    made: BaseDistribution = kind(hp.min_value, hp.max_value, log=hp.sampling == "log")
    return made


def from_sampler(hp: Any, chosen: Any) -> Any:
    """Convert a sampler's choice to the parameter's value.

    Example:
        >>> from_sampler(kinds.Int("width", 8, 32, step=8), 2)
        24
    """
    if isinstance(hp, kinds.Boolean) or (isinstance(hp, kinds.Choice) and not hp.ordered):
        return chosen
    if _steps(hp) is None:
        return hp.prob_to_value(min(chosen, _BELOW_1)) if hp.sampling == "reverse_log" else chosen
    if _counted(hp):
        value = hp.min_value + chosen * hp.step
        return int(value) if isinstance(hp, kinds.Int) else float(value)
    value = list(hp.values)[chosen]
    return int(value) if isinstance(hp, kinds.Int) else value


def to_sampler(hp: Any, value: Any) -> Any:
    """Convert a parameter's value to the sampler's choice.

    Example:
        >>> to_sampler(kinds.Int("width", 8, 32, step=8), 24)
        2
    """
    if isinstance(hp, kinds.Boolean) or (isinstance(hp, kinds.Choice) and not hp.ordered):
        return value
    if (count := _steps(hp)) is None:
        return hp.value_to_prob(value) if hp.sampling == "reverse_log" else value
    if _counted(hp):
        return min(max(round((value - hp.min_value) / hp.step), 0), count - 1)
    values = list(hp.values)
    return min(range(count), key=lambda index: (values[index] != value, abs(_gap(values[index], value))))


# Keras-tuner's probabilities do not reach 1.
_BELOW_1 = 1 - 1e-9


def _counted(hp: Any) -> bool:
    return not isinstance(hp, kinds.Choice) and hp.sampling == "linear"


def _steps(hp: Any) -> int | None:
    """Return the number of values of a stepped or ordered parameter; None for others."""
    if isinstance(hp, kinds.Choice):
        return len(hp.values)
    if hp.step is None:
        return None
    if _counted(hp):
        return int((hp.max_value - hp.min_value) // hp.step) + 1
    return len(list(hp.values))


def _gap(one: Any, other: Any) -> float:
    return 0.0 if isinstance(one, str) or isinstance(other, str) else float(one) - float(other)
