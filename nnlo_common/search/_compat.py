"""Private parts of Optuna, all in one place, named by what they provide.

If Optuna has changed one, a `ConfigurationError` names it and the version of Optuna;
`tests/search/test_compat.py` finds it before users do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.samplers import BruteForceSampler, GPSampler
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, Trial

from nnlo_common.base._errors import ConfigurationError

__all__ = [
    "FIXED",
    "LEAST_NOISE",
    "LazyRandomState",
    "OtherProject",
    "Tried",
    "can_have",
    "chosen_together",
    "forget_trials",
    "has_no_name",
    "is_pickle",
    "look_less",
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

# -- errors for changed private parts of other projects; they name the project, its version and the part.
# Only modules called `_compat.py` use such parts, one for each of our packages.

_P = ParamSpec("_P")
_R = TypeVar("_R")


class OtherProject:
    """Another project whose private parts we use.

    Args:
        package: its import name.
        compat: our file that uses those parts.

    Example:
        >>> numpy = OtherProject("numpy", "example.py")
        >>> @numpy.uses("_size")
        ... def size_of(array):
        ...     return array._size
        >>> size_of(())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        nnlo_common.ConfigurationError: numpy ... has changed: tuple has no _size any more, ...
    """

    def __init__(self, package: str, compat: str) -> None:
        self._package, self._compat = package, compat

    def changed(self, what: str) -> ConfigurationError:
        """Return the error for `what` has changed."""
        version = getattr(sys.modules.get(self._package), "__version__", "of an unknown version")
        return ConfigurationError(
            f"{self._package} {version} has changed: {what}, which {self._compat} needs; install a version "
            f"of {self._package} that nnlo's requirements allow, or a later nnlo"
        )

    def uses(self, *parts: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
        """Decorate a function that reads these private attributes: it raises `changed` if one is missing.

        Args:
            parts: their names. Any other AttributeError passes, as it may come from the user's code.
        """

        def guard(function: Callable[_P, _R]) -> Callable[_P, _R]:
            @functools.wraps(function)
            def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
                try:
                    return function(*args, **kwargs)
                except AttributeError as error:
                    if error.name not in parts:
                        raise
                    raise self.changed(f"{_named(error.obj)} has no {error.name} any more") from error

            guarded.parts = parts  # type: ignore[attr-defined]
            return guarded

        return guard


def _named(owner: Any) -> str:
    if isinstance(owner, type | ModuleType):
        return owner.__name__
    return type(owner).__name__


_OPTUNA = OtherProject("optuna", "nnlo_common/search/_compat.py")

try:
    from optuna.samplers._brute_force import _TreeNode
    from optuna.samplers._lazy_random_state import LazyRandomState
except ImportError as error:
    raise _OPTUNA.changed(f"part of its samplers is missing ({error})") from error

#: System attribute: the parameters that a trial was queued with.
FIXED = "fixed_params"
#: Lower bound of a Gaussian process's noise: that of `optuna._gp.prior`, which needs torch.
LEAST_NOISE = 1e-6
#: What a Gaussian process looks at for a choice: in Optuna, and in a hurry.
_LOOKS = {"_n_preliminary_samples": (2048, 512), "_n_local_search": (10, 4), "_n_qmc_samples_qei": (128, 32)}


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
    """Return a trial's number in the storage, which differs from its number in the study."""
    return trial._trial_id


@_OPTUNA.uses("_thread_local", "in_optimize_loop", "_stop_flag")
def loop_begins(study: optuna.Study) -> None:
    """Make `Study.stop` end the search, as in Optuna's own loop; exhausted samplers call it."""
    _ = study._thread_local.in_optimize_loop, study._stop_flag  # fail here if Optuna renamed them
    study._thread_local.in_optimize_loop, study._stop_flag = True, False


@_OPTUNA.uses("_thread_local", "in_optimize_loop")
def loop_ends(study: optuna.Study) -> None:
    """Make `Study.stop` raise again."""
    study._thread_local.in_optimize_loop = False


@_OPTUNA.uses("_stop_flag")
def was_stopped(study: optuna.Study) -> bool:
    """Whether `Study.stop` was called, which ends Optuna's own loop."""
    return study._stop_flag


@_OPTUNA.uses("_thread_local", "cached_all_trials")
def forget_trials(study: optuna.Study) -> None:
    """Clear a study's cache, so that it reads its storage again."""
    _ = study._thread_local.cached_all_trials  # fail here if Optuna renamed it
    study._thread_local.cached_all_trials = None


@_OPTUNA.uses("_suggest")
def suggested(trial: Trial, name: str, distribution: BaseDistribution) -> Any:
    """Return a parameter's value, like the suggest_... methods."""
    return trial._suggest(name, distribution)


@_OPTUNA.uses("_relative_params")
def chosen_together(trial: Trial, space: dict[str, BaseDistribution], values: Mapping[str, Any]) -> None:
    """Give a trial parameters that were chosen together elsewhere."""
    _ = trial._relative_params  # fail here if Optuna renamed it
    trial.relative_search_space, trial._relative_params = space, dict(values)


@_OPTUNA.uses("_contains")
def can_have(distribution: BaseDistribution, value: Any) -> bool:
    """Whether a distribution contains a value."""
    return distribution._contains(distribution.to_internal_repr(value))


def has_no_name(study: optuna.Study) -> bool:
    """Whether a study has a name generated by Optuna, which differs each time."""
    return study.study_name.startswith("no-name")


def is_pickle(key: str) -> bool:
    """Whether a system attribute is a pickle that Optuna would load: a state of CMA-ES."""
    return ":optimizer" in key


# -- samplers ---------------------------------------------------------------------------------------------


@_OPTUNA.uses("_minimum_noise")
def tell_noise(process: GPSampler, noise: float) -> None:
    """Set the least noise of a Gaussian process; it fits the rest."""
    _ = process._minimum_noise  # fail here if Optuna renamed it
    process._minimum_noise = noise


@_OPTUNA.uses("_n_preliminary_samples", "_n_local_search", "_n_qmc_samples_qei")
def look_less(process: GPSampler, *, hurried: bool) -> None:
    """Let a Gaussian process look at fewer places for the best one, or at as many as Optuna does."""
    for name, (usual, fewer) in _LOOKS.items():
        _ = getattr(process, name)  # fail here if Optuna renamed it
        setattr(process, name, fewer if hurried else usual)


@_OPTUNA.uses("_rng", "rng")
def numbers_of(sampler: BruteForceSampler) -> np.random.RandomState:
    """Return a sampler's random numbers."""
    return sampler._rng.rng


class Tried:
    """Tree of the combinations tried below some choices, as `BruteForceSampler` sees it.

    Args:
        node: Optuna's node.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    @classmethod
    @_OPTUNA.uses("_populate_tree")
    def of(cls, trials: Sequence[FrozenTrial], chosen: Mapping[str, Any]) -> Tried:
        """Return the tree of what trials tried below these choices."""
        node = _TreeNode()
        BruteForceSampler._populate_tree(node, list(trials), dict(chosen))
        return cls(node)

    @property
    @_OPTUNA.uses("children")
    def children(self) -> dict[float, Tried] | None:
        """The subtree of each value of the next parameter; None: no trial has named one yet."""
        below = self._node.children
        return None if below is None else {at: Tried(node) for at, node in below.items()}

    @_OPTUNA.uses("count_unexpanded")
    def left(self) -> int:
        """Count the combinations that no trial has tried or is trying."""
        return int(self._node.count_unexpanded(exclude_running=True))

    @_OPTUNA.uses("is_any_expandable")
    def is_open(self) -> bool:
        """Whether parts of it are still unknown."""
        return bool(self._node.is_any_expandable(exclude_running=False))
