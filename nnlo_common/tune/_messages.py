"""What the ranks of a search say to each other: one line of JSON per message.

    leader of a block ─► coordinator     Suggest, Verdict, Report, Note, Done
    coordinator ─► ranks of a block      Start, Halt, End;  Answer to the leader only
    within a block                       Said, Judged, Text, Alarm, Outcome

JSON writes a float with as many digits as it takes to read the same float again, so values arrive exactly.
Parameters travel as Optuna's internal numbers (a choice is its index), so no choice has to be written.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = [
    "Alarm",
    "Answer",
    "Done",
    "End",
    "Halt",
    "Judged",
    "Message",
    "Note",
    "Outcome",
    "Report",
    "Said",
    "Start",
    "Suggest",
    "Text",
    "Verdict",
    "from_text",
    "to_text",
]


@dataclass(frozen=True, slots=True)
class Message:
    """What every message has.

    Attributes:
        trial: the number of the trial that it is about.
    """

    trial: int


@dataclass(frozen=True, slots=True)
class Suggest(Message):
    """A parameter is wanted; `distribution` is Optuna's, as JSON."""

    name: str
    distribution: str


@dataclass(frozen=True, slots=True)
class Verdict(Message):
    """Whether to prune is wanted."""


@dataclass(frozen=True, slots=True)
class Report(Message):
    """An intermediate value."""

    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Note(Message):
    """An attribute of the user's, or the value of a constraint."""

    key: str
    value: Any
    constraint: bool = False


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The block has ended the trial, and all its ranks wait for the next.

    Attributes:
        state: "complete", "pruned", "failed" or "halted".
        values: what the objective returned, where it is complete.
        error: what happened, where it has failed.
    """

    state: str
    values: tuple[float, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Start(Message):
    """Train this trial; `directions` says how many values it is to return."""

    seed: int
    directions: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer(Message):
    """What was wanted: the internal number of a parameter, or whether to prune."""

    value: float | bool


@dataclass(frozen=True, slots=True)
class Halt(Message):
    """Break the trial off."""

    reason: str


@dataclass(frozen=True, slots=True)
class End(Message):
    """The search is over; `trials` are all that it has finished."""

    trials: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Said(Message):
    """The parameter that the leader has got when it called `call`."""

    call: str
    value: float


@dataclass(frozen=True, slots=True)
class Judged(Message):
    """What the leader has been answered when it asked whether to prune for the `index`-th time."""

    index: int
    prune: bool


@dataclass(frozen=True, slots=True)
class Text(Message):
    """A rank's part in the `index`-th gathering of a trial."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Alarm(Message):
    """A rank has left the objective by an error, so nobody must wait for it.

    Attributes:
        problem: what has happened.
        gathered: in how many gatherings of the trial it has taken part.
    """

    problem: str
    gathered: int


@dataclass(frozen=True, slots=True)
class Outcome(Message):
    """How one rank of a block has ended a trial.

    Attributes:
        state: as of `Done`; or "freed": another rank had failed, and this one did not wait for it.
        values: what the objective returned.
        error: what happened.
        sent: how many messages it has sent, door by door, to each rank of the block.
    """

    state: str
    values: tuple[float, ...]
    error: str
    sent: tuple[Sequence[int], ...]


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Suggest,
        Verdict,
        Report,
        Note,
        Done,
        Start,
        Answer,
        Halt,
        End,
        Said,
        Judged,
        Text,
        Alarm,
        Outcome,
    )
}
_TUPLES = {"values", "sent", "trials"}


def to_text(message: Message) -> str:
    """Return a message as one line.

    Example:
        >>> to_text(Answer(3, 0.1))
        '{"kind": "Answer", "trial": 3, "value": 0.1}'
    """
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def from_text(text: str) -> Message:
    """Return the message that was written so.

    Example:
        >>> from_text(to_text(Done(3, "complete", (0.1,))))
        Done(trial=3, state='complete', values=(0.1,), error='')
    """
    content = json.loads(text)
    kind = _KINDS[content.pop("kind")]
    for name in content.keys() & _TUPLES:
        content[name] = tuple(content[name])  # JSON knows lists only
    return kind(**content)
