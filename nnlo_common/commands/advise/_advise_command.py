"""The command: the options of `nnlo train`, a probe in place of the training, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.commands.advise._advising import advise_with
from nnlo_common.commands.train._command_line import given_by
from nnlo_common.commands.train._job import Job, RankCommand
from nnlo_common.commands.train._model_file import load_model, plug_in
from nnlo_common.commands.train._option import Option, option, options_of
from nnlo_common.commands.train._python_file import adapting
from nnlo_common.commands.train._run_plan import RunPlan, data_of
from nnlo_common.commands.train._settings import OPTIONS, settings_of
from nnlo_common.commands.train._train_command import checked
from nnlo_common.training._joining import apart

__all__ = ["ADVISE_OPTIONS", "AdviseRun"]

_FOLDER = Path("advice")


@dataclass(frozen=True, kw_only=True)
class _OwnSettings:
    """Options of the probe."""

    seconds: float = option("Probe", "about how long to try", default=60.0, least=1)
    link: str | None = option(
        "Probe", "microseconds of a short message and GB/s of a long one between hosts", "US,GB/S"
    )


_OWN = options_of(_OwnSettings)
#: All options of the command, in the order of its help.
ADVISE_OPTIONS: Mapping[str, Option] = {**_OWN, **OPTIONS}


class AdviseRun(RankCommand):
    """A probe on one rank.

    Args:
        job: the ranks that try at the same time.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._trainer: Any = None

    def run(self, flags: Mapping[str, Any], unknown: Sequence[str]) -> int:
        """Check everything, try, print and write; return the exit status."""
        job = self._job
        with job.together():
            given = given_by(flags, unknown, ADVISE_OPTIONS, "advise")
            own = {name: given.pop(name).read(_OWN[name]) for name in _OWN if name in given}
            link = link_of(own.get("link"))
            settings = settings_of(given)
            self.keep_logs(settings.log_level, settings.log_dir)
        path, _ = checked(job, settings, arranged=False)
        try:
            with job.together(), apart(), adapting():
                loaded = load_model(settings, path)
                plan = RunPlan(settings=settings, loaded=loaded, data=data_of(settings, loaded))
                self._trainer = plug_in(loaded.framework).prepare(plan)
                model = self._trainer.probed()
            folder = _FOLDER if settings.run is None else Path(settings.run)
            with job.together(patient=True):
                advice = advise_with(model, seconds=own.get("seconds", 60.0), link=link, folder=folder)
        finally:
            if self._trainer is not None:
                self._trainer.close()
        if job.speaks:
            print(advice)
            print(f"\nnnlo advise: {folder / 'advice.html'}")
        job.share("told")
        return 0

    @property
    def advice(self) -> str:
        """Nothing: the command can be run again."""
        return ""


def link_of(text: str | None) -> tuple[float, float] | None:
    """Return the link that was given, in seconds and bytes a second.

    Example:
        >>> link_of("2,12.5")
        (2e-06, 12500000000.0)
    """
    if text is None:
        return None
    try:
        microseconds, gigabytes = (float(one) for one in text.split(","))
        if 0 <= microseconds < 1e7 and 0 < gigabytes < 1e6:
            return microseconds / 1e6, gigabytes * 1e9
    except ValueError:
        pass
    raise ConfigurationError(
        f"--link {text} is not possible: give microseconds and GB/s, e.g. --link 2,12.5, as nnlo doctor tells"
    )
