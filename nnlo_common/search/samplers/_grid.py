"""Grid sampler: tries each combination once, also when several trials choose at the same time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.samplers import BruteForceSampler
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search._compat import Tried, numbers_of

__all__ = ["Grid"]

_BEGUN = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING)


class Grid(BruteForceSampler):
    """Tries each combination once; refuses an infinite space.

    The grid is known only once trials have chosen from it. If more trials begin at once than it has
    combinations, or than an incompletely known branch has, some combinations are tried twice.
    """

    def spent(self, study: optuna.Study) -> bool:
        """Whether each combination is tried, running, or reserved for a trial that is choosing.

        Optuna would begin more trials all the same, and try some combinations twice.
        """
        trials = study.get_trials(deepcopy=False, states=_BEGUN)
        tree = Tried.of(trials, {})
        if tree.children is None:
            return False  # no trial has chosen yet, so the space is unknown
        return tree.left() <= len(_choosing(trials))

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Choose one parameter."""
        _refuse_endless(param_name, param_distribution)
        trials = study.get_trials(deepcopy=False, states=_BEGUN)
        others = [one for one in trials if one.number != trial.number]
        children = Tried.of(others, trial.params).children
        if not children:
            return super().sample_independent(study, trial, param_name, param_distribution)
        left = Counter({at: node.left() for at, node in children.items()})
        crowd = Counter[float]()
        for other in others:
            beside = other.state is TrialState.RUNNING and trial.params.items() <= other.params.items()
            if beside and param_name in other.params:
                at = param_distribution.to_internal_repr(other.params[param_name])
                crowd[at] += 1
                left[at] -= bool(Tried.of(trials, other.params).children)  # reserve one combination for it
        weights = {at: count for at, count in left.items() if count > 0}
        if not weights:  # prefer open branches with the fewest trials; else any
            unseen = [at for at, node in children.items() if node.is_open()]
            fewest = min((crowd[at] for at in unseen), default=0)
            weights = dict.fromkeys([at for at in unseen if crowd[at] == fewest] or children, 1)
        chances = [weight / sum(weights.values()) for weight in weights.values()]
        chosen = numbers_of(self).choice([*weights], p=chances)
        return param_distribution.to_external_repr(chosen.item())


def _refuse_endless(name: str, distribution: BaseDistribution) -> None:
    if isinstance(distribution, FloatDistribution) and distribution.step is None:
        raise ConfigurationError(
            f'sampler="grid" cannot try all values of {name!r}, a float without a step: give it one, '
            f"e.g. suggest_float({name!r}, {distribution.low:g}, {distribution.high:g}, step=...), "
            "or make it a choice of some values"
        )


def _choosing(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """Return the running trials that must still choose a parameter which others chose at that point."""
    running = (trial for trial in trials if trial.state is TrialState.RUNNING)
    return [trial for trial in running if Tried.of(trials, trial.params).children]
