"""The folder of a run: claimed before the training, never another's, and complete at the end."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import fields
from itertools import count
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import whole
from nnlo_common.cluster._connecting import connect
from nnlo_common.commands.doctor._rank_report import versions
from nnlo_common.commands.train._algorithm_options import MODES
from nnlo_common.commands.train._option_files import as_toml
from nnlo_common.commands.train._settings import OPTIONS, Settings

__all__ = [
    "absolute",
    "claim",
    "command",
    "config_text",
    "environment",
    "facts_of_run",
    "give_back",
    "write_json",
]

CONFIG, HISTORY, RUN = "config.toml", "history.json", "run.json"
_RUNS = Path("runs")
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
            return _written(_next_free(name), config), False
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            folder.mkdir(parents=True, exist_ok=True)
            return _written(folder, config), False
        if folder.is_dir() and settings.checkpoint is not None:
            _check_same(folder, config)
            return folder, True
    except OSError as error:
        raise ConfigurationError(
            f"--run {folder or _RUNS.absolute()} cannot be written ({error.strerror}); name another folder"
        ) from None
    raise ConfigurationError(f"--run {folder} is there already; name another folder, or delete it")


def _next_free(name: str) -> Path:
    for number in count(1):
        folder = (_RUNS / f"{name}-{number}").absolute()
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            if not _RUNS.is_dir():
                raise
            continue
        return folder
    raise AssertionError  # there always is a next number


def _written(folder: Path, config: str) -> Path:
    with whole(folder / CONFIG) as fresh:
        fresh.write_text(config, "utf-8")
    return folder


def _check_same(folder: Path, config: str) -> None:
    """Refuse to go on in the folder of a training that is complete, or is another one."""
    if (folder / HISTORY).exists():
        raise ConfigurationError(f"--run {folder} has a training that is complete; name another folder")
    if not (folder / CONFIG).is_file():
        raise ConfigurationError(f"--run {folder} is no folder of a run; name another one")
    there = (folder / CONFIG).read_text("utf-8").splitlines()
    here = config.splitlines()
    for line in [*there, *here]:
        if (line in there) != (line in here):
            where = "there" if line in there else "here"
            raise ConfigurationError(
                f"--run {folder} has another training in it: only {where} is {line!r}; name another folder, "
                "or give the options that it began with (its config.toml has them)"
            )


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
