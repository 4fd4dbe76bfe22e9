"""Journal of a search, from which a rerun of the same command resumes.

The journal holds one JSON object per line and only grows. A last line cut short by a kill is dropped at the
next start; all earlier lines count.

    {"study": ...}                            first line: the study that the journal belongs to
    {"trial": 3, "user": ..., "fixed": ...}   the trial began, with a name that it keeps; what the script
                                              queued it with; null: it did not
    {"trial": 3, "name": "lr", ...}           a parameter was chosen
    {"trial": 3, "state": 1, ...}             the trial finished; all that Optuna knows of it
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import (
    append_file,
    hold_lock,
    read_whole,
    release_lock,
    usable,
    write_whole,
)
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.search._compat import FIXED, has_no_name, is_pickle, number_in, storage_of

__all__ = [
    "Journal",
    "KeptTrials",
    "OpenTrial",
    "PackedParameters",
    "QueuedTrials",
    "SearchRecord",
    "bring_up",
    "end_in",
    "inherit",
    "kept_trials",
    "make_plain",
    "packed",
    "packed_parameters",
    "read_journal",
    "refusing",
    "take_over",
    "unpacked",
    "unpacked_parameters",
]

# -- trials as JSON, and copies of their results into another study ------------------------------------

#: Each parameter's internal number, and its distribution as JSON.
PackedParameters: TypeAlias = Mapping[str, tuple[float, str]]


def packed_parameters(
    values: Mapping[str, Any], space: Mapping[str, BaseDistribution]
) -> dict[str, tuple[float, str]]:
    """Return parameters as plain JSON values."""
    return {
        name: (float(space[name].to_internal_repr(value)), distribution_to_json(space[name]))
        for name, value in values.items()
    }


def unpacked_parameters(packed: PackedParameters) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    """Return the values and the distributions that `packed_parameters` has packed."""
    space = {name: _distribution(text) for name, (_, text) in packed.items()}
    return {name: space[name].to_external_repr(number) for name, (number, _) in packed.items()}, space


def _distribution(text: str) -> BaseDistribution:
    parsed_json(text)  # Optuna's own reading has no limits
    return json_to_distribution(text)


def packed(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial as plain JSON values; numbers stay exact."""
    return {
        "trial": trial.number,
        "state": trial.state.name,
        "values": None if trial.values is None else list(trial.values),
        "params": {
            name: [*one] for name, one in packed_parameters(trial.params, trial.distributions).items()
        },
        "steps": [[step, value] for step, value in trial.intermediate_values.items()],
        "user": trial.user_attrs,
        "system": _without_code(trial.system_attrs),
        "time": [moment and moment.isoformat() for moment in (trial.datetime_start, trial.datetime_complete)],
    }


def unpacked(content: Mapping[str, Any]) -> FrozenTrial:
    """Return the trial that `packed` has packed."""
    params, distributions = unpacked_parameters(content["params"])
    start, complete = (moment and datetime.datetime.fromisoformat(moment) for moment in content["time"])
    trial = optuna.trial.create_trial(
        state=TrialState[content["state"]],
        values=content["values"],
        params=params,
        distributions=distributions,
        user_attrs=dict(content["user"]),
        system_attrs=_without_code(content["system"]),
        intermediate_values={int(step): value for step, value in content["steps"]},
    )
    trial.number = content["trial"]
    trial.datetime_start, trial.datetime_complete = start, complete
    return trial


def _without_code(system: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what Optuna would unpickle: the state of CMA-ES, which it rebuilds from the trials."""
    return {key: value for key, value in system.items() if not is_pickle(key)}


def take_over(study: optuna.Study, trials: Iterable[Mapping[str, Any]]) -> None:
    """Add packed trials to a study; finish those that it already has waiting."""
    known = study.get_trials(deepcopy=False)
    for content in trials:
        trial = unpacked(content)
        if trial.number >= len(known):
            study.add_trial(trial)
        elif known[trial.number].state is TrialState.WAITING:
            end_in(storage_of(study), number_in(known[trial.number]), trial)


def inherit(study: optuna.Study, trials: Iterable[Mapping[str, Any]]) -> None:
    """Bring a study to the state of another rank's, of which these are the packed trials; some may run."""
    storage = storage_of(study)
    for trial in sorted(map(unpacked, trials), key=lambda one: one.number):
        known = study.get_trials(deepcopy=False)
        if trial.number >= len(known):
            study.add_trial(trial)
        elif not known[trial.number].state.is_finished():
            there = number_in(known[trial.number])
            if trial.state.is_finished():
                end_in(storage, there, trial)
            else:
                bring_up(storage, there, trial)
                storage.set_trial_state_values(there, trial.state)


def end_in(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Finish a waiting or running trial of a storage with the result of `trial`.

    Args:
        storage: the storage.
        there: the trial's number in the storage.
        trial: the finished trial.
    """
    if storage.get_trial(there).state is TrialState.WAITING:
        storage.set_trial_state_values(there, TrialState.RUNNING)
    bring_up(storage, there, trial)
    storage.set_trial_state_values(there, trial.state, trial.values)


def bring_up(storage: optuna.storages.BaseStorage, there: int, trial: FrozenTrial) -> None:
    """Copy parameters, reports and attributes of `trial` to a trial of a storage; leave state and values."""
    known = storage.get_trial(there)
    for name, distribution in trial.distributions.items():
        if name not in known.params:
            value = distribution.to_internal_repr(trial.params[name])
            storage.set_trial_param(there, name, value, distribution)
    for step, value in trial.intermediate_values.items():
        storage.set_trial_intermediate_value(there, step, value)
    for key, kept in trial.user_attrs.items():
        storage.set_trial_user_attr(there, key, kept)
    for key, kept in trial.system_attrs.items():
        storage.set_trial_system_attr(there, key, kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTrial:
    """A trial of a journal that began, or was queued for a retry, and has not finished.

    Attributes:
        params: the parameters chosen so far, packed.
        chosen: their values.
        user: its attributes.
        queued: has as "fixed" what the script queued it with, or None; without it an older version began it.
    """

    params: Mapping[str, Any]
    chosen: Mapping[str, Any]
    user: Mapping[str, Any]
    queued: Mapping[str, Any]


# -- queued trials: matches those that a script queues at each start with those in a journal -----------


class QueuedTrials:
    """The waiting trials of a study, which trials of a journal may match.

    Args:
        study: the study that receives the journal's trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._waiting = study, list(study.get_trials(deepcopy=False))

    def check(self, journal: str) -> None:
        """Refuse a study whose trials have begun.

        Args:
            journal: names the journal, for the message.
        """
        if found := sum(trial.state is not TrialState.WAITING for trial in self._waiting):
            raise ConfigurationError(
                f"{journal} holds trials, and so does the study ({found}); give optimize a new in-memory "
                "study, which gets its trials from the journal"
            )

    def end(self, trial: FrozenTrial, line: Mapping[str, Any]) -> int:
        """Add a finished trial, which has this line in the journal; return its number in the study."""
        waiting = self._take(line, trial.system_attrs.get(FIXED, {}))
        if waiting is None:
            self._study.add_trial(trial)
            return self._last
        end_in(storage_of(self._study), number_in(waiting), trial)
        return waiting.number

    def queue_again(self, trial: OpenTrial) -> dict[str, Any]:
        """Queue a trial that began, with the parameters chosen so far; return its line for the journal."""
        waiting = self._take(trial.queued, trial.chosen)
        if waiting is None:
            chosen = {**(trial.queued.get("fixed") or {}), **trial.chosen}
            self._study.enqueue_trial(chosen, user_attrs=dict(trial.user))
            number, fixed = self._last, trial.queued.get("fixed")
        else:
            number, fixed = waiting.number, _fixed(waiting)
            storage, there = storage_of(self._study), number_in(waiting)
            storage.set_trial_system_attr(there, FIXED, {**fixed, **trial.chosen})
            for key, value in trial.user.items():
                storage.set_trial_user_attr(there, key, value)
        return {"trial": number, "queued": trial.params, "user": trial.user, "fixed": fixed}

    def _take(self, line: Mapping[str, Any], known: Mapping[str, Any]) -> FrozenTrial | None:
        """Return the waiting trial that is one of the journal, which no other one is then; None: none is.

        Args:
            line: says by "fixed" what the script queued that trial with.
            known: parameters that it has in any case, for lines of older versions, which do not say it.
        """
        for waiting in self._waiting:
            fixed = _fixed(waiting)
            if fixed == line["fixed"] if "fixed" in line else fixed and {**known, **fixed} == known:
                self._waiting.remove(waiting)
                return waiting
        return None

    @property
    def _last(self) -> int:
        return len(self._study.get_trials(deepcopy=False)) - 1


def _fixed(trial: FrozenTrial) -> dict[str, Any]:
    """Return what a trial was queued with, as a journal has it."""
    fixed: dict[str, Any] = json.loads(json.dumps(trial.system_attrs.get(FIXED, {})))
    return fixed


def make_plain(study: optuna.Study) -> None:
    """Make NumPy's numbers in the queue of a study Python's: Optuna takes both, and JSON has only these."""
    storage = storage_of(study)
    for trial in study.get_trials(deepcopy=False, states=[TrialState.WAITING]):
        for key, value in [*trial.user_attrs.items()]:
            if isinstance(value, np.generic):
                storage.set_trial_user_attr(number_in(trial), key, value.item())
        fixed = trial.system_attrs.get(FIXED, {})
        if numbers := {name: one.item() for name, one in fixed.items() if isinstance(one, np.generic)}:
            storage.set_trial_system_attr(number_in(trial), FIXED, {**fixed, **numbers})


# -- trials that a journal holds, checked line by line -------------------------------------------------

_MOST = 10**9  # trials


@dataclass(frozen=True, slots=True)
class KeptTrials:
    """Trials of a journal.

    Attributes:
        finished: their lines and the trials, by number.
        open_trials: the others.
        repeated: the numbers of finished trials that were retried.
    """

    finished: Sequence[tuple[dict[str, Any], FrozenTrial]]
    open_trials: Sequence[OpenTrial]
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
    queued: dict[int, dict[str, Any]] = field(default_factory=dict)
    repeated: set[int] = field(default_factory=set)

    def take(self, line: dict[str, Any]) -> None:
        """Read a line."""
        number = _trial_number(line["trial"])
        if "fixed" in line or "instead" in line:
            # The first line counts: one that is queued again has what it had chosen, too.
            fixed = line.get("fixed")
            self.queued.setdefault(number, {"fixed": None if fixed is None else _attributes(fixed)})
        if "state" in line:
            trial = unpacked(line)
            if not trial.state.is_finished():
                raise ValueError(f"the trial has the state {trial.state.name}")
            self.finished[number] = line | self.queued.get(number, {}), trial
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
                OpenTrial(
                    params=params,
                    chosen=unpacked_parameters(params)[0],
                    user=self.users.get(number, {}),
                    queued=self.queued.get(number, {}),
                )
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
        raise TypeError(f"the trial's attributes are {value!r:.60}")
    return value


def _check_parameters(params: object) -> None:
    if not isinstance(params, Mapping) or not all(isinstance(name, str) for name in params):
        raise TypeError(f"the parameters are {params!r:.60}")
    for name, (number, distribution) in params.items():
        if not is_number(number) or not isinstance(distribution, str):
            raise TypeError(f"the parameter {name!r:.60} is {number!r:.60}")
    unpacked_parameters({name: tuple(one) for name, one in params.items()})


_LARGEST = 1_000_000_000  # bytes


class SearchRecord:
    """Record of a search that keeps nothing; see `Journal`."""

    def begun(self, trial: FrozenTrial) -> None:
        """Record that a trial began."""

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        """Record a chosen parameter, as Optuna's internal number."""

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        """Record a queued trial that retries a failed one."""

    def finished(self, trial: FrozenTrial) -> None:
        """Record a finished trial."""

    def fresh_lines(self) -> list[str]:
        """Return the lines written since the last call, if the record keeps them for spares."""
        return []

    def close(self) -> None:
        """Close the record."""


class Journal(SearchRecord):
    """A file from which a search resumes after its job was killed.

    Args:
        path: the file; created if missing.
        study: receives the finished trials of the file; unfinished ones are queued again.
        lines: of the journal of a coordinator that has died, which this one goes on with: the study has its
            trials, and what the file holds here is replaced. None: go on with the file.
        copied: whether spares get copies of the lines, by `fresh_lines`.

    Attributes:
        counted: how many finished trials the file held, without those that were retried.

    Raises:
        ConfigurationError: the file cannot be written, belongs to another study, is no journal, or is in use.
    """

    def __init__(
        self,
        path: str | Path,
        study: optuna.Study,
        *,
        lines: Sequence[str] | None = None,
        copied: bool = False,
    ) -> None:
        self._fresh: list[str] | None = [] if copied else None
        self._path = usable(f"journal={str(path)!r}", Path(path))
        self._head = {"study": [direction.name for direction in study.directions], "name": study.study_name}
        if has_no_name(study):
            self._head["name"] = ""
        self._lock = self._path.with_name(f".{self._path.name}.in-use")
        self.counted = 0
        hold_lock(self._lock, f"searching with the journal {path}", "journal")
        try:
            self._begin(self._take_up(study) if lines is None else lines)
        except BaseException:
            release_lock(self._lock)
            raise

    def _begin(self, lines: Sequence[str]) -> None:
        write_whole(self._path, "".join(f"{line}\n" for line in lines))
        self._file = append_file(self._path)
        if self._fresh is not None:
            self._fresh += lines

    def _take_up(self, study: optuna.Study) -> list[str]:
        kept = self._read()
        self.counted = len(kept.finished) - len(kept.repeated)
        lines: list[dict[str, Any]] = [self._head]
        queued = QueuedTrials(study)
        if kept.finished or kept.open_trials:
            queued.check(f"journal={str(self._path)!r}")
        with refusing(f"journal={str(self._path)!r}", "a trial"):
            for content, trial in kept.finished:
                content["repeated"] = content["trial"] in kept.repeated
                content["trial"] = queued.end(trial, content)
                lines.append(content)
            lines += map(queued.queue_again, kept.open_trials)
        return [*map(json.dumps, lines)]

    def begun(self, trial: FrozenTrial) -> None:
        fixed = trial.system_attrs.get(FIXED)
        self._write({"trial": trial.number, "user": trial.user_attrs, "fixed": fixed})

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        self._write({"trial": trial, "name": name, "value": value, "distribution": distribution})

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        params, user = packed(failed)["params"], trial.user_attrs
        self._write({"trial": trial.number, "queued": params, "user": user, "instead": failed.number})

    def finished(self, trial: FrozenTrial) -> None:
        """Record a finished trial; on return it is on the disk."""
        self._write(packed(trial))
        os.fsync(self._file.fileno())

    def fresh_lines(self) -> list[str]:
        fresh, self._fresh = self._fresh or [], None if self._fresh is None else []
        return fresh

    def close(self) -> None:
        self._file.close()
        release_lock(self._lock)

    def _read(self) -> KeptTrials:
        """Return the trials of the file."""
        asked = f"journal={str(self._path)!r}"
        lines = _whole_lines(self._path, asked)
        if lines and lines[0] != self._head:
            raise ConfigurationError(
                f"{asked} begins with {lines[0]!r:.300}, but this study is {self._head}; give another file, "
                "or move that one away"
            )
        return kept_trials(lines, asked)

    def _write(self, content: Mapping[str, Any]) -> None:
        line = json.dumps(content)
        self._file.write(f"{line}\n".encode())
        self._file.flush()
        if self._fresh is not None:
            self._fresh.append(line)


def read_journal(path: Path) -> tuple[tuple[str, ...], KeptTrials]:
    """Return the directions of a search, and its trials, also while it runs.

    Args:
        path: of the journal.

    Raises:
        ConfigurationError: it cannot be read, or is no journal.
    """
    lines = _whole_lines(path, str(path))
    directions = lines[0].get("study") if lines else None
    known = ("MINIMIZE", "MAXIMIZE")
    if not isinstance(directions, list) or not directions or any(one not in known for one in directions):
        raise ConfigurationError(
            f"{path} does not begin like the journal of a search; name another file, or the folder of a run"
        )
    return tuple(directions), kept_trials(lines, str(path))


def _whole_lines(path: Path, asked: str) -> list[dict[str, Any]]:
    """Return the lines of a journal, without a last line cut short by a kill."""
    try:
        data = read_whole(path, _LARGEST)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(
            f"{asked} cannot be read ({error.strerror}); give another file, or move that one away"
        ) from None
    try:
        lines = [parsed_json(line) for line in data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]]
    except ValueError:
        lines = [None]
    if all(isinstance(line, dict) for line in lines):
        return lines
    raise ConfigurationError(
        f"{asked} holds a line that is no JSON object, so it is not a search journal; give another file, or "
        "move that one away"
    )
