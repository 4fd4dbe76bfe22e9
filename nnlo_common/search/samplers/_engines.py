"""The sampler of a name, and those that are Optuna's own."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping

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
from nnlo_common.search.samplers._grid import Grid
from nnlo_common.search.samplers._names import SAMPLERS, Wanted, quoted_samplers
from nnlo_common.search.samplers._seeding import seed_of

__all__ = ["engine", "make"]

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
    # Optuna's take 32 bits.
    seed = seed if seed < 2**32 else seed_of(seed, 0, "sampler")
    wanted = Wanted(asked, seed, n_trials, several=len(study.directions) > 1)
    with warnings.catch_warnings():  # some arguments are experimental; nnlo follows Optuna's changes
        warnings.simplefilter("ignore", ExperimentalWarning)
        made: BaseSampler = importlib.import_module(SAMPLERS[asked]).make(wanted)
        return made


def make(wanted: Wanted) -> BaseSampler:
    """Make a sampler of Optuna, or the grid."""
    return _MAKERS[wanted.name](wanted)


def _cma_es(wanted: Wanted) -> BaseSampler:
    if wanted.several:
        raise ConfigurationError(
            'sampler="cmaes" takes one objective, but the study has several: use "nsgaii" or "tpe"'
        )
    if importlib.util.find_spec("cmaes") is None:
        raise MissingExtraError('sampler="cmaes"', "cmaes", "tune")
    return CmaEsSampler(seed=wanted.seed, warn_independent_sampling=False)


_MAKERS: Mapping[str, Callable[[Wanted], BaseSampler]] = {
    "random": lambda one: RandomSampler(seed=one.seed),
    "grid": lambda one: Grid(seed=one.seed, avoid_premature_stop=True),
    "qmc": lambda one: QMCSampler(seed=one.seed, scramble=True, warn_independent_sampling=False),
    "tpe": lambda one: TPESampler(seed=one.seed),
    "gp": lambda one: GPSampler(seed=one.seed, warn_independent_sampling=False),
    "cmaes": _cma_es,
    "nsgaii": lambda one: NSGAIISampler(seed=one.seed, population_size=_POPULATION),
}
