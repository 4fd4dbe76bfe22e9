"""Trials of an oracle, handed out by the coordinator that runs every search.

The oracle lives on the first rank only, and is called as in a search without blocks.
"""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras_tuner
from keras_tuner.engine.hyperparameters import HyperParameters

from nnlo_common import ProtocolError
from nnlo_common.plugin import Death, Note, RunningTrial, Start, TeamMessage, TrialChooser, TrialSource, warn
from nnlo_keras.tune._compat import mean_metrics

__all__ = ["FATAL", "NOT_AGAIN", "RESULT", "OracleTrials", "averaged"]

#: Attribute of a run: its results.
RESULT = "nnlo:result"
#: Notes in the traceback of an error that ends the search, and of one that ends its trial for good.
FATAL = "(keras-tuner ends a search at an error like this)"
NOT_AGAIN = "(keras-tuner does not try a trial again after an error like this)"

# How often an oracle may answer that it waits while no trial runs: it may be computing, but not for ever.
_PATIENCE = 250


@dataclass(eq=False)
class _OracleTrial:
    """A trial given to a block.

    Attributes:
        number: counts the trials of this job, retries too.
        trial: the oracle's trial.
        name: the tuner name given to the oracle for this trial.
        results: the results of the folds.
    """

    number: int
    trial: Any
    name: str
    results: dict[int, Any] = field(default_factory=dict)


class OracleTrials(TrialSource, TrialChooser):
    """The trials of an oracle; an error of the oracle or the disk ends the search on all ranks.

    Args:
        tuner: owns the oracle; its `on_trial_...` methods are called.
        folds: folds per trial.

    Attributes:
        failure: the error that ended the search early.
    """

    def __init__(self, tuner: Any, folds: int = 1) -> None:
        self._tuner, self._folds, self.chooser = tuner, folds, self
        self._numbers = itertools.count()
        self._unreported: list[_OracleTrial] = []  # trials whose result the oracle does not have
        self._withdrawn = self._idle = False
        self._idle_answers = 0.0
        self.failure: Exception | None = None

    @property
    def open(self) -> bool:
        return not self._withdrawn

    @property
    def pending(self) -> bool:
        """Whether the oracle must be asked again although no trial runs."""
        return self._idle and self.open

    def left(self) -> float:
        """Return infinity if the oracle gives another trial, else 0; only asking it tells."""
        return math.inf if self.open and self._ask() != "STOPPED" else 0

    def take(self, block: int, *, first: bool, living: int) -> _OracleTrial | None:  # noqa: ARG002
        """Return the oracle's next trial; None if it has none now."""
        if len(self._unreported) >= living:  # in lock-step idle blocks wait for the oldest trial
            return None
        status = self._ask()
        self._idle_answers += 1 / living if self._idle else -self._idle_answers
        if self._idle_answers > _PATIENCE:
            self._fail(RuntimeError("the oracle waits for a trial, but none is running; it cannot continue"))
        return self._unreported[-1] if status == "RUNNING" else None

    def start(self, running: RunningTrial, run: int, fold: int) -> Start:
        trial = running.trial.trial
        hyperparameters = json.loads(json.dumps(trial.hyperparameters.get_config()))
        attributes = {"id": trial.trial_id, "hyperparameters": hyperparameters}
        number = running.trial.number
        return Start(run, self._tuner.oracle.seed, 1, attributes, number, fold, self._folds)

    def handle(self, team: int, running: RunningTrial, message: object) -> list[TeamMessage]:
        if not isinstance(message, Note) or message.key != RESULT:
            raise ProtocolError(f"team {team} sent {message!r}, which is not for the oracle")
        running.trial.results[running.running[team]] = message.value
        return []

    def tell(self, running: RunningTrial, *, interrupted: bool, stopped: bool) -> None:  # noqa: ARG002
        """Report a trial's result to the oracle; the next job trains an interrupted trial again."""
        self._unreported.remove(running.trial)
        if running.result.state != "halted" and self.failure is None:
            self._guarded(self._tell, running)

    def withdraw(self, reason: str) -> None:  # noqa: ARG002
        self._withdrawn = True

    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:  # noqa: ARG002
        """Return the oracle's state, its trials, and the error that ended the search early."""
        oracle, failure = self._tuner.oracle, self.failure
        content = {
            "oracle": oracle.get_state(),
            "trials": [trial.get_state() for trial in oracle.trials.values()],
            "failure": None if failure is None else [type(failure).__name__, str(failure)],
        }
        return (json.loads(json.dumps(content)),)  # convert as for files

    def warn(self, text: str) -> None:
        warn(text)

    # -- inside ---------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., str], *args: Any) -> str:
        try:
            return call(*args)
        except Exception as error:  # raised again on all ranks once no trial runs
            self._fail(error)
            return "STOPPED"

    def _fail(self, error: Exception) -> None:
        self.failure, self.stop_reason = error, f"the search failed: {error}"
        self._withdrawn = True

    def _ask(self) -> str:
        """Ask the oracle for a trial; return its status."""
        status = self._guarded(self._create)
        self._idle = status == "IDLE" and not self._unreported
        return status

    def _create(self) -> str:
        self._tuner.pre_create_trial()
        oracle = self._tuner.oracle
        for trial in oracle.trials.values():
            if trial.status in {"FAILED", "INVALID"}:
                # It may have failed before it had all parameters, which a grid requires.
                trial.hyperparameters.merge(oracle.get_space(), overwrite=False)
                trial.hyperparameters.ensure_active_values()
        # The oracle repeats a name's trial until that trial's result is reported.
        taken = {one.name for one in self._unreported}
        name = next(name for index in itertools.count() if (name := f"block{index}") not in taken)
        trial = oracle.create_trial(name)
        if trial.status == "RUNNING":
            trial.metrics = type(trial.metrics)()  # of an earlier try
            self._unreported.append(_OracleTrial(next(self._numbers), trial, name))
            self._tuner.on_trial_begin(trial)
        return str(trial.status)

    def _tell(self, running: RunningTrial) -> str:
        trial, ending = running.trial.trial, running.result
        problem = "" if ending.state == "complete" else ending.error or ending.state
        if problem:
            trial.status = "FAILED" if NOT_AGAIN in problem else "INVALID"
            trial.message = problem
        else:
            self._complete(trial, [running.trial.results[fold] for fold in range(self._folds)])
        if FATAL in problem:
            raise keras_tuner.errors.FatalError(f"trial {trial.trial_id}: {problem}")
        self._tuner.on_trial_end(trial)
        return str(trial.status)

    def _complete(self, trial: Any, results: Sequence[Any]) -> None:
        oracle, objective = self._tuner.oracle, self._tuner.oracle.objective.name
        reports = results[0]["reports"]
        if self._folds > 1:
            # Folds have their best epochs at different steps, so a mean belongs to none.
            best = [_best(result["reports"], oracle.objective) for result in results]
            reports = [(0, averaged(best, objective))]
        trial.hyperparameters = HyperParameters.from_config(results[0]["hyperparameters"])
        scores = [metrics.get(objective, 0.0) for _, metrics in reports]
        if not any(map(math.isfinite, scores)):
            trial.status, trial.message = "INVALID", f"the objective {objective} is {scores[-1]}"
            return
        try:
            for step, metrics in reports:
                oracle.update_trial(trial.trial_id, metrics, step=step)
            trial.status = "COMPLETED"
        except Exception as error:  # like keras-tuner, blame the trial
            trial.status, trial.message = "INVALID", "".join(traceback.format_exception(error))


def _best(reports: Sequence[tuple[float, dict[str, float]]], objective: Any) -> dict[str, float]:
    """Return the metrics of the report with the best objective; nearly always there is only one report."""
    best = reports[0][1]
    for _, metrics in reports[1:]:
        if objective.better_than(*(one.get(objective.name, math.nan) for one in (metrics, best))):
            best = metrics
    return best


def averaged(found: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """Return the means of the folds' metrics, and each fold's objective as a metric of its own.

    Example:
        >>> averaged([{"val_loss": 0.5}, {"val_loss": 0.25}], "val_loss")
        {'val_loss': 0.375, 'val_loss of fold 0': 0.5, 'val_loss of fold 1': 0.25}
    """
    return mean_metrics(found) | {
        f"{objective} of fold {fold}": float(metrics[objective])
        for fold, metrics in enumerate(found)
        if objective in metrics
    }
