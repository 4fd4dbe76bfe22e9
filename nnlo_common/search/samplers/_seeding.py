"""Random numbers that depend only on a trial's number, not on what was drawn before or where."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.search._compat import LazyRandomState

__all__ = ["Seeded", "seed_of"]

_Numbers: TypeAlias = LazyRandomState | np.random.RandomState | np.random.Generator | random.Random


def seed_of(seed: int, run: int, purpose: str = "") -> int:
    """Return the seed of a run: independent of the block, and different for each run and purpose.

    Example:
        >>> seed_of(0, 1) == seed_of(0, 1), seed_of(0, 1) == seed_of(0, 2), seed_of(0, 1) < 2**32
        (True, False, True)
    """
    text = f"{seed} {run} {purpose}" if purpose else f"{seed} {run}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


class Seeded(BaseSampler):
    """A sampler whose random numbers restart with each trial, and with each parameter chosen by itself.

    It reseeds the generators among the attributes of the sampler, of the samplers it contains, and of their
    parts from Optuna. Other sources of random numbers stay as they are.

    Args:
        sampler: the sampler.
        seed: the study's seed.
    """

    def __init__(self, sampler: BaseSampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    @property
    def found(self) -> bool:
        """Whether the sampler has a generator that can be reseeded."""
        return any(True for _ in _numbers_of(self._sampler, set()))

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return self._sampler.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return self._begun(trial, "together").sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        sampler = self._begun(trial, f"alone {param_name}")
        return sampler.sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        self._begun(trial, "before").before_trial(study, trial)

    def after_trial(
        self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        self._begun(trial, "after").after_trial(study, trial, state, values)

    def _begun(self, trial: FrozenTrial, purpose: str) -> BaseSampler:
        for index, numbers in enumerate(_numbers_of(self._sampler, set())):
            _begin(numbers, seed_of(self._seed, trial.number, f"{purpose} {index}"))
        return self._sampler


def _numbers_of(part: object, seen: set[int]) -> Iterator[_Numbers]:
    """Yield the generators in a sampler, always in the same order."""
    for value in vars(part).values():
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _Numbers):
            yield value
        elif hasattr(value, "__dict__") and (
            isinstance(value, BaseSampler) or type(value).__module__.startswith("optuna.samplers.")
        ):
            yield from _numbers_of(value, seen)


def _begin(numbers: _Numbers, seed: int) -> None:
    if isinstance(numbers, LazyRandomState):
        numbers.rng.seed(seed)
    elif isinstance(numbers, np.random.Generator):
        numbers.bit_generator.state = type(numbers.bit_generator)(seed).state
    else:
        numbers.seed(seed)
