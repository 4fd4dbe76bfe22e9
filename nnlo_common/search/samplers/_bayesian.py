"""Sampler "bayesian": a Gaussian process where it works best, else TPE."""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.search._compat import LEAST_NOISE, look_less, tell_noise
from nnlo_common.search.coordinator._trial_results import FOLDS, SECONDS
from nnlo_common.search.samplers._names import Wanted

__all__ = ["BayesianSampler", "make", "noise_of_means"]

# -- noise of the mean over folds, estimated from all trials of a search -------------------------------
# All trials train on the same folds, so a fold that is harder than others says nothing about a trial. The
# noise is the remainder without the mean of each trial and that of each fold: the residue of a two-way
# table.


def noise_of_means(trials: Sequence[FrozenTrial]) -> float | None:
    """Return the noise variance of a trial's value, as a share of the variance of all values.

    Args:
        trials: finished trials.

    Returns:
        The share; None if it cannot be estimated: without folds, with several objectives or a single trial.
    """
    tables = [trial.user_attrs.get(FOLDS) for trial in trials]
    rows = [row for row in tables if row and all(isinstance(value, float | int) for value in row)]
    if len(rows) < 2 or len({len(row) for row in rows}) != 1 or len(rows[0]) < 2:
        return None
    values = np.array(rows, float)
    if not np.isfinite(values).all():
        return None
    means = values.mean(1, keepdims=True)
    residue = values - means - values.mean(0, keepdims=True) + values.mean()
    count, folds = values.shape
    chance = float((residue**2).sum() / ((count - 1) * (folds - 1)) / folds)
    total = float(means.var())
    return min(chance / total, 1.0) if total > 0 else None


# A Gaussian process takes half a second per choice at 400 trials, and more beyond.
_MOST_TRIALS = 300
_REMEMBERED = 0.99
# The number of last trials that estimate a trial's time.
_LATELY = 20


def make(wanted: Wanted) -> BayesianSampler:
    """Make the sampler."""
    return BayesianSampler(seed=wanted.seed, n_trials=wanted.n_trials)


class BayesianSampler(BaseSampler):
    """Chooses by a Gaussian process or by TPE.

    The Gaussian process chooses while all of this holds: the search has at most 300 trials; all finished
    trials have the same parameters, so none is conditional; it chooses as fast as the blocks ask (with 16
    blocks and 0.1 s per choice, if trials take 1.6 s); torch and scipy, which Optuna's process needs, are
    installed. Where trials are too short for it, it looks less thoroughly for the best place of the same
    process, which takes half the time and is still far better than TPE. Otherwise TPE chooses, on groups of
    parameters that occur together. Both learn from all trials, so each trial may use either.

    If trials have folds, the process gets a lower bound on the noise of their means: the residue of the
    folds' values without the mean of each trial and that of each fold.

    Args:
        seed: seeds the random numbers.
        n_trials: the number of trials of the search.

    Attributes:
        choosers: how many ranks choose at the same time; infinite if time does not matter.
        blocks: how many trials train at the same time; more may be chosen ahead. None: as many as run.

    Example:
        >>> BayesianSampler(seed=1, n_trials=1000).process is None
        True
    """

    def __init__(self, *, seed: int | None = None, n_trials: int = _MOST_TRIALS) -> None:
        with warnings.catch_warnings():  # `group` is experimental; nnlo follows Optuna's changes
            warnings.simplefilter("ignore", ExperimentalWarning)
            self.tpe = TPESampler(seed=seed, multivariate=True, group=True)
        computable = all(importlib.util.find_spec(name) for name in ("torch", "scipy"))
        self.choosers = 1.0
        self.blocks: int | None = None
        # The process's time for its last choice: with all of its efforts, and with fewer.
        self._choosing_s = [0.0, 0.0]
        self._hurried = False
        self.process = (
            GPSampler(seed=seed, warn_independent_sampling=False)
            if n_trials <= _MOST_TRIALS and computable
            else None
        )

    def reseed_rng(self) -> None:
        self.tpe.reseed_rng()
        if self.process is not None:
            self.process.reseed_rng()

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._chooser(study).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        chooser, began_s = self._chooser(study), time.perf_counter()
        values = chooser.sample_relative(study, trial, search_space)
        taken_s = time.perf_counter() - began_s
        for effort in (0, 1):
            if chooser is self.process and effort == self._hurried:
                self._choosing_s[effort] = taken_s
            else:  # the machine or an import may have slowed that choice, so decay it to retry later
                self._choosing_s[effort] *= _REMEMBERED
        return values

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        chooser = self._chooser(study)
        return chooser.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._chooser(study).before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self.tpe.after_trial(study, trial, state, values)  # handles constraints; the same in both

    def _chooser(self, study: optuna.Study) -> BaseSampler:
        if self.process is None:
            return self.tpe
        trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        self._tell_noise(trials)
        names = {frozenset(trial.distributions) for trial in trials}
        if len(names) > 1 or len(trials) > _MOST_TRIALS:
            return self.tpe
        left_s = self._time_to_choose(study, trials)
        for hurried in (False, True):
            if self._choosing_s[hurried] <= left_s:
                self._hurried = hurried
                look_less(self.process, hurried=hurried)
                return self.process
        return self.tpe

    def _time_to_choose(self, study: optuna.Study, trials: list[FrozenTrial]) -> float:
        """Return how long a choice may take, so that no block waits for it."""
        running = len(study.get_trials(deepcopy=False, states=[TrialState.RUNNING]))
        if self.blocks is not None:
            running = min(running, self.blocks)  # the others are chosen ahead, and wait
        lately = [trial.user_attrs[SECONDS] for trial in trials[-_LATELY:] if SECONDS in trial.user_attrs]
        if running < 2 or not lately:
            return math.inf
        return float(statistics.median(lately) * self.choosers / running)

    def _tell_noise(self, trials: list[FrozenTrial]) -> None:
        """Set the process's least noise to what the folds of the trials show."""
        if self.process is not None:
            noise = noise_of_means(trials)
            tell_noise(self.process, LEAST_NOISE if noise is None else max(noise, LEAST_NOISE))
