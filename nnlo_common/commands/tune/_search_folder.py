"""The folder of a search: claimed before the search begins, and inspected when it resumes.

search.toml      all options: `nnlo tune --config search.toml` repeats the search
journal.jsonl    all trials: the same command resumes from it
trials/0007/     the folder of a run for each trial, with folds one for each of them in it
trials/0007.json the parameters and seed of the trial
search.json, report.html, at the end
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeGuard

from nnlo_common.base._arguments import is_number, is_whole
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import LOCK, hold, read_whole
from nnlo_common.base._limited_formats import LARGEST_OPTIONS, parsed_json
from nnlo_common.commands.train._run_folder import SEARCH, check_same, claiming, next_free, write_text

__all__ = [
    "BEGAN",
    "BLOCK",
    "FOLDER",
    "Found",
    "JOURNAL",
    "TRIAL",
    "VALUE",
    "claim_search",
    "drop_models",
    "inspect_folder",
    "is_trial_name",
    "known_value",
]

#: User attributes of a trial: its block, its start, and the name of its folder.
BLOCK, BEGAN, FOLDER = "nnlo:block", "nnlo:began", "nnlo:folder"
JOURNAL, TRIAL, VALUE = "journal.jsonl", "trials", "value.json"
_MODELS = ("model.keras", "weights.pt")
_HOME = re.compile(r"[0-9]{4,9}(-[0-9]{1,9})?")  # as `Found.home` names them
_LARGEST_JOURNAL = 1_000_000_000  # bytes
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

    def home(self, own: str, chosen: Mapping[str, Any], seed: int) -> tuple[str, int]:
        """Return the folder name and seed of a trial: those of its first start, if it was interrupted.

        Args:
            own: the name that the trial keeps, which no other trial of the search has.
            chosen: its parameters.
            seed: its seed, if it begins now.

        Example:
            >>> Found(("0003",), (("0002", {"x": 1}, 9),)).home("0002", {"x": 1}, 5)
            ('0002', 9)
            >>> Found(("0003",)).home("0003", {"x": 1}, 5)
            ('0003-2', 5)
        """
        for name, parameters, begun in self.left:
            if (name, parameters) == (own, chosen):
                return name, begun
        stem, taken = own.partition("-")[0], {*self.taken, *(name for name, _, _ in self.left)}
        names = chain([own], (f"{stem}-{turn}" for turn in count(2)))
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
    _refuse_link(trials)
    names = {path.name.removesuffix(".json") for path in trials.iterdir()} if trials.is_dir() else set()
    for home in (trials / name for name in sorted(names - finished) if _HOME.fullmatch(name)):
        _refuse_link(home)
        told = _interrupted(home.with_name(f"{home.name}.json"))
        if goes_on and told is not None:
            left.append((home.name, *told))
            for history in [*home.glob("history.json"), *home.glob("fold*/history.json")]:
                _refuse_link(history.parent)
                if known_value(history.parent) is None:  # trained, but killed before its value was written
                    shutil.rmtree(history.parent)
        else:
            shutil.rmtree(home, ignore_errors=True)
            home.with_name(f"{home.name}.json").unlink(missing_ok=True)
    return Found(tuple(sorted(finished)), tuple(left))


def _refuse_link(folder: Path) -> None:
    """Refuse a link in place of a folder that a search has made: what it points to would be changed."""
    if folder.is_symlink():
        raise ConfigurationError(
            f"--run has a symbolic link in it, {folder}, in place of a folder of its search; remove the "
            "link, or name another folder"
        )


def _finished(journal: Path) -> set[str]:
    """Return the folder names of the trials that are finished in the journal."""
    names = set()
    try:
        lines = read_whole(journal, _LARGEST_JOURNAL).split(b"\n")
    except FileNotFoundError:
        lines = []
    except OSError as error:
        raise ConfigurationError(
            f"{journal} cannot be read ({error.strerror}); name another folder, or remove it"
        ) from None
    for line in lines:
        with contextlib.suppress(ValueError):  # a kill may leave an incomplete last line
            told = parsed_json(line)
            user = told.get("user") if isinstance(told, dict) and "state" in told else None
            name = user.get(FOLDER) if isinstance(user, dict) else None
            if is_trial_name(name):
                names.add(name)
    return names


def is_trial_name(name: object) -> TypeGuard[str]:
    """Return whether a search gives this name to the folder of a trial; names in its journal may be others.

    Example:
        >>> is_trial_name("0007-2"), is_trial_name("../../home")
        (True, False)
    """
    return isinstance(name, str) and _HOME.fullmatch(name) is not None


def _interrupted(path: Path) -> tuple[Mapping[str, Any], int] | None:
    """Return the parameters and the seed of an interrupted trial; None if they cannot be read."""
    told = _read(path)
    parameters, seed = (told.get(name) for name in ("parameters", "seed")) if told else (None, None)
    return (parameters, seed) if isinstance(parameters, dict) and is_whole(seed, 0) else None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = parsed_json(read_whole(path, LARGEST_OPTIONS))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def known_value(run: Path) -> float | None:
    """Return the value of a training that ended before a resume; None: it did not end."""
    value = (_read(run / VALUE) or {}).get("value")
    return float(value) if is_number(value) else None


def drop_models(folder: Path, trial: str, best: str | None = None) -> None:
    """Remove the models of a trial; its configuration can train them again.

    Args:
        folder: of the search.
        trial: the name of the trial's folder, as the journal has it; nothing outside of it is removed.
        best: the name of the best trial's folder, whose models stay.
    """
    home = folder / TRIAL / trial
    if trial == best or not is_trial_name(trial) or home.is_symlink() or home.parent.is_symlink():
        return
    for run in (home, *home.glob("fold*")):
        for name in () if run.is_symlink() else _MODELS:
            with contextlib.suppress(NotADirectoryError):
                (run / name).unlink(missing_ok=True)
