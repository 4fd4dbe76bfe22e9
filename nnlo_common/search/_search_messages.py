"""Messages of a search: one line of JSON each.

    leader of a block ─► coordinator     ParameterRequest, PruneRequest, TrialReport, Note, Done
    every rank ─► coordinator, spares    Left
    coordinator ─► ranks of a block      Start, Halt, End
    coordinator ─► leader of a block     RequestAnswer, Recall
    coordinator ─► a search rank         Choose, End;  back: Chosen
    coordinator ─► a spare               CoordinatorCopy, End;  back: CopyKept
    within a block                       ParameterValue, PruneVerdict, Text, Alarm, RunOutcome
    any rank ─► all others               LossReported

Parameters travel as Optuna's internal numbers (a choice as its index), so choices need no encoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnlo_common.base._limited_formats import content_of, malformed, message_of

__all__ = [
    "Alarm",
    "Choose",
    "Chosen",
    "CoordinatorCopy",
    "CopyKept",
    "Done",
    "End",
    "Halt",
    "Left",
    "LossReported",
    "Note",
    "ParameterRequest",
    "ParameterValue",
    "PruneRequest",
    "PruneVerdict",
    "Recall",
    "RequestAnswer",
    "RunOutcome",
    "SearchMessage",
    "Start",
    "Text",
    "TrialReport",
    "from_text",
    "to_text",
]


@dataclass(frozen=True, slots=True)
class SearchMessage:
    """A message of a search.

    Attributes:
        run: its run: one fold of one trial on one team; numbered in order of start.
    """

    run: int


@dataclass(frozen=True, slots=True)
class ParameterRequest(SearchMessage):
    """Request for a parameter; `distribution` is Optuna's, as JSON."""

    name: str
    distribution: str


@dataclass(frozen=True, slots=True)
class PruneRequest(SearchMessage):
    """Request for the pruner's verdict."""


@dataclass(frozen=True, slots=True)
class TrialReport(SearchMessage):
    """An intermediate value."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Note(SearchMessage):
    """A user attribute, or a constraint's value."""

    key: str
    value: Any
    constraint: bool = False


@dataclass(frozen=True, slots=True)
class Done(SearchMessage):
    """End of a run on all its ranks; they wait for the next.

    Attributes:
        state: "complete", "pruned", "failed", "halted" or "recalled".
        values: the objective's values, if complete.
        error: the error, if it failed.
        failure: the kind of failure, in one to three words.
    """

    state: str
    values: tuple[float, ...] = ()
    error: str = ""
    failure: str = ""

    @classmethod
    def halted(cls, run: int, reason: str) -> Done:
        """Return the end of a run that was interrupted."""
        return cls(run, "halted", error=f"broken off: {reason}")


@dataclass(frozen=True, slots=True)
class Start(SearchMessage):
    """Train a trial, or one fold of it.

    Attributes:
        seed: this run's seed.
        directions: how many values the objective must return.
        attributes: the trial's attributes so far.
        trial: its number.
        fold: the fold, from 0.
        folds: the number of folds.
        split_seed: seeds the split into folds; the same for all trials.
        members: the ranks that train together from now on; empty: no change.
    """

    seed: int
    directions: int
    attributes: Mapping[str, Any]
    trial: int
    fold: int = 0
    folds: int = 1
    split_seed: int = 0
    members: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestAnswer(SearchMessage):
    """Reply to a request: a parameter's internal number, or whether to prune.

    Attributes:
        value: the answer.
        problem: why there is no answer; empty if there is one.
    """

    value: float | bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Halt(SearchMessage):
    """Order to abort the run."""

    reason: str


@dataclass(frozen=True, slots=True)
class Recall(SearchMessage):
    """Order to leave the run after its next checkpoint, so that more ranks can resume it."""


@dataclass(frozen=True, slots=True)
class End(SearchMessage):
    """The search is over.

    Attributes:
        trials: all finished trials.
        interrupted: why trials were interrupted that the next start trains again; empty if none were.
    """

    trials: tuple[Mapping[str, Any], ...]
    interrupted: str = ""


@dataclass(frozen=True, slots=True)
class Choose(SearchMessage):
    """Order to choose parameters for trial number `run`.

    Attributes:
        news: this trial and all others that are new or changed, each complete, in order of number.
        beside: whether other ranks choose at the same time, unaware of each other.
    """

    news: tuple[Mapping[str, Any], ...]
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Chosen(SearchMessage):
    """Parameters chosen together for a trial.

    Attributes:
        params: by name, the internal number and the distribution as JSON.
        system: the sampler's attributes for the trial.
        problem: why nothing was chosen.
    """

    params: Mapping[str, tuple[float, str]]
    system: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CoordinatorCopy(SearchMessage):
    """Copy number `run` of what the coordinator knows, for a spare.

    Attributes:
        state: the coordinator's state, whole.
        changed: the trials that have changed since the last copy, by name.
        lines: lines of the journal since the last copy.
    """

    state: Mapping[str, Any]
    changed: Mapping[str, Any]
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyKept(SearchMessage):
    """Notice that a spare has copy number `run`."""


@dataclass(frozen=True, slots=True)
class Left(SearchMessage):
    """Notice that this rank knows the search is over and sends no more."""


@dataclass(frozen=True, slots=True)
class LossReported(SearchMessage):
    """Notice that this rank reports to the user why the search cannot continue, so others stay silent."""


@dataclass(frozen=True, slots=True)
class ParameterValue(SearchMessage):
    """The parameter that the leader received for `call`."""

    call: str
    value: float


@dataclass(frozen=True, slots=True)
class PruneVerdict(SearchMessage):
    """The pruner's verdict for the leader's `index`-th request."""

    index: int
    prune: bool


@dataclass(frozen=True, slots=True)
class Text(SearchMessage):
    """A rank's text in the `index`-th gathering of a run."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Alarm(SearchMessage):
    """Notice that a rank left the objective by an error, so no rank may wait for it.

    Attributes:
        problem: the error.
        gathered: how many gatherings of the run it joined.
    """

    problem: str
    gathered: int


@dataclass(frozen=True, slots=True)
class RunOutcome(SearchMessage):
    """End of a run on one rank.

    Attributes:
        state: as in `Done`; or "freed": another rank failed, and this one stopped waiting for it.
        values: the objective's values.
        error: the error.
        failure: as in `Done`.
        sent: how many messages it sent through each endpoint to each rank of the block.
        grouped: the same for the endpoint of each of its groups, after the number of the gathering before it.
    """

    state: str
    values: tuple[float, ...]
    error: str
    failure: str
    sent: tuple[tuple[int, ...], ...]
    grouped: tuple[tuple[int, ...], ...]


_KINDS = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, SearchMessage)]


def to_text(message: SearchMessage) -> str:
    """Return a message as one line.

    Example:
        >>> to_text(RequestAnswer(3, 0.1))
        '{"kind": "RequestAnswer", "run": 3, "value": 0.1, "problem": ""}'
    """
    return json.dumps(content_of(message))


def from_text(text: str, whose: str = "the message") -> SearchMessage:
    """Read a message from its line; `whose` names it in errors.

    Raises:
        ProtocolError: it is not JSON, is of no known kind, or a field is missing, unknown or of the wrong
            type.

    Example:
        >>> from_text(to_text(Done(3, "complete", (0.1,))))
        Done(run=3, state='complete', values=(0.1,), error='', failure='')
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise malformed(whose, error) from error
    return message_of(_KINDS, content, whose)
