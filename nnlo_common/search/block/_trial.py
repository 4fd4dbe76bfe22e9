"""Trial as the objective sees it, on every rank of a block.

    objective ─► suggest_float("lr", ...) ─► leader: asks the coordinator, sends the value to its partners
                                          └► partner: waits for the leader's value

Every method returns the same on all ranks of the block; only the leader sends `report` and attributes.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    check_distribution_compatibility,
    distribution_to_json,
)
from optuna.trial import BaseTrial

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search.block._folds import Indices, split
from nnlo_common.search.block._trial_links import TrialLink
from nnlo_common.search.coordinator._trial_results import NAME
from nnlo_common.search.messages._search_messages import (
    Note,
    ParameterRequest,
    PruneRequest,
    Start,
    TrialReport,
)

__all__ = ["BlockTrial"]

_PLAIN = (type(None), bool, int, float, str)


class BlockTrial(BaseTrial):
    """A trial of a search over blocks of ranks.

    Attributes:
        seed: the trial's seed, or the fold's; the same on all ranks, and when the search is repeated.
        name: the trial's name, or the fold's, for folders; it stays when a killed search resumes.
        fold: the fold, from 0.
        folds: the number of folds; 1 if the search has none.

    Args:
        start: the coordinator's message.
        line: the link to the coordinator.
    """

    def __init__(self, start: Start, line: TrialLink) -> None:
        self._number, self._run, self.seed, self._line = start.trial, start.run, start.seed, line
        self.fold, self.folds, self._split_seed = start.fold, start.folds, start.split_seed
        self._directions = start.directions
        self._params: dict[str, Any] = {}
        self._distributions: dict[str, BaseDistribution] = {}
        self._user_attrs, self._constraints = dict(start.attributes), dict[str, float]()
        name = self._user_attrs.get(NAME, f"{start.trial:04}")
        self.name = f"{name}-fold{start.fold + 1}" if start.folds > 1 else str(name)
        self._start = datetime.datetime.now()

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Choose a float."""
        return float(self._suggest(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Choose a whole number."""
        return int(self._suggest(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Choose one of several."""
        if odd := [choice for choice in choices if not isinstance(choice, _PLAIN)]:
            raise ConfigurationError(
                f"suggest_categorical({name!r}): {odd[0]!r} is a {type(odd[0]).__name__}; choices must be "
                "None, bool, int, float or str: choose among names, and look the objects up in a dict"
            )
        return self._suggest(name, CategoricalDistribution(choices))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """Choose a float; Optuna's old name for `suggest_float`."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """Choose a float on a logarithmic scale; Optuna's old name for `suggest_float(..., log=True)`."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """Choose a float in steps; Optuna's old name for `suggest_float(..., step=q)`."""
        return self.suggest_float(name, low, high, step=q)

    def report(self, value: float, step: int) -> None:
        """Report an intermediate value; the value from the block's first rank counts."""
        self._refuse_several("report")
        try:
            message = TrialReport(self._run, float(value), int(step))
        except (TypeError, ValueError):
            message = None
        if message is None or message.step < 0:
            raise ConfigurationError(
                f"report(value={value!r}, step={step!r}): give a number and its step, from 0"
            )
        self._line.tell(message)

    def should_prune(self) -> bool:
        """Ask whether to prune this trial; all ranks of the block get the same answer to the same call.

        Call it on all ranks after an epoch. Folds that train side by side wait for each other here.
        """
        self._refuse_several("should_prune")
        return self._line.verdict(PruneRequest(self._run))

    def split(self, samples: int, *, labels: Any = None, groups: Any = None) -> tuple[Indices, Indices]:
        """Return the training and the validation samples of this fold, as sorted indices.

        Every sample validates in one fold, the same in all trials of a search and on all ranks.

        Args:
            samples: the number of samples.
            labels: the class of each sample, to give each fold its share of every class.
            groups: the group of each sample, to keep each group on one side.

        Raises:
            ConfigurationError: the search has no folds, or there are too few samples for them.
        """
        if self.folds == 1:
            raise ConfigurationError("trial.split: this search has no folds; use optimize(..., folds=5)")
        return split(samples, self.folds, self.fold, labels=labels, groups=groups, seed=self._split_seed)

    def set_user_attr(self, key: str, value: Any) -> None:
        """Store a value with the trial; the value from the block's first rank counts."""
        try:
            kept = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"set_user_attr({key!r}, ...): a {type(value).__name__} cannot be written as JSON; give "
                "numbers, texts, lists and dicts of them"
            ) from None
        self._user_attrs[key] = kept
        self._line.tell(Note(self._run, key, kept))

    def set_constraint(self, key: str, value: float) -> None:
        """Set a constraint, satisfied at zero or less; the value from the block's first rank counts."""
        if math.isnan(value):
            raise ConfigurationError(
                f"set_constraint({key!r}, {value!r}): give a number, at most 0 if satisfied"
            )
        self._constraints[key] = float(value)
        self._line.tell(Note(self._run, key, float(value), constraint=True))

    @property
    def number(self) -> int:
        """The number of the trial in its study."""
        return self._number

    @property
    def params(self) -> dict[str, Any]:
        """The parameters chosen so far."""
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distributions of the parameters chosen so far."""
        return dict(self._distributions)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The attributes of this trial as this rank knows them."""
        return dict(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        """The constraints as this rank knows them."""
        return dict(self._constraints)

    @property
    def datetime_start(self) -> datetime.datetime:
        """When this rank began the trial."""
        return self._start

    def _refuse_several(self, call: str) -> None:
        if self._directions > 1:
            raise ConfigurationError(
                f"trial.{call}: pruning needs a single objective, not {self._directions}; leave it out"
            )

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        known = self._distributions.get(name)
        if known is not None:
            check_distribution_compatibility(known, distribution)
            return self._params[name]
        message = ParameterRequest(self._run, name, distribution_to_json(distribution))
        value = distribution.to_external_repr(
            self._line.suggest(message, f"suggest {name!r}: {distribution}")
        )
        self._params[name], self._distributions[name] = value, distribution
        return value
