"""Samplers by name.

"random"         uniform
"qmc"            a Sobol sequence: even cover of the space, at random for choices
"tpe"            tree-structured Parzen estimators; any space
"gp"             a Gaussian process; smooth functions of few parameters
"bayesian"       GP where it is at its best, else TPE; see `BayesianSampler`
"evolutionary"   a steady-state genetic algorithm; see `EvolutionarySampler`. With several objectives
                 NSGA-II, with a population small enough to get beyond its first generation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, QMCSampler, RandomSampler, TPESampler

from nnlo_common._errors import ConfigurationError
from nnlo_common.tune._bayesian import BayesianSampler
from nnlo_common.tune._evolutionary import EvolutionarySampler

__all__ = ["engine"]

# Optuna's 50 is a random search for the first 50 trials, and so for most searches.
_POPULATION = 20


def engine(asked: str | BaseSampler, seed: int, n_trials: int, study: optuna.Study) -> BaseSampler:
    """Return a sampler by its name; a sampler is returned as it is.

    Args:
        asked: the name.
        seed: of its random numbers.
        n_trials: how many trials the search is to have.
        study: what it is for.

    Raises:
        ConfigurationError: there is no such name.
    """
    if isinstance(asked, BaseSampler):
        return asked
    several = len(study.directions) > 1
    makers: dict[str, Callable[[], BaseSampler]] = {
        "random": lambda: RandomSampler(seed=seed),
        "qmc": lambda: QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False),
        "tpe": lambda: TPESampler(seed=seed),
        "gp": lambda: GPSampler(seed=seed, warn_independent_sampling=False),
        "bayesian": lambda: BayesianSampler(seed=seed, n_trials=n_trials),
        "evolutionary": lambda: (
            NSGAIISampler(seed=seed, population_size=_POPULATION)
            if several
            else EvolutionarySampler(seed=seed)
        ),
    }
    if asked not in makers:
        grid = " For a grid pass optuna.samplers.GridSampler(space)." if asked == "grid" else ""
        raise ConfigurationError(
            f"sampler={asked!r} is not known: use {', '.join(map(repr, makers))} or any Optuna sampler.{grid}"
        )
    with warnings.catch_warnings():  # that Optuna may still change an argument is ours to follow
        warnings.simplefilter("ignore", ExperimentalWarning)
        return makers[asked]()
