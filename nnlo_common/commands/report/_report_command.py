"""The command, step by step: read the runs, judge them, draw, write the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._whole_files import usable, write_whole
from nnlo_common.commands._html_page import drawn
from nnlo_common.commands.report._run_figures import run_figures
from nnlo_common.commands.report._run_reader import PAGE, read_run
from nnlo_common.commands.report._runs_page import runs_page
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.commands.train._job import REFUSED, tell

__all__ = ["run_report"]


def run_report(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page of one or several runs; return the exit status.

    Args:
        runs: their folders.
        output: the file to write; None: report.html in the folder of a single run, else in this one.
    """
    try:
        found = [read_run(Path(folder)) for folder in runs]
        told = [verdicts(run) for run in found]
        path = Path(output) if output is not None else _default(found[0].folder, alone=len(found) == 1)
        write_whole(usable(str(path), path), runs_page(found, told, drawn(run_figures(found))))
    except ConfigurationError as error:
        tell(str(error), "report")
        return REFUSED
    for run, sentences in zip(found, told, strict=True):
        for sentence in sentences:
            print(f"{run.name}: {sentence}")
    print(f"nnlo report: {path}")
    return 0


def _default(folder: Path, *, alone: bool) -> Path:
    return folder / PAGE if alone else Path(PAGE)
