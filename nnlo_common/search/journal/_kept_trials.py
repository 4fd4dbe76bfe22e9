"""Trials that a journal holds, checked line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from optuna.trial import FrozenTrial

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.search.journal._packed_trial import unpacked, unpacked_parameters

__all__ = ["KeptTrials", "kept_trials", "refusing"]

_MOST = 10**9  # trials


@dataclass(frozen=True, slots=True)
class KeptTrials:
    """Trials of a journal.

    Attributes:
        finished: their lines and the trials, by number.
        open_trials: of the others the packed parameters, their values, and the user attributes.
        repeated: the numbers of finished trials that were retried.
    """

    finished: Sequence[tuple[dict[str, Any], FrozenTrial]]
    open_trials: Sequence[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]
    repeated: set[int]


def kept_trials(lines: Sequence[dict[str, Any]], asked: str) -> KeptTrials:
    """Return the trials of a journal.

    Args:
        lines: of the journal, with its head.
        asked: names the journal in messages.

    Raises:
        ConfigurationError: a line is none that a search writes; the message has its number.
    """
    reading = _JournalLines()
    for place, line in enumerate(lines[1:], 2):
        with refusing(asked, f"line {place}"):
            reading.take(line)
    with refusing(asked, "an unfinished trial"):
        return reading.kept()


@contextmanager
def refusing(asked: str, what: str) -> Iterator[None]:
    """Report whatever is raised about a part of a journal as one error.

    Args:
        asked: names the journal.
        what: the part.

    Raises:
        ConfigurationError: something was raised.
    """
    try:
        yield
    except Exception as error:  # Optuna raises errors of many types for a trial that cannot be
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigurationError(
            f"{asked}: {what} is not what a search writes ({told:.300}); give another file, or move that one "
            "away"
        ) from error


@dataclass(slots=True)
class _JournalLines:
    """Lines of a journal that have been read so far."""

    finished: dict[int, tuple[dict[str, Any], FrozenTrial]] = field(default_factory=dict)
    chosen: dict[int, dict[str, Any]] = field(default_factory=dict)
    users: dict[int, dict[str, Any]] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def take(self, line: dict[str, Any]) -> None:
        """Read a line."""
        number = _trial_number(line["trial"])
        if "state" in line:
            trial = unpacked(line)
            if not trial.state.is_finished():
                raise ValueError(f"the trial has the state {trial.state.name}")
            self.finished[number] = line, trial
            self.repeated |= {number} if line.get("repeated") else set()
        elif "queued" in line:
            _check_parameters(line["queued"])
            self.chosen[number], self.users[number] = line["queued"], _attributes(line["user"])
            self.repeated |= {_trial_number(line["instead"])} if "instead" in line else set()
        elif "user" in line:
            self.users[number] = _attributes(line["user"])
        else:
            parameter = [line["value"], line["distribution"]]
            _check_parameters({line["name"]: parameter})
            self.chosen.setdefault(number, {})[line["name"]] = parameter

    def kept(self) -> KeptTrials:
        """Return the trials of all lines."""
        return KeptTrials(
            [self.finished[number] for number in sorted(self.finished)],
            [
                (params, unpacked_parameters(params)[0], self.users.get(number, {}))
                for number, params in sorted(self.chosen.items())
                if number not in self.finished
            ],
            self.repeated & self.finished.keys(),
        )


def _trial_number(value: object) -> int:
    if not is_whole(value, 0) or value >= _MOST:
        raise ValueError(f"the trial's number is {value!r:.60}")
    return value


def _attributes(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"the user's attributes are {value!r:.60}")
    return value


def _check_parameters(params: object) -> None:
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise TypeError(f"the parameters are {params!r:.60}")
    for name, (number, distribution) in params.items():
        if not is_number(number) or not isinstance(distribution, str):
            raise TypeError(f"the parameter {name!r:.60} is {number!r:.60}")
    unpacked_parameters({name: tuple(one) for name, one in params.items()})
