"""Facts about a search and its trials as plain values; nothing here knows Optuna's classes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from nnlo_common.commands.tune._figure_of_merit import FigureOfMerit
from nnlo_common.commands.tune._request import BlockLayout, Request
from nnlo_common.commands.tune._search_folder import BEGAN, BLOCK, FOLDER, TRIAL
from nnlo_common.commands.tune._search_space import Space

__all__ = [
    "HELPERS",
    "FinishedTrial",
    "PageFacts",
    "SearchFacts",
    "best_of",
    "finished",
    "finished_trials",
    "last_problem",
]

_ERROR, _FAILURE, _FOLDS = "nnlo:error", "nnlo:failure", "nnlo:folds"
_SECONDS, _NAME = "nnlo:seconds", "nnlo:name"
HELPERS = "nnlo:helpers"
_BROKEN_OFF = ("broken off: ", "not begun: ")
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFacts:
    """What the page of a search needs, besides its trials; what is unknown is left out of the page.

    Attributes:
        metric: the name of the value.
        maximize: whether it should rise.
        place: the folder or the file of the search.
        parameters: their names, in the order of the columns.
        folds: how often each trial is trained.
        default: the parameters of the trial to compare the best with; None: there is no such trial.
        blocks: how many blocks train; None: unknown, and so is which of them trained a trial.
        unfinished: how many trials have begun and not finished.
        home: the address of the folder that has those of the trials, for links; None: no links.
        named: the head of the column with the trials' names.
        more_folds: how to get more certain values.
    """

    metric: str
    maximize: bool
    place: Path
    parameters: Sequence[str]
    folds: int = 1
    default: Mapping[str, Any] | None = None
    blocks: int | None = None
    unfinished: int = 0
    home: str | None = None
    named: str = "folder"
    more_folds: str = "give folds=5"

    @property
    def direction(self) -> str:
        """The direction, as Optuna has it."""
        return "maximize" if self.maximize else "minimize"


@dataclass(frozen=True, kw_only=True)
class SearchFacts:
    """Facts about a search.

    Attributes:
        request: the options.
        space: the search space.
        figure: the figure of merit.
        layout: the ranks.
        folder: of the search.
        default: the parameters of the first trial; the sampler chooses the rest.
        began: the start, for people.
        began_s: the start, in seconds since 1970.
    """

    request: Request
    space: Space
    figure: FigureOfMerit
    layout: BlockLayout
    folder: Path
    default: Mapping[str, Any]
    began: str
    began_s: float

    @property
    def for_page(self) -> PageFacts:
        """The part that the page shows."""
        return PageFacts(
            metric=self.figure.name,
            maximize=self.figure.maximize,
            place=self.folder,
            parameters=[one.name for one in self.space.parameters],
            folds=self.request.search.n_fold,
            default=self.default,
            blocks=max(len(self.layout.blocks), 1),
            home=f"{TRIAL}/",
            more_folds="add --n-fold",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial:
    """A trial that has finished.

    Attributes:
        number: its number.
        state: "complete", "pruned" or "failed".
        value: its objective; None unless it is complete.
        params: its parameters.
        folds: the value of each fold.
        steps: the value after each epoch.
        block: the number of its block.
        helpers: the blocks that joined it at the end of the search, and when, in seconds since 1970.
        folder: its name.
        began_s: the start, in seconds since 1970.
        ended_s: the end.
        problem: the last line of its error.
    """

    number: int
    state: str
    value: float | None
    params: dict[str, Any]
    folds: tuple[float, ...]
    steps: tuple[tuple[int, float], ...]
    block: int
    helpers: tuple[tuple[int, float], ...] = ()
    folder: str
    began_s: float
    ended_s: float
    problem: str

    @property
    def shifts(self) -> list[tuple[int, float, float]]:
        """The blocks that trained it, each with start and end."""
        return [(block, since, self.ended_s) for block, since in ((self.block, self.began_s), *self.helpers)]

    @property
    def fate(self) -> str:
        """Its state for people: a trial that was only broken off does not count as failed."""
        return "broken off" if self.problem.startswith(_BROKEN_OFF) else self.state

    def described(self) -> dict[str, Any]:
        """Return it as plain values for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain


def finished(study: Any) -> list[FinishedTrial]:
    """Return the finished trials of a study."""
    return finished_trials(study.get_trials(deepcopy=False))


def finished_trials(trials: Iterable[Any]) -> list[FinishedTrial]:
    """Return those of Optuna's trials that are finished."""
    return [_finished(one) for one in trials if one.state.name in _STATES]


def _finished(trial: Any) -> FinishedTrial:
    user = trial.user_attrs
    ended = _seconds(trial.datetime_complete)
    began = user.get(BEGAN, _seconds(trial.datetime_start) or ended)
    if _SECONDS in user:  # for a trial from the journal, Optuna may only have the time of reading
        ended = min(ended, began + user[_SECONDS])
    # A failed trial may be complete, with a value that is for the sampler only.
    state = "failed" if _FAILURE in user else _STATES[trial.state.name]
    value = trial.value if state == "complete" else None
    return FinishedTrial(
        number=trial.number,
        state=state,
        value=None if value is None or math.isnan(value) else value,
        params=dict(trial.params),
        folds=tuple(one for one in user.get(_FOLDS, ()) if one is not None),
        steps=tuple(sorted(trial.intermediate_values.items())),
        block=user.get(BLOCK, 0),
        helpers=tuple((block, since) for block, since in user.get(HELPERS, ())),
        folder=user.get(FOLDER, user.get(_NAME, f"{trial.number:04}")),
        began_s=began,
        ended_s=ended,
        problem=last_problem(user.get(_ERROR, "")),
    )


def best_of(figure: FigureOfMerit | PageFacts, trials: Iterable[FinishedTrial]) -> FinishedTrial | None:
    """Return the best complete trial, of equal ones the first; None if there is none."""
    good = [(one.value, one) for one in trials if one.value is not None]
    return (max if figure.maximize else min)(good, key=itemgetter(0), default=(None, None))[1]


def last_problem(error: str) -> str:
    r"""Return the line of a traceback that names the error.

    Example:
        >>> last_problem("Traceback ...\n  File ...\npackage.OddError: it is odd\nMend it")
        'OddError: it is odd'
    """
    lines = error.strip().splitlines()
    told = [line for line in lines if re.match(r"[A-Za-z_][\w.]*: ", line)] or lines
    return re.sub(r"^[\w.]*\.(?=\w+: )", "", told[-1]) if told else ""


def _seconds(moment: datetime | None) -> float:
    return 0.0 if moment is None else moment.timestamp()
