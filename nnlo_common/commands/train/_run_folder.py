"""The folder of a run: claimed before the training, never another's, and complete at the end."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import whole
from nnlo_common.cluster._connecting import connect
from nnlo_common.commands.doctor._rank_report import versions
from nnlo_common.commands.train._algorithm_options import MODES
from nnlo_common.commands.train._option_files import as_toml, parsed_toml
from nnlo_common.commands.train._settings import OPTIONS, Settings

__all__ = [
    "RUNS",
    "absolute",
    "check_same",
    "claim",
    "command",
    "config_text",
    "environment",
    "facts_of_run",
    "give_back",
    "next_free",
    "write_json",
]

CONFIG, HISTORY, RUN = "config.toml", "history.json", "run.json"
RUNS = Path("runs")  # for those that nobody names
_VARIABLES = ("KERAS_BACKEND", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NNLO_MPI")


def config_text(settings: Settings, learning_rate: float) -> str:
    """Return the file that makes the same training again, from any folder: all options, with absolute paths.

    Args:
        settings: what was asked for.
        learning_rate: what the optimizer has, whoever has chosen it.
    """
    values: dict[str, Any] = {
        one.name: getattr(settings, one.name) for one in fields(settings) if one.name != "algorithm"
    }
    options = MODES[settings.mode].options
    values |= {name: option.default for name, option in options.items()} | settings.algorithm
    if settings.algorithm.get("alpha") is not None:
        del values["beta"]
    values |= {"learning_rate": learning_rate, "model": absolute(settings.model), "run": None}
    values |= {name: tuple(map(absolute, values[name])) or None for name in ("train", "val") if values[name]}
    if settings.cache is not None:
        values["cache"] = absolute(settings.cache)
    return as_toml(values, OPTIONS)


def absolute(path: str) -> str:
    """Return a path that means the same from any folder."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111


def claim(settings: Settings, name: str, config: str) -> tuple[Path, bool]:
    """Make the folder of a run, with its configuration in it; say whether it was there, to go on with.

    Raises:
        ConfigurationError: it cannot be made, or is another run's.
    """
    folder = None if settings.run is None else Path(settings.run).expanduser().absolute()
    try:
        if folder is None:
            return _written(next_free(name), config), False
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            folder.mkdir(parents=True, exist_ok=True)
            return _written(folder, config), False
        if folder.is_dir() and settings.checkpoint is not None:
            _check_goes_on(folder, config)
            return folder, True
    except OSError as error:
        raise ConfigurationError(
            f"--run {folder or RUNS.absolute()} cannot be written ({error.strerror}); name another folder"
        ) from None
    raise ConfigurationError(f"--run {folder} is there already; name another folder, or delete it")


def next_free(name: str) -> Path:
    """Make the next folder of a name in `runs`, which nobody else then gets.

    Raises:
        OSError: it cannot be made.
    """
    RUNS.mkdir(exist_ok=True)
    for number in count(1):
        folder = (RUNS / f"{name}-{number}").absolute()
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError  # there always is a next number


def _written(folder: Path, config: str) -> Path:
    with whole(folder / CONFIG) as fresh:
        fresh.write_text(config, "utf-8")
    return folder


def _check_goes_on(folder: Path, config: str) -> None:
    """Refuse to go on in the folder of a training that is complete, or is another one."""
    if (folder / HISTORY).exists():
        raise ConfigurationError(f"--run {folder} has a training that is complete; name another folder")
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"--run {folder} is no folder of a run; name another one")
    check_same(folder / CONFIG, config, "training")


def check_same(file: Path, config: str, kind: str, may_change: Collection[str] = ()) -> None:
    """Refuse to go on where a file has other options than those given now.

    Args:
        file: with the options that it began with.
        config: the same file, as it would be written now.
        kind: what goes on.
        may_change: the options that may be others.
    """
    there = dict(_lines(parsed_toml(file.read_text("utf-8"), f"--run {file}")))
    here = dict(_lines(tomllib.loads(config)))
    for name in [*there, *here]:
        if there.get(name) != here.get(name) and name not in may_change:
            where, line = ("there", there[name]) if name in there else ("here", here[name])
            raise ConfigurationError(
                f"--run {file.parent} has another {kind} in it: only {where} is {line!r}; name another "
                f"folder, or give the options that it began with (its {file.name} has them)"
            )


def _lines(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each option as one line, those in tables, too."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        else:
            yield prefix + name, f"{prefix}{name} = {value!r}"


def give_back(folder: Path) -> None:
    """Take a folder away that nothing has been trained for."""
    if {one.name for one in folder.iterdir()} <= {CONFIG}:
        shutil.rmtree(folder)


def facts_of_run(ranks: list[dict[str, Any]], seconds: float, began: str) -> dict[str, Any]:
    """Return what there is to know about how a training was run."""
    world = connect()
    return {
        "command": command(),
        "began": began,
        "seconds": round(seconds, 3),
        "ranks": ranks,
        "folder": str(Path.cwd()),
        "versions": versions() | {"MPI library": None if world is None else world.library},
        "host": platform.node(),
        "environment": environment(),
    }


def command() -> str:
    """Return the command line of this process."""
    return shlex.join(["nnlo", *sys.argv[1:]])


def environment() -> dict[str, str]:
    """Return the variables that a training depends on."""
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


def write_json(path: Path, facts: Mapping[str, Any]) -> None:
    """Write facts, whole or not at all; numbers in a row stand in a line."""
    text = json.dumps(facts, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    with whole(path) as fresh:
        fresh.write_text(text + "\n")
