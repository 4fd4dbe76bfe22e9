"""Endings of trials for the study: the value, what is stored with it, and what failures say.

FOLDS, SPREAD     what each fold has returned, and the standard deviation of that
ERROR, FAILURE    what went wrong, and of what kind it was
SECONDS           how long the trial has trained
NAME              of what is kept elsewhere of the trial, also when it goes on under another number
HELPERS           which blocks have helped to train it, at the end of an elastic search
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import optuna
from optuna.trial import Trial, TrialState

from nnlo_common.base._errors import ConfigurationError

__all__ = [
    "ERROR",
    "FAILURE",
    "FOLDS",
    "HELPERS",
    "NAME",
    "SECONDS",
    "SPREAD",
    "FailurePolicy",
    "keep_folds",
    "log_best",
    "mean",
    "tell",
]

#: The user attribute that holds what went wrong in a failed trial.
ERROR = "nnlo:error"
#: The user attribute that says of what kind that was; also a constraint, if failures are to be one.
FAILURE = "nnlo:failure"
#: The user attribute that holds the value of every fold; None: it has not ended.
FOLDS = "nnlo:folds"
#: The user attribute that holds the standard deviation of the folds' values.
SPREAD = "nnlo:spread"
#: The user attribute that says how long a trial has trained.
SECONDS = "nnlo:seconds"
#: The user attribute by which what is kept of a trial elsewhere is called.
NAME = "nnlo:name"
#: The user attribute that names the blocks that have helped the trial's own, each with the time since when.
HELPERS = "nnlo:helpers"
# Optuna's own, so that its verbosity is obeyed: users know its lines.
_LOG = optuna.logging.get_logger("optuna.study")
_BROKEN, _KEPT = 1.0, -1.0

FoldValues = Sequence[tuple[float, ...] | None]


def mean(outcomes: FoldValues) -> tuple[float, ...]:
    """Return the mean over the folds, for each objective; of a single fold its very value."""
    known = [values for values in outcomes if values is not None]
    if len(known) == 1:
        return known[0]
    # Not fsum: values may be infinite.
    return tuple(sum(values) / len(values) for values in zip(*known, strict=True))


def keep_folds(trial: Trial, outcomes: FoldValues) -> None:
    """Keep the value of each fold with the trial, and how far they are apart."""
    plain = [values[0] if values is not None and len(values) == 1 else values for values in outcomes]
    trial.set_user_attr(FOLDS, [list(one) if isinstance(one, tuple) else one for one in plain])
    known = [values for values in outcomes if values is not None]
    if len(known) > 1 and all(math.isfinite(value) for values in known for value in values):
        spreads = [statistics.stdev(values) for values in zip(*known, strict=True)]
        trial.set_user_attr(SPREAD, spreads if len(spreads) > 1 else spreads[0])


class FailurePolicy:
    """What a failed trial tells the sampler.

    Args:
        study: the study.
        how: "ignore": nothing, as if the trial had not been. "worst": that its value is the worst so far.
            "constraint": the same, and that it breaks a constraint, which trials that do not fail keep.

    Raises:
        ConfigurationError: there is no such way.
    """

    def __init__(self, study: optuna.Study, how: Literal["ignore", "worst", "constraint"] = "ignore") -> None:
        if how not in ("ignore", "worst", "constraint"):
            raise ConfigurationError(f"failures={how!r} is not known: use 'ignore', 'worst' or 'constraint'")
        self._study, self._how = study, how

    def kept(self, trial: Trial) -> None:
        """Note that this trial has not failed."""
        if self._how == "constraint":
            trial.set_constraint(FAILURE, _KEPT)

    def values(self, trial: Trial) -> list[float] | None:
        """Return what a failed trial is told to have returned; None: that it has failed."""
        complete = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        # Told worst values are among them, and change nothing.
        known = [one.values for one in complete if all(map(math.isfinite, one.values))]
        if self._how == "ignore" or not known:
            return None
        if self._how == "constraint":
            self._break(trial, complete[0].constraints)
        return [
            (max if direction is optuna.study.StudyDirection.MINIMIZE else min)(values)
            for direction, values in zip(self._study.directions, zip(*known, strict=True), strict=True)
        ]

    def _break(self, trial: Trial, others: dict[str, float]) -> None:
        # A Gaussian process needs the same constraints of all trials, in the same order.
        mine = trial.study.get_trials(deepcopy=False)[trial.number].constraints
        for name in others:
            if name not in mine and name != FAILURE:
                trial.set_constraint(name, 0.0)
        trial.set_constraint(FAILURE, _BROKEN)


def tell(
    study: optuna.Study, trial: Trial, state: str, values: Sequence[float] | None, failures: FailurePolicy
) -> None:
    """Tell the study how a trial has ended.

    Args:
        study: the study.
        trial: the trial.
        state: "complete", "pruned", "failed", or "halted": broken off, which tells the sampler nothing.
        values: what it has returned.
        failures: what a failure tells the sampler.
    """
    if state == "complete":
        failures.kept(trial)
        study.tell(trial, values)
        told = "Trial %d finished with values: %s and parameters: %s."
        _LOG.info(told, trial.number, list(values or ()), trial.params)
    elif state == "pruned":
        study.tell(trial, state=TrialState.PRUNED)
        _LOG.info("Trial %d pruned.", trial.number)
    elif state == "failed" and (told_values := failures.values(trial)) is not None:
        study.tell(trial, told_values)
    else:
        study.tell(trial, state=TrialState.FAIL)


def log_best(study: optuna.Study) -> None:
    """Say which trial is the best."""
    if len(study.directions) > 1 or not study.get_trials(False, [TrialState.COMPLETE]):
        return
    try:
        best: Any = study.best_trial
    except ValueError:  # none keeps all constraints
        return
    _LOG.info("Best is trial %d with value: %s and parameters: %s.", best.number, best.value, best.params)
