"""Messages between the ranks of a search: one line of JSON each.

    leader of a block ─► coordinator     ParameterRequest, PruneRequest, TrialReport, Note, Done
    every rank ─► coordinator            Left
    coordinator ─► ranks of a block      Start, Halt, End
    coordinator ─► leader of a block     RequestAnswer, Recall
    coordinator ─► a search rank         Choose, End;  back: Chosen
    within a block                       ParameterValue, PruneVerdict, Text, Alarm, RunOutcome
    any rank ─► all others               LossReported

JSON writes a float with as many digits as it takes to read the same float again, so values arrive exactly.
Parameters travel as Optuna's internal numbers (a choice is its index), so no choice has to be written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "SearchMessage",
    "ParameterRequest",
    "PruneRequest",
    "TrialReport",
    "Note",
    "Done",
    "Start",
    "RequestAnswer",
    "Halt",
    "Recall",
    "End",
    "Choose",
    "Chosen",
    "Left",
    "LossReported",
    "ParameterValue",
    "PruneVerdict",
    "Text",
    "Alarm",
    "RunOutcome",
    "from_text",
    "to_text",
]


@dataclass(frozen=True, slots=True)
class SearchMessage:
    """What every message has.

    Attributes:
        run: what it is about: one fold of one trial, handed out to one team; numbered as they begin.
    """

    run: int


@dataclass(frozen=True, slots=True)
class ParameterRequest(SearchMessage):
    """A parameter is wanted; `distribution` is Optuna's, as JSON."""

    name: str
    distribution: str


@dataclass(frozen=True, slots=True)
class PruneRequest(SearchMessage):
    """Whether to prune is wanted."""


@dataclass(frozen=True, slots=True)
class TrialReport(SearchMessage):
    """An intermediate value."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Note(SearchMessage):
    """An attribute of the user's, or the value of a constraint."""

    key: str
    value: Any
    constraint: bool = False


@dataclass(frozen=True, slots=True)
class Done(SearchMessage):
    """The ranks have ended the run, and all of them wait for the next.

    Attributes:
        state: "complete", "pruned", "failed", "halted" or "recalled".
        values: what the objective returned, where it is complete.
        error: what happened, where it has failed.
        failure: of what kind that was, in a word or three.
    """

    state: str
    values: tuple[float, ...] = ()
    error: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Start(SearchMessage):
    """Train a trial, or one fold of it.

    Attributes:
        seed: this run's own.
        directions: how many values the objective is to return.
        attributes: what is kept with the trial already.
        trial: its number.
        fold: which of the folds, from 0.
        folds: how many there are.
        split_seed: of the folds; the same for all trials.
        members: the ranks that train together from now on; empty: those that have so far.
    """

    seed: int
    directions: int
    attributes: dict[str, Any]
    trial: int
    fold: int = 0
    folds: int = 1
    split_seed: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestAnswer(SearchMessage):
    """What was wanted: the internal number of a parameter, or whether to prune.

    Attributes:
        value: the answer.
        problem: why there is none.
    """

    value: float | bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Halt(SearchMessage):
    """Break the run off."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recall(SearchMessage):
    """Leave the run after its next checkpoint: more ranks are to go on with it."""


@dataclass(frozen=True, slots=True)
class End(SearchMessage):
    """The search is over.

    Attributes:
        trials: all that it has finished.
        interrupted: why trials were broken off that are to be trained again; empty where none was.
    """

    trials: tuple[dict[str, Any], ...]
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class Choose(SearchMessage):
    """Choose parameters for a trial, whose number `run` is.

    Attributes:
        news: this trial, and what is new of the others: all of each that has changed, in order of number.
        beside: whether others choose at the same time, not knowing of each other.
    """

    news: tuple[dict[str, Any], ...]
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Chosen(SearchMessage):
    """What was chosen together for a trial.

    Attributes:
        params: by name, the internal number and the distribution, as JSON.
        system: what the sampler keeps with the trial.
        problem: why nothing was chosen.
    """

    params: dict[str, Sequence[Any]]
    system: dict[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Left(SearchMessage):
    """This rank knows that the search is over, and writes no more."""


@dataclass(frozen=True, slots=True)
class LossReported(SearchMessage):
    """This rank tells the user why the search cannot go on, so nobody else need to."""


@dataclass(frozen=True, slots=True)
class ParameterValue(SearchMessage):
    """The parameter that the leader has got when it called `call`."""

    call: str
    value: float


@dataclass(frozen=True, slots=True)
class PruneVerdict(SearchMessage):
    """What the leader has been answered when it asked whether to prune for the `index`-th time."""

    index: int
    prune: bool


@dataclass(frozen=True, slots=True)
class Text(SearchMessage):
    """A rank's part in the `index`-th gathering of a run."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Alarm(SearchMessage):
    """A rank has left the objective by an error, so nobody must wait for it.

    Attributes:
        problem: what has happened.
        gathered: in how many gatherings of the run it has taken part.
    """

    problem: str
    gathered: int


@dataclass(frozen=True, slots=True)
class RunOutcome(SearchMessage):
    """How one rank has ended a run.

    Attributes:
        state: as of `Done`; or "freed": another rank had failed, and this one did not wait for it.
        values: what the objective returned.
        error: what happened.
        failure: as of `Done`.
        sent: how many messages it has sent, endpoint by endpoint, to each rank of the block.
    """

    state: str
    values: tuple[float, ...]
    error: str
    failure: str
    sent: tuple[Sequence[int], ...]


_KINDS: dict[str, type[SearchMessage]] = {
    name: kind
    for name, kind in globals().items()
    if isinstance(kind, type) and issubclass(kind, SearchMessage)
}
_TUPLES = {"values", "sent", "trials", "news", "members"}


def to_text(message: SearchMessage) -> str:
    """Return a message as one line.

    Example:
        >>> to_text(RequestAnswer(3, 0.1))
        '{"kind": "RequestAnswer", "run": 3, "value": 0.1, "problem": ""}'
    """
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def from_text(text: str) -> SearchMessage:
    """Return the message that was written so.

    Example:
        >>> from_text(to_text(Done(3, "complete", (0.1,))))
        Done(run=3, state='complete', values=(0.1,), error='', failure='')
    """
    content = json.loads(text)
    kind = _KINDS[content.pop("kind")]
    for name in content.keys() & _TUPLES:
        content[name] = tuple(content[name])  # JSON knows lists only
    return kind(**content)
