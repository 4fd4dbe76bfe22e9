"""A trial as JSON, and the journal from which the same command goes on.

The journal holds one JSON object a line and is only ever appended to. A line that was being written when the
job was killed is cut off at the next start; what came before it counts.

    {"study": ...}                            begins the file: what it is the journal of
    {"trial": 3, "user": ...}                 the trial has begun, with a name that it keeps
    {"trial": 3, "name": "lr", ...}           a parameter was chosen
    {"trial": 3, "state": 1, ...}             the trial has finished, with all that Optuna knows of it
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.trial import FrozenTrial, TrialState

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._folder_lock import hold_lock, release_lock
from nnlo_common.base._whole_files import usable, whole
from nnlo_common.search._compat import is_pickle, number_in, storage_of
from nnlo_common.search.coordinator._endings import end_in
from nnlo_common.search.journal._queued import Queued

__all__ = ["Journal", "Record", "Records", "packed", "take_over", "unpacked"]


def packed(trial: FrozenTrial) -> dict[str, Any]:
    """Return a trial as plain JSON values, every number exactly."""
    return {
        "trial": trial.number,
        "state": trial.state.name,
        "values": None if trial.values is None else list(trial.values),
        "params": {
            name: [
                float(distribution.to_internal_repr(trial.params[name])),
                distribution_to_json(distribution),
            ]
            for name, distribution in trial.distributions.items()
        },
        "steps": [[step, value] for step, value in trial.intermediate_values.items()],
        "user": trial.user_attrs,
        "system": _without_code(trial.system_attrs),
        "time": [moment and moment.isoformat() for moment in (trial.datetime_start, trial.datetime_complete)],
    }


def unpacked(content: Mapping[str, Any]) -> FrozenTrial:
    """Return the trial that was packed so."""
    distributions = {name: json_to_distribution(text) for name, (_, text) in content["params"].items()}
    start, complete = (moment and datetime.datetime.fromisoformat(moment) for moment in content["time"])
    trial = optuna.trial.create_trial(
        state=TrialState[content["state"]],
        values=content["values"],
        params={
            name: distributions[name].to_external_repr(value)
            for name, (value, _) in content["params"].items()
        },
        distributions=distributions,
        user_attrs=dict(content["user"]),
        system_attrs=_without_code(content["system"]),
        intermediate_values={int(step): value for step, value in content["steps"]},
    )
    trial.number = content["trial"]
    trial.datetime_start, trial.datetime_complete = start, complete
    return trial


def _without_code(system: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what Optuna would unpickle: CMA-ES as it was, which learns from the trials again."""
    return {key: value for key, value in system.items() if not is_pickle(key)}


def take_over(study: optuna.Study, trials: Iterable[Mapping[str, Any]]) -> None:
    """Give a study the packed trials that have ended elsewhere; what waits in it ends as it did there."""
    known = study.get_trials(deepcopy=False)
    for content in trials:
        trial = unpacked(content)
        if trial.number >= len(known):
            study.add_trial(trial)
        elif known[trial.number].state is TrialState.WAITING:
            end_in(storage_of(study), number_in(known[trial.number]), trial)


class Record:
    """What is written down of a search: nothing; see `Journal`."""

    def begun(self, trial: FrozenTrial) -> None:
        """A trial has begun."""

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        """A parameter was chosen, as Optuna's internal number."""

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        """A trial waits that is to repeat a failed one."""

    def finished(self, trial: FrozenTrial) -> None:
        """A trial has finished."""

    def close(self) -> None:
        """Nothing more will come."""


class Records(Record):
    """Several records of one search.

    Args:
        records: each of them.
    """

    def __init__(self, *records: Record) -> None:
        self._records = records

    def begun(self, trial: FrozenTrial) -> None:
        """A trial has begun."""
        for record in self._records:
            record.begun(trial)

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        """A parameter was chosen."""
        for record in self._records:
            record.suggested(trial, name, value, distribution)

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        """A trial waits that is to repeat a failed one."""
        for record in self._records:
            record.queued(trial, failed)

    def finished(self, trial: FrozenTrial) -> None:
        """A trial has finished."""
        for record in self._records:
            record.finished(trial)

    def close(self) -> None:
        """Nothing more will come."""
        for record in self._records:
            record.close()


class Journal(Record):
    """A file from which a search goes on after its job was killed.

    Args:
        path: the file; made if it is not there.
        study: where the trials found in it are added, and those that had not finished are queued again.

    Attributes:
        counted: how many finished trials were found, those apart that were tried again.

    Raises:
        ConfigurationError: it cannot be written, is of another study, no journal, or another job's just now.
    """

    def __init__(self, path: str | Path, study: optuna.Study) -> None:
        self._path = usable(f"journal={str(path)!r}", Path(path))
        self._head = {"study": [direction.name for direction in study.directions], "name": study.study_name}
        if study.study_name.startswith("no-name"):  # Optuna's, another each time
            self._head["name"] = ""
        self._lock = self._path.with_name(f".{self._path.name}.in-use")
        hold_lock(self._lock, f"searching with the journal {path}", "journal")
        try:
            self._take_up(study)
        except BaseException:
            release_lock(self._lock)  # this job has no use for it
            raise

    def _take_up(self, study: optuna.Study) -> None:
        finished, open_trials, repeated = self._read()
        self.counted = len(finished) - len(repeated)
        lines: list[dict[str, Any]] = [self._head]
        queued = Queued(study)
        if finished or open_trials:
            queued.check(f"journal={str(self._path)!r}")
        for content in finished:
            content["repeated"] = content["trial"] in repeated
            content["trial"] = queued.end(unpacked(content))
            lines.append(content)
        for params, user in open_trials:
            values = {
                name: json_to_distribution(text).to_external_repr(value)
                for name, (value, text) in params.items()
            }
            lines.append({"trial": queued.queue_again(values, user), "queued": params, "user": user})
        with whole(self._path) as fresh:
            fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._file = self._path.open("a")

    def begun(self, trial: FrozenTrial) -> None:
        """A trial has begun."""
        self._write({"trial": trial.number, "user": trial.user_attrs})

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        """A parameter was chosen."""
        self._write({"trial": trial, "name": name, "value": value, "distribution": distribution})

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        """A trial waits that is to repeat a failed one."""
        params, user = packed(failed)["params"], trial.user_attrs
        self._write({"trial": trial.number, "queued": params, "user": user, "instead": failed.number})

    def finished(self, trial: FrozenTrial) -> None:
        """A trial has finished; on return that is on the disk."""
        self._write(packed(trial))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Nothing more will come."""
        self._file.close()
        release_lock(self._lock)

    def _read(self) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]], set[int]]:
        """Return the finished trials, the parameters of the others, and which have been queued again."""
        lines = _whole_lines(self._path)
        if lines and lines[0] != self._head:
            raise ConfigurationError(
                f"journal={str(self._path)!r} begins with {lines[0]}, but this study is {self._head}; name "
                "another file, or move that one away"
            )
        finished: dict[int, dict[str, Any]] = {}
        chosen: dict[int, dict[str, Any]] = {}
        users: dict[int, dict[str, Any]] = {}
        repeated: set[int] = set()
        for line in lines[1:]:
            number = line["trial"]
            if "state" in line:
                finished[number] = line
            elif "queued" in line:
                chosen[number], users[number] = line["queued"], line["user"]
                repeated |= {line["instead"]} if "instead" in line else set()
            elif "user" in line:
                users[number] = line["user"]
            else:
                chosen.setdefault(number, {})[line["name"]] = [line["value"], line["distribution"]]
        repeated |= {number for number, line in finished.items() if line.get("repeated")}
        open_trials = [
            (params, users.get(number, {}))
            for number, params in sorted(chosen.items())
            if number not in finished
        ]
        return [finished[number] for number in sorted(finished)], open_trials, repeated & finished.keys()

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content) + "\n")
        self._file.flush()


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return what a journal holds; a last line without its end was being written when the job was killed."""
    text = path.read_text() if path.exists() else ""
    try:
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError:
        lines = [None]
    if all(isinstance(line, dict) for line in lines):
        return lines
    raise ConfigurationError(
        f"journal={str(path)!r} holds a line that is no JSON object, so it is no journal of a search; name "
        "another file, or move that one away"
    )
