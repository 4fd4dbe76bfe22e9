"""Parts of Optuna that are not public, all in one place, named by what they give.

Where Optuna has changed one of them a `ConfigurationError` names it and the version of Optuna.
`tests/search/test_optuna_compat.py` says which part it is before a user meets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BruteForceSampler, GPSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial

from nnlo_common.base._other_projects import OtherProject

__all__ = [
    "FIXED",
    "LEAST_NOISE",
    "LazyRandomState",
    "Tried",
    "can_have",
    "chosen_together",
    "forget_trials",
    "has_no_name",
    "is_pickle",
    "loop_begins",
    "loop_ends",
    "number_in",
    "numbers_of",
    "storage_of",
    "study_number",
    "suggested",
    "tell_noise",
    "was_stopped",
]

_OPTUNA = OtherProject("optuna", "nnlo_common/search/_compat.py")

try:
    from optuna.samplers._brute_force import _TreeNode
    from optuna.samplers._lazy_random_state import LazyRandomState
except ImportError as error:
    raise _OPTUNA.changed(f"part of its samplers is gone ({error})") from error

#: The system attribute that holds the parameters that a trial was queued with.
FIXED = "fixed_params"
#: What a Gaussian process takes to be chance at least: that of `optuna._gp.prior`, which needs torch.
LEAST_NOISE = 1e-6


# -- studies and trials -----------------------------------------------------------------------------------


@_OPTUNA.uses("_storage")
def storage_of(study: optuna.Study) -> BaseStorage:
    """Return the storage of a study."""
    return study._storage


@_OPTUNA.uses("_study_id")
def study_number(study: Any) -> int:
    """Return the number of a study in its storage."""
    number: int = study._study_id
    return number


@_OPTUNA.uses("_trial_id")
def number_in(trial: Trial | FrozenTrial) -> int:
    """Return the number of a trial in the storage, which is not its number in the study."""
    return trial._trial_id


@_OPTUNA.uses("_thread_local", "in_optimize_loop", "_stop_flag")
def loop_begins(study: optuna.Study) -> None:
    """Let `Study.stop` end the search, as in Optuna's own loop; samplers that are at their end call it."""
    _ = study._thread_local.in_optimize_loop, study._stop_flag  # what is not there would not be looked at
    study._thread_local.in_optimize_loop, study._stop_flag = True, False


@_OPTUNA.uses("_thread_local", "in_optimize_loop")
def loop_ends(study: optuna.Study) -> None:
    """Let `Study.stop` complain again."""
    study._thread_local.in_optimize_loop = False


@_OPTUNA.uses("_stop_flag")
def was_stopped(study: optuna.Study) -> bool:
    """Whether `Study.stop` was called, which ends Optuna's own loop."""
    return study._stop_flag


@_OPTUNA.uses("_thread_local", "cached_all_trials")
def forget_trials(study: optuna.Study) -> None:
    """Let a study look at its storage again, not at the trials as they were."""
    _ = study._thread_local.cached_all_trials  # what is not there would not be looked at
    study._thread_local.cached_all_trials = None


@_OPTUNA.uses("_suggest")
def suggested(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    """Return the value of a parameter, as all suggest_... methods do."""
    return trial._suggest(name, distribution)


@_OPTUNA.uses("_relative_params")
def chosen_together(trial: Trial, space: dict[str, BaseDistribution], values: Mapping[str, Any]) -> None:
    """Let a trial have parameters that were chosen together elsewhere."""
    _ = trial._relative_params  # what is not there would not be looked at
    trial.relative_search_space, trial._relative_params = space, dict(values)


@_OPTUNA.uses("_contains")
def can_have(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a parameter's value may be had from a distribution."""
    return distribution._contains(distribution.to_internal_repr(value))


def has_no_name(study: optuna.Study) -> bool:
    """Whether a study was given no name, and has one of Optuna's making, another each time."""
    return study.study_name.startswith("no-name")


def is_pickle(key: str) -> bool:
    """Whether a system attribute is code that Optuna would unpickle: CMA-ES as it was."""
    return ":optimizer" in key


# -- samplers ---------------------------------------------------------------------------------------------


@_OPTUNA.uses("_minimum_noise")
def tell_noise(process: GPSampler, noise: float) -> None:
    """Tell a Gaussian process how much of what it sees is chance at least; it fits the rest."""
    _ = process._minimum_noise  # what is not there would not be looked at
    process._minimum_noise = noise


@_OPTUNA.uses("_rng", "rng")
def numbers_of(sampler: BruteForceSampler) -> np.random.RandomState:
    """Return what a sampler draws from."""
    return sampler._rng.rng


class Tried:
    """What has been tried of a space below some choices, as `BruteForceSampler` sees it.

    Args:
        node: Optuna's.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    @classmethod
    @_OPTUNA.uses("_populate_tree")
    def of(cls, trials: Sequence[FrozenTrial], chosen: Mapping[str, Any]) -> Tried:
        """Return what trials have tried below these choices."""
        node = _TreeNode()
        BruteForceSampler._populate_tree(node, list(trials), dict(chosen))
        return cls(node)

    @property
    @_OPTUNA.uses("children")
    def children(self) -> dict[float, Tried] | None:
        """What is below each value of the next parameter; None: nobody has said what there is to choose."""
        below = self._node.children
        return None if below is None else {at: Tried(node) for at, node in below.items()}

    @_OPTUNA.uses("count_unexpanded")
    def left(self) -> int:
        """Return how many combinations no trial has tried or is trying."""
        return int(self._node.count_unexpanded(exclude_running=True))

    @_OPTUNA.uses("is_any_expandable")
    def is_open(self) -> bool:
        """Whether nobody has seen the end of it yet."""
        return bool(self._node.is_any_expandable(exclude_running=False))
