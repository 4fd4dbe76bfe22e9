"""A steady-state genetic algorithm without generations, for spaces of any kind.

    population    the best trials so far; no trial waits for others, each that ends may enter at once
    child         two or three parents out of it; every parameter is made from those that have it
    first trials  at random, until there is a population

A parameter that only some trials have (a conditional one) is made from the parents that have it, or at
random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search._compat import can_have

__all__ = ["EvolutionarySampler"]

# Not tuned; `docs/optimisation.md` has figures of how they do.
_BLENDED = 0.5  # how often a child lies between and beyond its parents; else each parameter is one parent's
_BEYOND = 0.3  # how far beyond, as a part of the distance
_MUTATED = 0.35  # how many of the parameters are changed, and at least one of them
_SMALLEST_STEP, _LARGEST_STEP = 0.004, 0.25  # of a parameter's range; a mutation draws between, evenly in log
_OTHER_CHOICE = 0.5  # how often the mutation of a choice draws another


@dataclass(frozen=True, slots=True)
class _Parents:
    """What a child is made from."""

    first: FrozenTrial
    second: FrozenTrial
    blended: bool
    step: float  # of its mutations


class EvolutionarySampler(BaseSampler):
    """Chooses parameters as the children of the best trials so far.

    It takes floats, whole numbers and choices, conditional ones too, costs a tenth of a millisecond and waits
    for nobody, however many trials are under way. Trials that break a constraint come after those that break
    none; failed and pruned trials do not count. For one objective.

    Args:
        population: how many of the best trials have children.
        startup: how many trials are drawn at random first.
        seed: of the random numbers.

    Example:
        >>> import optuna
        >>> optuna.logging.set_verbosity(optuna.logging.WARNING)
        >>> study = optuna.create_study(sampler=EvolutionarySampler(seed=1))
        >>> study.optimize(lambda trial: trial.suggest_float("x", -1, 1) ** 2, n_trials=40)
        >>> study.best_value < 1e-3
        True
    """

    def __init__(self, *, population: int = 5, startup: int = 10, seed: int | None = None) -> None:
        self._population = whole_number("population", population, 2)
        self._startup = whole_number("startup", startup, population)
        self._random = np.random.default_rng(seed)
        self._parents: dict[int, _Parents] = {}

    def reseed_rng(self) -> None:
        """Draw other random numbers from now on."""
        self._random = np.random.default_rng()

    def infer_relative_search_space(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
    ) -> dict[str, BaseDistribution]:
        """Return nothing: each parameter is made when it is asked for, so that conditional ones are, too."""
        return {}

    def sample_relative(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Choose the parents."""
        if len(study.directions) > 1:
            raise ConfigurationError(
                "EvolutionarySampler is for one objective; with several use sampler='evolutionary', which is "
                "NSGA-II then, or optuna.samplers.NSGAIISampler"
            )
        trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if len(trials) < self._startup:
            return
        sign = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
        best = sorted(trials, key=lambda one: (_violation(one), sign * (one.value or 0.0)))[
            : self._population
        ]
        # The better of two drawn at random comes first, and gives the child what is not mixed.
        first, second = sorted(self._random.choice(len(best), size=2, replace=False).tolist())
        self._parents[trial.number] = _Parents(
            first=best[first],
            second=best[second],
            blended=bool(self._random.random() < _BLENDED),
            step=math.exp(self._random.uniform(math.log(_SMALLEST_STEP), math.log(_LARGEST_STEP))),
        )

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Make one parameter from those of the parents."""
        parents = self._parents.get(trial.number)
        known = [] if parents is None else _values(parents, param_name, param_distribution)
        if isinstance(param_distribution, CategoricalDistribution):
            return self._choice(param_distribution, known)
        assert isinstance(param_distribution, (FloatDistribution, IntDistribution))
        scale = _Scale(param_distribution)
        if parents is None or not known:
            return scale.value(self._random.random())
        return scale.value(self._number([scale.position(value) for value in known], parents))

    def after_trial(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        state: TrialState,
        values: Sequence[float] | None,
    ) -> None:
        """Forget the parents."""
        self._parents.pop(trial.number, None)

    def _choice(self, distribution: CategoricalDistribution, known: list[Any]) -> Any:
        choices = distribution.choices
        if not known or self._random.random() < _MUTATED * _OTHER_CHOICE:
            return choices[int(self._random.integers(len(choices)))]
        return known[int(self._random.integers(len(known)))]

    def _number(self, known: list[float], parents: _Parents) -> float:
        """Return the child's position between 0 and 1."""
        position = known[int(self._random.integers(len(known)))]
        if parents.blended and len(known) == 2:
            share = self._random.uniform(-_BEYOND, 1 + _BEYOND)
            position = known[0] + share * (known[1] - known[0])
        if self._random.random() < _MUTATED:
            position += parents.step * self._random.standard_normal()
        return _reflected(position)


class _Scale:
    """Where the values of a numeric parameter lie between 0 and 1."""

    def __init__(self, distribution: FloatDistribution | IntDistribution) -> None:
        self._of = distribution
        # A stepped value owns half a step on each side: the first and the last are as likely as others.
        half = 0.5 * (distribution.step or 0.0)
        self._low, self._high = distribution.low - half, distribution.high + half
        if distribution.log:
            self._low, self._high = math.log(self._low), math.log(self._high)

    def position(self, value: float) -> float:
        if self._high == self._low:
            return 0.5
        return ((math.log(value) if self._of.log else value) - self._low) / (self._high - self._low)

    def value(self, position: float) -> float | int:
        of = self._of
        value = self._low + position * (self._high - self._low)
        value = math.exp(value) if of.log else value
        if of.step is not None:
            value = of.low + round((value - of.low) / of.step) * of.step
        value = min(max(value, of.low), of.high)
        return int(value) if isinstance(of, IntDistribution) else float(value)


def _values(parents: _Parents, name: str, distribution: BaseDistribution) -> list[Any]:
    """Return what the parents have for a parameter, as far as it may be had from this distribution."""
    return [
        parent.params[name]
        for parent in (parents.first, parents.second)
        if name in parent.params
        and type(parent.distributions[name]) is type(distribution)
        and can_have(distribution, parent.params[name])
    ]


def _violation(trial: FrozenTrial) -> float:
    """Return by how much a trial breaks its constraints; 0: not at all."""
    return sum(max(0.0, value) for value in trial.constraints.values())


def _reflected(position: float) -> float:
    """Bring what lies beyond 0 or 1 back, as far inside as it was outside."""
    position = abs(position) % 2
    return 2 - position if position > 1 else position
