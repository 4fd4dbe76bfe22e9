"""The folder of a search: claimed before the search begins, and inspected when it resumes.

search.toml      all options: `nnlo tune --config search.toml` repeats the search
journal.jsonl    all trials: the same command resumes from it
trials/0007/     the folder of a run for each trial, with folds one for each of them in it
trials/0007.json the parameters and seed of the trial
search.json, report.html, at the end
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._folder_lock import LOCK, hold
from nnlo_common.commands.train._run_folder import SEARCH, check_same, claiming, next_free, write_text

__all__ = [
    "BEGAN",
    "BLOCK",
    "FOLDER",
    "JOURNAL",
    "TRIAL",
    "VALUE",
    "Found",
    "claim_search",
    "drop_models",
    "known_value",
    "inspect_folder",
]

#: User attributes of a trial: its block, its start, and the name of its folder.
BLOCK, BEGAN, FOLDER = "nnlo:block", "nnlo:began", "nnlo:folder"
JOURNAL, TRIAL, VALUE = "journal.jsonl", "trials", "value.json"
_MODELS = ("model.keras", "weights.pt")
# Options that may change when a search resumes.
_MAY_CHANGE = ("num_iterations", "target_objective", "elastic", "table", "retries", "until", "export")


@dataclass(frozen=True, slots=True)
class Found:
    """Contents of the folder at the start of a search, equal on all ranks.

    Attributes:
        taken: names of the folders of finished trials.
        left: interrupted trials with checkpoints: name, parameters and seed.
    """

    taken: tuple[str, ...] = ()
    left: tuple[tuple[str, Mapping[str, Any], int], ...] = ()

    def home(self, number: int, chosen: Mapping[str, Any], seed: int) -> tuple[str, int]:
        """Return the folder name and seed of a trial: those of its first start, if it was interrupted.

        Example:
            >>> Found(("0003",), (("0002", {"x": 1}, 9),)).home(3, {"x": 1}, 5)
            ('0002', 9)
            >>> Found(("0003",)).home(3, {"x": 1}, 5)
            ('0003-2', 5)
        """
        for name, parameters, begun in self.left:
            if parameters == chosen:
                return name, begun
        names = (f"{number:04}" + (f"-{turn}" if turn > 1 else "") for turn in count(1))
        taken = {*self.taken, *(name for name, _, _ in self.left)}
        return next(name for name in names if name not in taken), seed


def claim_search(asked: str | None, name: str, text: str) -> tuple[Path, bool]:
    """Make the folder of a search; return it and whether the search resumes.

    Args:
        asked: the folder of `--run`; None: a new one.
        name: of the model.
        text: the options of the search.

    Raises:
        ConfigurationError: it cannot be made, or belongs to something else.
    """
    with claiming(asked) as given:
        folder = next_free(f"{name}-search") if given is None else given
        if not (folder / SEARCH).is_file() and folder.exists() and not _is_free(folder):
            raise ConfigurationError(f"--run {folder} exists already, without a search; name another folder")
        folder.mkdir(parents=True, exist_ok=True)
        hold(folder, "searching")
        # Check after locking: another search may have just begun in this folder.
        if (folder / SEARCH).is_file():
            check_same(folder / SEARCH, text, "search", _MAY_CHANGE)
            return folder, True
        write_text(folder / SEARCH, text)
    return folder, False


def _is_free(folder: Path) -> bool:
    return folder.is_dir() and {one.name for one in folder.iterdir()} <= {LOCK}


def inspect_folder(folder: Path, goes_on: bool) -> Found:
    """Return the contents of the folder, and remove interrupted trials that cannot resume.

    Args:
        folder: of the search.
        goes_on: whether trainings have checkpoints to resume from.
    """
    finished = _finished(folder / JOURNAL)
    left = []
    trials = folder / TRIAL
    names = {path.name.removesuffix(".json") for path in trials.iterdir()} if trials.is_dir() else set()
    for home in (trials / name for name in sorted(names - finished)):
        told = _read(home.with_name(f"{home.name}.json"))
        if goes_on and told is not None:
            left.append((home.name, told["parameters"], told["seed"]))
            for history in [*home.rglob("history.json")]:
                if known_value(history.parent) is None:  # trained, but killed before its value was written
                    shutil.rmtree(history.parent)
        else:
            shutil.rmtree(home, ignore_errors=True)
            home.with_name(f"{home.name}.json").unlink(missing_ok=True)
    return Found(tuple(sorted(finished)), tuple(left))


def _finished(journal: Path) -> set[str]:
    """Return the folder names of the trials that are finished in the journal."""
    names = set()
    for line in journal.read_text("utf-8").splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError):  # a kill may leave an incomplete last line
            told = json.loads(line)
            if "state" in told:
                names.add(told.get("user", {}).get(FOLDER, ""))
    return names - {""}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def known_value(run: Path) -> float | None:
    """Return the value of a training that ended before a resume; None: it did not end."""
    told = _read(run / VALUE)
    return None if told is None else float(told["value"])


def drop_models(home: Path) -> None:
    """Remove the models of a trial; its configuration can train them again."""
    for name in _MODELS:
        for path in (home / name, *home.glob(f"fold*/{name}")):
            path.unlink(missing_ok=True)
