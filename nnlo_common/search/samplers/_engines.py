"""Samplers by name.

"random"         uniform
"grid"           each combination once, in any order; for whole numbers, choices and floats with a step
"qmc"            a Sobol sequence: covers the space evenly; choices are random
"tpe"            tree-structured Parzen estimators; any space
"gp"             a Gaussian process; smooth functions of few parameters
"cmaes"          CMA-ES: moves a normal distribution; needs many trials; numbers only, the rest is random
"bayesian"       GP where it works best, else TPE; see `BayesianSampler`
"evolutionary"   a steady-state genetic algorithm; see `EvolutionarySampler`. With several objectives
                 "nsgaii".
"nsgaii"         NSGA-II, with a population small enough to get beyond its first generation.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIISampler,
    QMCSampler,
    RandomSampler,
    TPESampler,
)

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.search.samplers._bayesian import BayesianSampler
from nnlo_common.search.samplers._evolutionary import EvolutionarySampler
from nnlo_common.search.samplers._grid import Grid
from nnlo_common.search.samplers._names import SAMPLERS, quoted_samplers

__all__ = ["engine"]

# Optuna's default of 50 makes the first 50 trials random, so most searches are random throughout.
_POPULATION = 20


def engine(asked: str | BaseSampler, seed: int, n_trials: int, study: optuna.Study) -> BaseSampler:
    """Return the sampler of a name; return a sampler unchanged.

    Args:
        asked: the name, or a sampler.
        seed: seeds its random numbers.
        n_trials: the number of trials of the search.
        study: the study to sample for.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if isinstance(asked, BaseSampler):
        return asked
    if asked not in SAMPLERS:
        raise ConfigurationError(
            f"sampler={asked!r} is not known: use {quoted_samplers()}, or any Optuna sampler"
        )
    several = len(study.directions) > 1
    nsgaii = partial(NSGAIISampler, seed=seed, population_size=_POPULATION)
    makers: dict[str, Callable[[], BaseSampler]] = {
        "random": lambda: RandomSampler(seed=seed),
        "grid": lambda: Grid(seed=seed, avoid_premature_stop=True),
        "qmc": lambda: QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False),
        "tpe": lambda: TPESampler(seed=seed),
        "gp": lambda: GPSampler(seed=seed, warn_independent_sampling=False),
        "bayesian": lambda: BayesianSampler(seed=seed, n_trials=n_trials),
        "evolutionary": lambda: nsgaii() if several else EvolutionarySampler(seed=seed),
        "nsgaii": nsgaii,
        "cmaes": lambda: _cma_es(seed, several=several),
    }
    with warnings.catch_warnings():  # some arguments are experimental; nnlo follows Optuna's changes
        warnings.simplefilter("ignore", ExperimentalWarning)
        return makers[asked]()


def _cma_es(seed: int, *, several: bool) -> BaseSampler:
    if several:
        raise ConfigurationError(
            'sampler="cmaes" takes one objective, but the study has several: use "nsgaii" or "tpe"'
        )
    if importlib.util.find_spec("cmaes") is None:
        raise MissingExtraError('sampler="cmaes"', "cmaes", "tune")
    return CmaEsSampler(seed=seed, warn_independent_sampling=False)
