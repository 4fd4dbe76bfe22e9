"""Steady-state genetic algorithm, without generations, for spaces of any kind.

    population    the best trials so far; each trial may enter when it ends, without waiting for others
    child         of two parents; each parameter comes from the parents that have it
    first trials  at random, until there is a population

A parameter that only some trials have (a conditional one) comes from the parents that have it, or is random.
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
from nnlo_common.search.samplers import _engines
from nnlo_common.search.samplers._names import Wanted

__all__ = ["EvolutionarySampler", "make"]

# Not tuned; `benchmarks/tune_regret.py` has measurements.
_BLENDED = 0.5  # share of children blended from both parents; else each parameter is one parent's
_BEYOND = 0.3  # how far a blend may lie beyond a parent, relative to their distance
_MUTATED = 0.35  # the probability that a parameter mutates
_SMALLEST_STEP, _LARGEST_STEP = 0.004, 0.25  # of a parameter's range; a mutation draws between, evenly in log
_OTHER_CHOICE = 0.5  # the probability that the mutation of a choice redraws it


@dataclass(frozen=True, slots=True)
class _Parents:
    """The parents of a trial, and how to combine them."""

    first: FrozenTrial
    second: FrozenTrial
    blended: bool
    step: float  # of its mutations


def make(wanted: Wanted) -> BaseSampler:
    """Make the sampler; for several objectives Optuna's."""
    if wanted.several:
        return _engines.make(Wanted("nsgaii", wanted.seed, wanted.n_trials, several=True))
    return EvolutionarySampler(seed=wanted.seed)


class EvolutionarySampler(BaseSampler):
    """Chooses parameters as children of the best trials so far.

    It handles floats, whole numbers and choices, also conditional ones, takes a tenth of a millisecond, and
    never waits, however many trials are running. Trials that violate a constraint rank after those that
    satisfy all; failed and pruned trials do not count. For one objective.

    Args:
        population: how many of the best trials are parents.
        startup: how many trials are drawn at random first.
        seed: seeds the random numbers.

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
        self._random = np.random.default_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return nothing: parameters are chosen one by one, so that conditional ones work."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return nothing."""
        _refuse_several(study)
        return {}

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        _refuse_several(study)
        trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        if len(trials) < self._startup:
            return
        sign = -1.0 if study.direction is StudyDirection.MAXIMIZE else 1.0
        best = sorted(trials, key=lambda one: (_violation(one), sign * (one.value or 0.0)))[
            : self._population
        ]
        # Put the better of two random parents first.
        first, second = sorted(self._random.choice(len(best), size=2, replace=False).tolist())
        self._parents[trial.number] = _Parents(
            first=best[first],
            second=best[second],
            blended=bool(self._random.random() < _BLENDED),
            step=math.exp(self._random.uniform(math.log(_SMALLEST_STEP), math.log(_LARGEST_STEP))),
        )

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        _refuse_several(study)
        parents = self._parents.get(trial.number)
        known = [] if parents is None else _values(parents, param_name, param_distribution)
        if isinstance(param_distribution, CategoricalDistribution):
            return self._choice(param_distribution, known)
        assert isinstance(param_distribution, (FloatDistribution, IntDistribution))
        scale = _ParameterRange(param_distribution)
        if parents is None or not known:
            return scale.value(self._random.random())
        return scale.value(self._number([scale.position(value) for value in known], parents))

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
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


class _ParameterRange:
    """Maps the values of a numeric parameter to positions between 0 and 1."""

    def __init__(self, distribution: FloatDistribution | IntDistribution) -> None:
        self._of = distribution
        # Each stepped value covers half a step on each side, so the first and last are as likely as others.
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


def _refuse_several(study: optuna.Study) -> None:
    """Refuse several objectives wherever Optuna lets a sampler choose."""
    if len(study.directions) > 1:
        raise ConfigurationError(
            "EvolutionarySampler is for one objective; for several use sampler='evolutionary', "
            "which then selects NSGA-II, or optuna.samplers.NSGAIISampler"
        )


def _values(parents: _Parents, name: str, distribution: BaseDistribution) -> list[Any]:
    """Return the parents' values of a parameter that this distribution contains."""
    return [
        parent.params[name]
        for parent in (parents.first, parents.second)
        if name in parent.params
        and type(parent.distributions[name]) is type(distribution)
        and can_have(distribution, parent.params[name])
    ]


def _violation(trial: FrozenTrial) -> float:
    """Return by how much a trial violates its constraints; 0: not at all."""
    return sum(max(0.0, value) for value in trial.constraints.values())


def _reflected(position: float) -> float:
    """Reflect a position beyond 0 or 1 back inside."""
    position = abs(position) % 2
    return 2 - position if position > 1 else position
