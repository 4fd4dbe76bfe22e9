"""The `nnlo predict` command: the outputs of models for all samples of files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError, NNLOError
from nnlo_common.cluster._gpus import share_host
from nnlo_common.cluster._hosts import Place
from nnlo_common.commands.predict._use_options import PREDICT_OPTIONS, PredictSettings, settings_of_use
from nnlo_common.commands.predict._used_models import check_models, load_models
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._job import Job, RankCommand, brief, tell
from nnlo_common.commands.train._model_file import Loaded
from nnlo_common.commands.train._option import nearest
from nnlo_common.commands.train._python_file import adapting, asked, users_line
from nnlo_common.commands.train._run_folder import write_json
from nnlo_common.commands.train._run_plan import side_of
from nnlo_common.data import list_files
from nnlo_common.inference import ROC, Confusion, Figure

__all__ = ["PredictRun", "UseRun", "function_named", "gpu_turns"]


def gpu_turns(places: Sequence[Place]) -> list[int | None]:
    """Return the GPU of each rank: the ranks of a host take them in turn."""
    return [place.local_rank % place.gpus if place.gpus else None for place in places]


class UseRun(RankCommand):
    """A command that uses models, on one rank.

    Args:
        job: the ranks.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._working = False

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Run the command; return the exit status."""
        try:
            self._use(dict(flags), unknown)
        except Exception as error:
            if not isinstance(error, NNLOError):
                lines = [f"{self._job.name}{type(error).__name__}: {brief(str(error))}", users_line(error)]
                tell("\n".join(filter(None, lines)) + self.advice, self._job.command)
            raise
        return 0

    def undo(self) -> None:
        """Do nothing: what is written stays."""

    @property
    def advice(self) -> str:
        """Text to print after a failure: what to do next."""
        return "\nFix this, then rerun the same command: what is written stays" if self._working else ""

    @property
    def resume_hint(self) -> str:
        """Text to print after an interrupt."""
        return "; rerun the same command to continue" if self._working else ""

    def _use(self, flags: dict[str, Any], unknown: Sequence[str]) -> None:
        raise NotImplementedError

    def _say(self, text: str) -> None:
        if self._job.speaks:
            print(f"nnlo {self._job.command}: {text}", flush=True)


class PredictRun(UseRun):
    """A prediction on one rank."""

    def _use(self, flags: dict[str, Any], unknown: Sequence[str]) -> None:
        job, names = self._job, flags.pop("models")
        with job.together():
            given = given_by(flags, unknown, PREDICT_OPTIONS, "predict")
            settings: PredictSettings = settings_of_use(PredictSettings, PREDICT_OPTIONS, given)
            used = check_models(names, settings)
            list_files(settings.data)
        places = job.places()
        share_host(places, job.rank, settings.max_gpus, os.environ, gpu_turns)
        with job.together(), adapting():
            loaded = load_models(used)
            one = loaded[0]
            features, adaptor = side_of(one, "features", settings.features_name or used[0].features_name)
            reading: dict[str, Any] = {"features": features, "adapt_features": adaptor}
            reading |= {"check_finite": settings.check_finite, **used[0].reading}
            if settings.cache is not None:
                reading |= {"stage_to": settings.cache, "copy_command": settings.copy_command}
            figures = {name: _figure(one, name) for name in settings.figures}
            apply = None if settings.apply is None else function_named(one, "--apply", settings.apply)
        options: dict[str, Any] = {
            "batch_size": settings.batch,
            "keep": settings.keep,
            "apply": apply,
            "figures": figures,
            "dtype": settings.dtype,
            "compression": settings.compression,
            "overwrite": settings.overwrite,
            "part": settings.part,
            "progress": True,
            "world": job.world,
        }
        if one.framework == "torch":
            options["precision"] = settings.precision
        elif settings.precision is not None:
            self._refuse("--precision is for PyTorch; a Keras model has its own dtype policy")
        self._working = True
        front = importlib.import_module(f"nnlo_{one.framework}")
        files = list_files(settings.data)
        found = front.predict(
            [each.model for each in loaded], list(files), settings.out, **options, **reading
        )
        self._tell(found, settings)

    def _refuse(self, problem: str) -> None:
        error = ConfigurationError(problem)
        error.collective = True
        raise error

    def _tell(self, found: Any, settings: PredictSettings) -> None:
        if found.missing:
            self._say(f"part {settings.part} is done; {found.missing} pieces of other parts are missing")
            return
        rate = found.rows / max(found.seconds, 1e-9)
        self._say(f"{found.path}: {found.rows} samples in {found.seconds:.1f} s, {rate:.0f} per second")
        if not found.figures:
            return
        for name, value in found.figures.items():
            shown = value.get("auc", value) if isinstance(value, dict) else value
            self._say(f"{name} = {shown!s:.200}")
        with self._job.together():
            if self._job.speaks:
                path = Path(f"{found.path}.figures.json")
                try:
                    write_json(path, dict(found.figures))
                except (OSError, TypeError, ValueError) as error:
                    raise ConfigurationError(f"{path} cannot be written ({error})") from None


def function_named(loaded: Loaded, flag: str, name: str) -> Any:
    found = getattr(loaded.module, name, None)
    if not callable(found):
        names = (
            [] if loaded.module is None else [one for one in vars(loaded.module) if not one.startswith("_")]
        )
        raise ConfigurationError(
            f"{flag} {name}: the model's Python file has no function of this name{nearest(name, names)}"
        )
    return found


def _figure(loaded: Loaded, text: str) -> Figure:
    """Return a figure by its name and arguments."""
    name, *rest = text.split(":")
    if name == "roc" and len(rest) == 1:
        return ROC(rest[0])
    if name == "confusion" and len(rest) == 2 and rest[1].isdecimal():
        return Confusion(rest[0], int(rest[1]))
    if rest or name in ("roc", "confusion"):
        raise ConfigurationError(
            f"--figures {text}: give roc:LABELS, confusion:LABELS:CLASSES, or the name of a function"
        )
    function_named(loaded, "--figures", name)
    found = asked(loaded.module, loaded.path, name)
    if not isinstance(found, Figure):
        raise ConfigurationError(f"--figures {name}: {name}() returned {found!r:.60}; return an nnlo Figure")
    return replace(found)
