"""Reader of a directory of keras-tuner, as `MPITuner` leaves it: a JSON file for each trial.

The files do not name the objective: it is the metric whose value is the score in every trial.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import read_whole
from nnlo_common.base._limited_formats import LARGEST_JSON, parsed_json
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts, last_problem

__all__ = ["ORACLE", "TunerSearch", "read_tuner"]

#: The file that each directory of keras-tuner has.
ORACLE = "oracle.json"
_STATES = {"COMPLETED": "complete", "FAILED": "failed", "INVALID": "failed"}
_FOLD = " of fold "


def read_tuner(folder: Path) -> TunerSearch:
    """Read the trials of a directory.

    Raises:
        ConfigurationError: a file cannot be read, or is not what keras-tuner writes.
    """
    read = []
    for path in sorted(folder.glob("trial_*/trial.json")):
        try:
            read.append(_TunerTrial.of(path.parent.name, parsed_json(read_whole(path, LARGEST_JSON))))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read ({error.strerror})") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            told = f"{type(error).__name__}: {error}"
            raise ConfigurationError(f"{path} is not what keras-tuner writes ({told:.200})") from error
    return TunerSearch(folder, read)


@dataclass(frozen=True, slots=True)
class _TunerTrial:
    """A trial as its file has it.

    Attributes:
        folder: its name.
        state: "complete" or "failed"; empty: not finished.
        score: its value, if it is complete.
        params: its parameters.
        logs: those with a logarithmic scale.
        metrics: the direction of each metric, and its mean after each epoch that is kept.
        message: its error.
    """

    folder: str
    state: str
    score: float | None
    params: dict[str, Any]
    logs: set[str]
    metrics: dict[str, tuple[str, list[float]]]
    message: str

    @classmethod
    def of(cls, folder: str, told: Any) -> _TunerTrial:
        state, score, message = _STATES.get(str(told["status"]), ""), told["score"], told.get("message")
        if state == "complete" and not (is_number(score) and math.isfinite(score)):
            state, message = "failed", f"its score is {score!r:.60}"
        chosen = told["hyperparameters"]
        plain = {str(name): one for name, one in chosen["values"].items() if _is_plain(one)}
        scales = [one["config"] for one in chosen["space"]]
        return cls(
            folder=folder,
            state=state,
            score=float(score) if state == "complete" else None,
            params=plain,
            logs={str(one["name"]) for one in scales if one.get("sampling") == "log"},
            metrics={
                str(name): (str(one["direction"]), [_mean(seen["value"]) for seen in one["observations"]])
                for name, one in told["metrics"]["metrics"].items()
            },
            message=str(message or ""),
        )

    def finished(self, number: int, metric: str) -> FinishedTrial:
        """Return it as a trial of any search."""
        folds: list[float] = []
        while (name := f"{metric}{_FOLD}{len(folds)}") in self.metrics and self.metrics[name][1]:
            folds.append(self.metrics[name][1][-1])
        return FinishedTrial(
            number=number,
            state=self.state,
            value=self.score,
            params=self.params,
            folds=tuple(folds),
            steps=(),
            block=0,
            folder=self.folder,
            began_s=0.0,
            ended_s=0.0,
            problem=last_problem(self.message),
        )


class TunerSearch:
    """The search in a directory of keras-tuner.

    Args:
        folder: the directory.
        read: its trials.
    """

    def __init__(self, folder: Path, read: Sequence[_TunerTrial]) -> None:
        self._folder, self._read = folder, [one for one in read if one.state]
        self._unfinished = len(read) - len(self._read)

    @cached_property
    def facts(self) -> PageFacts:
        """What the page shows beside the trials."""
        metric, direction = self._objective()
        return PageFacts(
            metric=metric,
            maximize=direction == "max",
            place=self._folder,
            parameters=list(dict.fromkeys(name for one in self._read for name in one.params)),
            folds=max((len(one.folds) for one in self._finished(metric)), default=0) or 1,
            unfinished=self._unfinished,
            home="",
        )

    @cached_property
    def trials(self) -> list[FinishedTrial]:
        """The finished trials."""
        return self._finished(self.facts.metric)

    def _finished(self, metric: str) -> list[FinishedTrial]:
        numbers = [_number(one.folder) for one in self._read]
        if None in numbers or len(set(numbers)) < len(numbers):  # ids of an oracle that does not count
            numbers = [*range(len(self._read))]
        found = [one.finished(number or 0, metric) for one, number in zip(self._read, numbers, strict=True)]
        return sorted(found, key=lambda one: one.number)

    def _objective(self) -> tuple[str, str]:
        """Return the name and the direction of the score; keras-tuner minimizes what is no metric."""
        complete = [one for one in self._read if one.score is not None]
        known = complete[0].metrics if complete else {}
        for name, (direction, _) in known.items():
            if all(_has(one, name) for one in complete):
                return name, direction
        return "score", "min"

    def frozen(self) -> list[Any]:
        """Return the trials as Optuna's, for its figures."""
        from optuna.trial import TrialState, create_trial

        spaces = self._spaces()
        made = []
        for one in self.trials:
            trial = create_trial(
                state=TrialState.FAIL if one.value is None else TrialState.COMPLETE,
                value=one.value,
                params=one.params,
                distributions={name: spaces[name] for name in one.params},
            )
            trial.number = one.number
            made.append(trial)
        return made

    def _spaces(self) -> dict[str, Any]:
        """Return distributions that have all values that were tried."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        spaces: dict[str, Any] = {}
        for name in self.facts.parameters:
            tried = [one.params[name] for one in self._read if name in one.params]
            if all(is_number(one) for one in tried):
                log = min(tried) > 0 and any(name in one.logs for one in self._read)
                spaces[name] = FloatDistribution(min(tried), max(tried), log=log)
            else:
                spaces[name] = CategoricalDistribution(list({repr(one): one for one in tried}.values()))
        return spaces


def _has(trial: _TunerTrial, metric: str) -> bool:
    """Return whether the metric had the trial's score."""
    _, seen = trial.metrics.get(metric, ("", []))
    return any(math.isclose(one, trial.score or 0.0, rel_tol=1e-9) for one in seen)


def _mean(values: Any) -> float:
    return math.fsum(values) / len(values)


def _number(folder: str) -> int | None:
    """Return the number in the name of a trial's folder, if it is one."""
    told = folder.removeprefix("trial_")
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 10 else None


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | bool) or (is_number(value) and math.isfinite(value))
