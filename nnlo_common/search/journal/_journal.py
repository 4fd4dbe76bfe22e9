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
from nnlo_common.base._file_access import append_file, read_whole
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.base._whole_files import hold_lock, release_lock, usable, write_whole
from nnlo_common.search._compat import has_no_name
from nnlo_common.search.journal._kept_trials import KeptTrials, kept_trials, refusing
from nnlo_common.search.journal._packed_trial import packed
from nnlo_common.search.journal._queued_trials import QueuedTrials

__all__ = ["Journal", "SearchRecord", "read_journal"]

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
        kept = self._read()
        self.counted = len(kept.finished) - len(kept.repeated)
        lines: list[dict[str, Any]] = [self._head]
        queued = QueuedTrials(study)
        if kept.finished or kept.open_trials:
            queued.check(f"journal={str(self._path)!r}")
        with refusing(f"journal={str(self._path)!r}", "a trial"):
            for content, trial in kept.finished:
                content["repeated"] = content["trial"] in kept.repeated
                content["trial"] = queued.end(trial)
                lines.append(content)
            for params, values, user in kept.open_trials:
                lines.append({"trial": queued.queue_again(values, user), "queued": params, "user": user})
        write_whole(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = append_file(self._path)

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
        self._file.write(f"{json.dumps(content)}\n".encode())
        self._file.flush()


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
