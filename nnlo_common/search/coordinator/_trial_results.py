"""Results of trials for the study: the value, the attributes stored with it, and the effect of failures.

FOLDS, SPREAD     the values of the folds, and their standard deviation
ERROR, FAILURE    the error, and its kind
SECONDS           how long the trial trained
NAME              of the trial's files; kept when the trial resumes under another number
HELPERS           blocks that helped to train it at the end of an elastic search
COORDINATOR       of the study: the rank that has taken over from the first
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import optuna
from optuna.trial import Trial, TrialState

from nnlo_common.base._errors import ConfigurationError, DivergedError, is_out_of_memory

__all__ = [
    "COORDINATOR",
    "ERROR",
    "FAILURE",
    "FOLDS",
    "FailurePolicy",
    "HELPERS",
    "LOG",
    "NAME",
    "SECONDS",
    "SPREAD",
    "keep_folds",
    "kind_of",
    "log_best",
    "mean",
    "tell",
]

# -- kinds of failure: tells out-of-memory and divergence from all other errors ------------------------


def kind_of(error: BaseException) -> str:
    """Return "out of memory", "diverged" or "error".

    Example:
        >>> kind_of(MemoryError()), kind_of(RuntimeError("CUDA error: out of memory")), kind_of(ValueError())
        ('out of memory', 'out of memory', 'error')
    """
    if is_out_of_memory(error):
        return "out of memory"
    return "diverged" if isinstance(error, DivergedError) else "error"


#: User attribute: the error of a failed trial.
ERROR = "nnlo:error"
#: User attribute: the kind of failure; also the constraint's name with failures="constraint".
FAILURE = "nnlo:failure"
#: User attribute: the value of every fold; None: it did not complete.
FOLDS = "nnlo:folds"
#: User attribute: the standard deviation of the folds' values.
SPREAD = "nnlo:spread"
#: User attribute: how long the trial trained.
SECONDS = "nnlo:seconds"
#: User attribute: the name of the trial's files, e.g. its checkpoints.
NAME = "nnlo:name"
#: User attribute: the blocks that helped the trial's own, each with the time when it began to help.
HELPERS = "nnlo:helpers"
#: User attribute of the study on a rank that has taken over from a dead coordinator: its number.
COORDINATOR = "nnlo:coordinator"
#: Optuna's logger, so that its verbosity setting applies and users see the lines they know.
LOG = optuna.logging.get_logger("optuna.study")
_VIOLATED, _SATISFIED = 1.0, -1.0

FoldValues = Sequence[tuple[float, ...] | None]


def mean(outcomes: FoldValues) -> tuple[float, ...]:
    """Return each objective's mean over the folds; a single fold's value unchanged."""
    known = [values for values in outcomes if values is not None]
    if len(known) == 1:
        return known[0]
    # Not fsum: values may be infinite.
    return tuple(sum(values) / len(values) for values in zip(*known, strict=True))


def keep_folds(trial: Trial, outcomes: FoldValues) -> None:
    """Store each fold's value and their standard deviation with the trial."""
    plain = [values[0] if values is not None and len(values) == 1 else values for values in outcomes]
    trial.set_user_attr(FOLDS, [list(one) if isinstance(one, tuple) else one for one in plain])
    known = [values for values in outcomes if values is not None]
    if len(known) > 1 and all(math.isfinite(value) for values in known for value in values):
        spreads = [statistics.stdev(values) for values in zip(*known, strict=True)]
        trial.set_user_attr(SPREAD, spreads if len(spreads) > 1 else spreads[0])


class FailurePolicy:
    """Policy for failed trials: what the sampler learns of them.

    Args:
        study: the study.
        how: "ignore": nothing, as if the trial had not run. "worst": the worst value so far, once it is not
            the best one, too. "constraint": that, and a violated constraint that other trials satisfy.

    Raises:
        ConfigurationError: `how` is none of these.
    """

    def __init__(self, study: optuna.Study, how: Literal["ignore", "worst", "constraint"] = "ignore") -> None:
        if how not in ("ignore", "worst", "constraint"):
            raise ConfigurationError(f"failures={how!r} is not known: use 'ignore', 'worst' or 'constraint'")
        self._study, self._how = study, how

    def kept(self, trial: Trial) -> None:
        """Record that a trial did not fail."""
        if self._how == "constraint":
            trial.set_constraint(FAILURE, _SATISFIED)

    def values(self, trial: Trial) -> list[float] | None:
        """Return the values to report for a failed trial; None: report a failure."""
        complete = self._study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        # These include worst values reported earlier, which change nothing.
        known = [one.values for one in complete if all(map(math.isfinite, one.values))]
        # Of equal values the worst is the best, too, and the failed trial might become the best one.
        if self._how == "ignore" or len(set(map(tuple, known))) < 2:
            return None
        if self._how == "constraint":
            self._violate(trial, complete[0].constraints)
        return [
            (max if direction is optuna.study.StudyDirection.MINIMIZE else min)(values)
            for direction, values in zip(self._study.directions, zip(*known, strict=True), strict=True)
        ]

    def _violate(self, trial: Trial, others: dict[str, float]) -> None:
        # A Gaussian process needs the same constraints for all trials, in the same order.
        mine = trial.study.get_trials(deepcopy=False)[trial.number].constraints
        for name in others:
            if name not in mine and name != FAILURE:
                trial.set_constraint(name, 0.0)
        trial.set_constraint(FAILURE, _VIOLATED)


def tell(
    study: optuna.Study, trial: Trial, state: str, values: Sequence[float] | None, failures: FailurePolicy
) -> None:
    """Report a trial's result to the study.

    Args:
        study: the study.
        trial: the trial.
        state: "complete", "pruned", "failed", or "halted": interrupted, of which the sampler learns nothing.
        values: the values it returned.
        failures: what the sampler learns of a failure.
    """
    if state == "complete":
        failures.kept(trial)
        study.tell(trial, values)
        text = "Trial %d finished with values: %s and parameters: %s."
        LOG.info(text, trial.number, list(values or ()), trial.params)
    elif state == "pruned":
        study.tell(trial, state=TrialState.PRUNED)
        LOG.info("Trial %d pruned.", trial.number)
    elif state == "failed" and (told_values := failures.values(trial)) is not None:
        study.tell(trial, told_values)
    else:
        study.tell(trial, state=TrialState.FAIL)


def log_best(study: optuna.Study) -> None:
    """Log the best trial."""
    if len(study.directions) > 1 or not study.get_trials(False, [TrialState.COMPLETE]):
        return
    try:
        best: Any = study.best_trial
    except ValueError:  # no trial satisfies all constraints
        return
    LOG.info("Best is trial %d with value: %s and parameters: %s.", best.number, best.value, best.params)
