"""The trials of an oracle, handed out by the coordinator of any search.

The oracle lives on the first rank only, and hears of a trial what it hears of one in a search without blocks.
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
from nnlo_common.plugin import Death, Note, RunningTrial, Start, TeamMessage, TrialSource, warn
from nnlo_keras.tune._compat import mean_metrics

__all__ = ["FATAL", "NOT_AGAIN", "RESULT", "OracleTrials", "averaged"]

#: The attribute of a run that holds what it has found.
RESULT = "nnlo:result"
#: What the traceback of an error holds that ends the search, or that ends its trial for good.
FATAL = "(keras-tuner ends a search at an error like this)"
NOT_AGAIN = "(keras-tuner does not try a trial again after an error like this)"

# How often an oracle may answer that it waits though no trial runs: it may compute, but not for ever.
_PATIENCE = 250


@dataclass(eq=False)
class _OracleTrial:
    """A trial that a block has been given.

    Attributes:
        number: counts the trials of this job, one that is tried again each time.
        trial: the oracle's.
        name: of who trains it, as the oracle knows them.
        results: what the folds have found.
    """

    number: int
    trial: Any
    name: str
    results: dict[int, Any] = field(default_factory=dict)


class OracleTrials(TrialSource):
    """The trials of an oracle; an error of the oracle, or of the disk, ends the search on all ranks.

    Args:
        tuner: whose oracle it is, and whose `on_trial_...` methods are called.
        folds: how many folds each trial has.

    Attributes:
        failure: what has ended the search before its time.
    """

    def __init__(self, tuner: Any, folds: int = 1) -> None:
        self._tuner, self._folds = tuner, folds
        self._numbers = itertools.count()
        self._untold: list[_OracleTrial] = []  # of which the oracle does not know what has become
        self._withdrawn = self._idle = False
        self._asked_in_vain = 0.0
        self.failure: Exception | None = None

    @property
    def open(self) -> bool:
        return not self._withdrawn

    @property
    def pending(self) -> bool:
        """Whether the oracle wants to be asked again, though nobody trains."""
        return self._idle and self.open

    def left(self) -> float:
        """Return whether there is another trial; the oracle knows only when it is asked."""
        return math.inf if self.open and self._ask() != "STOPPED" else 0

    def take(self, block: int, *, first: bool, living: int) -> _OracleTrial | None:  # noqa: ARG002
        """Return the oracle's next trial, if it has one now."""
        if len(self._untold) >= living:  # in lock-step blocks wait for the oldest trial
            return None
        status = self._ask()
        self._asked_in_vain += 1 / living if self._idle else -self._asked_in_vain
        if self._asked_in_vain > _PATIENCE:
            self._fail(RuntimeError("the oracle waits for a trial, but none is running; it cannot go on"))
        return self._untold[-1] if status == "RUNNING" else None

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
        """Tell the oracle how a trial has ended; one that was broken off is trained again by the next job."""
        self._untold.remove(running.trial)
        if running.result.state != "halted" and self.failure is None:
            self._guarded(self._tell, running)

    def withdraw(self, reason: str) -> None:  # noqa: ARG002
        self._withdrawn = True

    def finish(self, lost: Sequence[Death]) -> tuple[dict[str, Any], ...]:  # noqa: ARG002
        """Return the oracle's state, its trials, and what has ended the search before its time."""
        oracle, failure = self._tuner.oracle, self.failure
        content = {
            "oracle": oracle.get_state(),
            "trials": [trial.get_state() for trial in oracle.trials.values()],
            "failure": None if failure is None else [type(failure).__name__, str(failure)],
        }
        return (json.loads(json.dumps(content)),)  # as it is written to files

    def warn(self, text: str) -> None:
        warn(text)

    # -- inside ---------------------------------------------------------------------------------------

    def _guarded(self, call: Callable[..., str], *args: Any) -> str:
        try:
            return call(*args)
        except Exception as error:  # raised again, on all ranks, when nobody trains any more
            self._fail(error)
            return "STOPPED"

    def _fail(self, error: Exception) -> None:
        self.failure, self.stop_reason = error, f"the search has ended: {error}"
        self._withdrawn = True

    def _ask(self) -> str:
        """Ask the oracle for a trial; return its status."""
        status = self._guarded(self._create)
        self._idle = status == "IDLE" and not self._untold
        return status

    def _create(self) -> str:
        self._tuner.pre_create_trial()
        oracle = self._tuner.oracle
        for trial in oracle.trials.values():
            if trial.status in {"FAILED", "INVALID"}:
                # Perhaps before it had all parameters, which a grid wants.
                trial.hyperparameters.merge(oracle.get_space(), overwrite=False)
                trial.hyperparameters.ensure_active_values()
        # The oracle would give a name's trial again until it has heard what became of it.
        taken = {one.name for one in self._untold}
        name = next(name for index in itertools.count() if (name := f"block{index}") not in taken)
        trial = oracle.create_trial(name)
        if trial.status == "RUNNING":
            trial.metrics = type(trial.metrics)()  # of an earlier try
            self._untold.append(_OracleTrial(next(self._numbers), trial, name))
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
        oracle = self._tuner.oracle
        found = [result["metrics"] for result in results]
        metrics = found[0] if self._folds == 1 else averaged(found, oracle.objective.name)
        trial.hyperparameters = HyperParameters.from_config(results[0]["hyperparameters"])
        score = metrics.get(oracle.objective.name, 0.0)
        if not math.isfinite(score):
            trial.status, trial.message = "INVALID", f"the objective {oracle.objective.name} is {score}"
            return
        try:
            # Folds have their best epochs at several steps, so their means are of none.
            oracle.update_trial(trial.trial_id, metrics, step=results[0]["step"] if self._folds == 1 else 0)
            trial.status = "COMPLETED"
        except Exception as error:  # as keras-tuner has it: the trial is at fault
            trial.status, trial.message = "INVALID", "".join(traceback.format_exception(error))


def averaged(found: Sequence[dict[str, float]], objective: str) -> dict[str, float]:
    """Return the means of the folds' metrics, and each fold's value of the objective as a metric of its own.

    Example:
        >>> averaged([{"val_loss": 0.5}, {"val_loss": 0.25}], "val_loss")
        {'val_loss': 0.375, 'val_loss of fold 0': 0.5, 'val_loss of fold 1': 0.25}
    """
    return mean_metrics(found) | {
        f"{objective} of fold {fold}": float(metrics[objective])
        for fold, metrics in enumerate(found)
        if objective in metrics
    }
