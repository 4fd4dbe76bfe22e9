"""The folder of a run: claimed before the training, used by one run only, and complete at the end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._file_access import LOCK, read_whole, write_whole
from nnlo_common.base._limited_formats import LARGEST_JSON, LARGEST_TOML, parsed_json
from nnlo_common.commands.train._option import as_toml, option_text, parsed_toml
from nnlo_common.commands.train._settings import MODES, OPTIONS, RANK_FLAGS, Settings
from nnlo_common.commands.train._stopping import Stopping
from nnlo_common.training._rank_options import RANK_OPTIONS
from nnlo_common.training.report._facts_writer import versions

__all__ = [
    "CompleteRun",
    "check_same",
    "claim",
    "claiming",
    "config_text",
    "facts_of_command",
    "next_free",
    "remove_unused",
    "with_absolute_paths",
    "write_json",
    "write_text",
]

CONFIG, HISTORY, RUN = "config.toml", "history.json", "run.json"
SEARCH = "search.toml"
# Options that may change on resuming; a checkpoint itself refuses ranks that it does not fit.
_MAY_CHANGE = ("epochs", "early_stopping", "early_stopping_metric", "target_metric", *RANK_FLAGS)
RUNS = Path("runs")  # the default parent, without --run
_VARIABLES = ("KERAS_BACKEND", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NNLO_MPI")


def config_text(settings: Settings, learning_rate: float) -> str:
    """Return a configuration that repeats the training from any folder: all options, with absolute paths.

    Args:
        settings: of the training.
        learning_rate: of the optimizer, given or the framework's default.
    """
    values: dict[str, Any] = {
        one.name.removesuffix("_"): getattr(settings, one.name)
        for one in fields(settings)
        if one.name not in ("algorithm", "ranks")
    }
    flags = zip(RANK_FLAGS, RANK_OPTIONS, strict=True)
    values |= {flag: getattr(settings.ranks, name) for flag, name in flags}
    options = MODES[settings.mode].options
    values |= {name: option.default for name, option in options.items()} | settings.algorithm
    if settings.algorithm.get("alpha") is not None:
        del values["beta"]
    values |= {"learning_rate": learning_rate, "run": None, "log_dir": None, "log_to": ()}
    return as_toml(with_absolute_paths(values), OPTIONS)


def with_absolute_paths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of options with absolute paths; remote addresses stay as they are."""
    one = {name: _absolute(values[name]) for name in ("model", "from", "cache") if values.get(name)}
    several = {name: tuple(map(_absolute, values[name])) for name in ("train", "val") if values.get(name)}
    return {**values, **one, **several}


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111


class CompleteRun:
    """A complete run that is about to be continued: as it is now.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._saved = self._checkpoints
        self._texts: dict[str, bytes] = {}
        # The history last: it says that the run is complete.
        for name, largest in ((CONFIG, LARGEST_TOML), (HISTORY, LARGEST_JSON)):
            with suppress(OSError, ValueError):
                self._texts[name] = read_whole(folder / name, largest)

    def give_back(self) -> None:
        """Leave it as it was, unless it has gone on until a checkpoint."""
        replaced = HISTORY in self._texts and not (self._folder / HISTORY).exists()
        if replaced and self._saved == self._checkpoints:
            for name, text in self._texts.items():
                write_whole(self._folder / name, text)

    @property
    def _checkpoints(self) -> set[str]:
        return {one.name for one in (self._folder / "checkpoint").glob("checkpoint-*")}


def claim(settings: Settings, name: str, config: str) -> tuple[Path, bool]:
    """Make the folder of a run, with its configuration; return it and whether the run resumes.

    Raises:
        ConfigurationError: it cannot be made, or belongs to another run.
    """
    with claiming(settings.run) as folder:
        if folder is None:
            return _written(next_free(name), config), False
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            folder.mkdir(parents=True, exist_ok=True)
            return _written(folder, config), False
        if folder.is_dir() and settings.checkpoint is not None:
            if _check_resumable(folder, config, settings):
                # First what says that the run is complete: killed in between, the same command continues it.
                (folder / HISTORY).unlink(missing_ok=True)
                write_text(folder / CONFIG, config)
            return folder, True
    raise ConfigurationError(f"--run {folder} exists already; name another folder, or delete it")


@contextmanager
def claiming(asked: str | None) -> Iterator[Path | None]:
    """Yield the folder of `--run`, None for a new one; refuse it if the body cannot write there."""
    folder = None if asked is None else Path(asked).expanduser().absolute()
    try:
        yield folder
    except OSError as error:
        raise ConfigurationError(
            f"--run {folder or RUNS.absolute()} cannot be written ({error.strerror}); name another folder"
        ) from None


def next_free(name: str) -> Path:
    """Make the next free folder of a name in `runs`; a concurrent run cannot get the same one.

    Raises:
        OSError: it cannot be made.
    """
    RUNS.mkdir(exist_ok=True)
    for number in count(1):
        folder = (RUNS / f"{name}-{number}").absolute()
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError  # there always is a next number


def _written(folder: Path, config: str) -> Path:
    write_text(folder / CONFIG, config)
    return folder


def _check_resumable(folder: Path, config: str, settings: Settings) -> bool:
    """Refuse to resume with other options or nothing left to do; return whether a complete run goes on."""
    file = folder / CONFIG
    if not file.is_file():
        raise ConfigurationError(f"--run {folder} is not the folder of a run; name another one")
    there, here = check_same(file, config, "training", _MAY_CHANGE)
    before, epochs = (options.get("epochs", OPTIONS["epochs"].default) for options in (there, here))
    if not isinstance(before, int) or epochs < before:
        raise ConfigurationError(
            f"--epochs {epochs}: --run {folder} was begun with {before!r}; give at least as many, or name "
            "another folder"
        )
    if not (folder / HISTORY).exists():
        return bool(there != here)
    done = _history(folder / HISTORY)
    stopping = Stopping(settings, [*done])
    if stopping.replay(done):
        raise ConfigurationError(
            f"--run {folder} has a complete training, which ended after epoch {len(done['loss'])} of "
            f"{before}: {stopping.why}\nTo continue it, {stopping.remedy}; else name another folder"
        )
    if len(done["loss"]) >= epochs:
        raise ConfigurationError(
            f"--run {folder} has a complete training of --epochs {before}; to continue it, give more epochs, "
            "else name another folder"
        )
    return True


def _history(file: Path) -> dict[str, list[float]]:
    """Return the metrics of each epoch of a complete run."""
    try:
        found = parsed_json(read_whole(file, LARGEST_JSON))["center"]
        return {str(name): [float(value) for value in values] for name, values in found.items() if values} | {
            "loss": [float(value) for value in found["loss"]]
        }
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"--run {file} cannot be read ({error}); name another folder") from None


def check_same(
    file: Path, config: str, kind: str, may_change: Collection[str] = ()
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Refuse to resume with other options than those in a file; return those there and those here.

    Args:
        file: with the options of the first start.
        config: the same file, as it would be written now.
        kind: "training" or "search".
        may_change: the options that may differ.
    """
    options_there = parsed_toml(option_text(file, f"--run {file}", LARGEST_TOML), f"--run {file}")
    options_here = parsed_toml(config, "these options")
    there, here = dict(_lines(options_there)), dict(_lines(options_here))
    for name in [*there, *here]:
        if there.get(name) != here.get(name) and name not in may_change:
            where, line = ("there", there[name]) if name in there else ("here", here[name])
            raise ConfigurationError(
                f"--run {file.parent} has another {kind} in it: only {where} is {line!r}; name another "
                f"folder, or give the options of its first start (see its {file.name})"
            )
    return options_there, options_here


def _lines(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each option as one line, also those in tables."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield prefix + name, f"{prefix}{name} = {value!r}"


def remove_unused(folder: Path) -> None:
    """Remove the folder of a run or a search that has not begun."""
    if not folder.is_symlink() and {one.name for one in folder.iterdir()} <= {CONFIG, SEARCH, LOCK}:
        shutil.rmtree(folder)


def facts_of_command(began: str, seconds: float) -> dict[str, Any]:
    """Return the facts about this command for `run.json` and `search.json`.

    Args:
        began: its start, for people.
        seconds: its duration.
    """
    return {
        "command": shlex.join(["nnlo", *sys.argv[1:]]),
        "began": began,
        "seconds": round(seconds, 3),
        "versions": versions(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts as JSON, whole or not at all; put lists of numbers in one line."""
    text = json.dumps(facts, indent=1)
    # Only between lines: texts in JSON may have brackets and spaces, but no line breaks.
    text = re.sub(r"\[\n([^][{}\"]*)\n *\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    write_whole(path, text)
