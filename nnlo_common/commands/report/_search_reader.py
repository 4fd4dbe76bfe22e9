"""Reader of a script's search: its journal, or the directory of a keras-tuner search.

Both are files of trials only. They have no list of the job's ranks and no options, so the page has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import read_whole, readable_file
from nnlo_common.base._limited_formats import LARGEST_JSON, parsed_json
from nnlo_common.commands.train._run_folder import SEARCH
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts, finished_trials, last_problem
from nnlo_common.commands.tune._search_folder import BLOCK, FOLDER, TRIAL

__all__ = ["ORACLE", "SearchFiles", "TunerSearch", "find_search", "read_search", "read_tuner"]

# -- reader of a directory of keras-tuner, as `MPITuner` leaves it: a JSON file for each trial ---------
# The files do not name the objective: it is the metric whose value is the score in every trial.

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


_BEGIN = b'{"study":'
#: Numbers that a study may lack before its next trial, e.g. of trials that it had before the search.
_MOST_MISSING = 10_000


@dataclass(frozen=True, slots=True)
class SearchFiles:
    """A search as its files have it.

    Attributes:
        facts: for the page.
        study: Optuna's, for figures.
        trials: the finished ones.
    """

    facts: PageFacts
    study: Any
    trials: list[FinishedTrial]


def find_search(path: Path) -> Path | None:
    """Return the journal or the directory of the search that a path means; None: it means none.

    Args:
        path: a journal, a directory of keras-tuner, or a folder that has one of them.

    Raises:
        ConfigurationError: it has several.
    """
    if path.is_file():
        return path if path.suffix == ".jsonl" or _is_journal(path) else None
    if not path.is_dir():
        return None
    if (path / ORACLE).is_file():
        return path
    found = [one for one in sorted(path.glob("*.jsonl")) if _is_journal(one)]
    found += [one.parent for one in sorted(path.glob(f"*/{ORACLE}"))]
    if len(found) > 1:
        raise ConfigurationError(f"{path} has {len(found)} searches; name one: {', '.join(map(str, found))}")
    return found[0] if found else None


def _is_journal(path: Path) -> bool:
    try:
        with readable_file(path) as file:
            return file.read(len(_BEGIN)) == _BEGIN
    except OSError:
        return False


def read_search(path: Path) -> SearchFiles:
    """Read the files of a search, also of one that is under way or was killed.

    Args:
        path: as `find_search` returns it.

    Raises:
        ConfigurationError: they cannot be read, or are not a search's.
        MissingExtraError: Optuna is not installed.
    """
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("nnlo report of a search", "optuna", "tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return _of_tuner(read_tuner(path)) if path.is_dir() else _of_journal(path)


def _of_journal(path: Path) -> SearchFiles:
    from nnlo_common.search._journal import read_journal, refusing

    directions, kept = read_journal(path)
    if len(directions) > 1:
        raise ConfigurationError(
            f"{path}: a search for {len(directions)} objectives, and the page shows one; give "
            "optimize(..., export='study.db') and see it with optuna-dashboard"
        )
    with refusing(str(path), "a trial"):
        return _with_trials(path, [trial for _, trial in kept.finished], directions[0], len(kept.open_trials))


def _with_trials(path: Path, known: list[Any], direction: str, unfinished: int) -> SearchFiles:
    blocks = {trial.user_attrs[BLOCK] for trial in known if BLOCK in trial.user_attrs}
    command = (path.parent / SEARCH).is_file()  # of `nnlo tune`
    facts = PageFacts(
        metric="value",
        maximize=direction == "MAXIMIZE",
        place=path.parent if command else path,
        parameters=list(dict.fromkeys(name for trial in known for name in trial.params)),
        folds=max((len(trial.user_attrs.get("nnlo:folds", ())) for trial in known), default=1),
        blocks=len(blocks) or None,
        unfinished=unfinished,
        home=f"{TRIAL}/" if any(FOLDER in trial.user_attrs for trial in known) else None,
        named="folder" if command else "trial.name",
        more_folds="add --n-fold" if command else "give folds=5",
    )
    finished = [_checked(one) for one in finished_trials(known)]
    return SearchFiles(facts, _study(known, maximize=facts.maximize), finished)


def _checked(trial: FinishedTrial) -> FinishedTrial:
    """Return a trial whose attributes may be anybody's, if the page can show it."""
    numbers = (trial.began_s, trial.ended_s, *trial.folds, *(since for _, since in trial.helpers))
    if not all(is_number(one) and math.isfinite(one) for one in numbers):
        raise ValueError(f"its times and folds are {numbers!r:.200}")
    if not all(is_whole(block, 0) for block in (trial.block, *(block for block, _ in trial.helpers))):
        raise ValueError(f"its blocks are {trial.block!r:.60}, {trial.helpers!r:.60}")
    if not isinstance(trial.folder, str):
        raise TypeError(f"the trial's name is {trial.folder!r:.60}")
    return trial


def _of_tuner(found: TunerSearch) -> SearchFiles:
    return SearchFiles(found.facts, _study(found.frozen(), maximize=found.facts.maximize), found.trials)


def _study(trials: list[Any], *, maximize: bool) -> Any:
    """Return a study with these trials, under their own numbers."""
    import optuna

    study = optuna.create_study(direction="maximize" if maximize else "minimize")
    count = 0
    for trial in trials:
        missing = trial.number - count
        for _ in range(missing if missing <= _MOST_MISSING else 0):
            study.add_trial(optuna.trial.create_trial(state=optuna.trial.TrialState.WAITING))
            count += 1
        study.add_trial(trial)
        count += 1
    return study
