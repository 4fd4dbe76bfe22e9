"""Journal of a search, from which a rerun of the same command resumes.

The journal holds one JSON object per line and only grows. A last line cut short by a kill is dropped at the
next start; all earlier lines count.

    {"study": ...}                            first line: the study that the journal belongs to
    {"trial": 3, "user": ...}                 the trial began, with a name that it keeps
    {"trial": 3, "name": "lr", ...}           a parameter was chosen
    {"trial": 3, "state": 1, ...}             the trial finished; all that Optuna knows of it
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._folder_lock import hold_lock, release_lock
from nnlo_common.base._whole_files import usable, whole
from nnlo_common.search._compat import has_no_name
from nnlo_common.search.journal._packed_trial import packed, unpacked, unpacked_parameters
from nnlo_common.search.journal._queued_trials import QueuedTrials

__all__ = ["Journal", "SearchRecord"]


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

    def close(self) -> None:
        """Close the record."""


class Journal(SearchRecord):
    """A file from which a search resumes after its job was killed.

    Args:
        path: the file; created if missing.
        study: receives the finished trials of the file; unfinished ones are queued again.

    Attributes:
        counted: how many finished trials the file held, without those that were retried.

    Raises:
        ConfigurationError: the file cannot be written, belongs to another study, is no journal, or is in use.
    """

    def __init__(self, path: str | Path, study: optuna.Study) -> None:
        self._path = usable(f"journal={str(path)!r}", Path(path))
        self._head = {"study": [direction.name for direction in study.directions], "name": study.study_name}
        if has_no_name(study):
            self._head["name"] = ""
        self._lock = self._path.with_name(f".{self._path.name}.in-use")
        hold_lock(self._lock, f"searching with the journal {path}", "journal")
        try:
            self._take_up(study)
        except BaseException:
            release_lock(self._lock)
            raise

    def _take_up(self, study: optuna.Study) -> None:
        finished, open_trials, repeated = self._read()
        self.counted = len(finished) - len(repeated)
        lines: list[dict[str, Any]] = [self._head]
        queued = QueuedTrials(study)
        if finished or open_trials:
            queued.check(f"journal={str(self._path)!r}")
        for content in finished:
            content["repeated"] = content["trial"] in repeated
            content["trial"] = queued.end(unpacked(content))
            lines.append(content)
        for params, user in open_trials:
            values, _ = unpacked_parameters(params)
            lines.append({"trial": queued.queue_again(values, user), "queued": params, "user": user})
        with whole(self._path) as fresh:
            fresh.write_text("".join(json.dumps(line) + "\n" for line in lines))
        self._file = self._path.open("a")

    def begun(self, trial: FrozenTrial) -> None:
        self._write({"trial": trial.number, "user": trial.user_attrs})

    def suggested(self, trial: int, name: str, value: float, distribution: str) -> None:
        self._write({"trial": trial, "name": name, "value": value, "distribution": distribution})

    def queued(self, trial: FrozenTrial, failed: FrozenTrial) -> None:
        params, user = packed(failed)["params"], trial.user_attrs
        self._write({"trial": trial.number, "queued": params, "user": user, "instead": failed.number})

    def finished(self, trial: FrozenTrial) -> None:
        """Record a finished trial; on return it is on the disk."""
        self._write(packed(trial))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        release_lock(self._lock)

    def _read(self) -> tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]], set[int]]:
        """Return the finished trials, the parameters of the others, and the numbers of retried trials."""
        lines = _whole_lines(self._path)
        if lines and lines[0] != self._head:
            raise ConfigurationError(
                f"journal={str(self._path)!r} begins with {lines[0]}, but this study is {self._head}; give "
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
    """Return the lines of a journal, without a last line cut short by a kill."""
    text = path.read_text() if path.exists() else ""
    try:
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except ValueError:
        lines = [None]
    if all(isinstance(line, dict) for line in lines):
        return lines
    raise ConfigurationError(
        f"journal={str(path)!r} holds a line that is no JSON object, so it is not a search journal; give "
        "another file, or move that one away"
    )
