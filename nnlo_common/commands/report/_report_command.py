"""The command, step by step: read the runs or the search, judge them, draw, write the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._whole_files import usable, write_whole
from nnlo_common.commands._html_page import drawn
from nnlo_common.commands.report._run_figures import run_figures
from nnlo_common.commands.report._run_reader import PAGE, read_run
from nnlo_common.commands.report._runs_page import runs_page
from nnlo_common.commands.report._search_reader import SearchFiles, find_search, read_search
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.commands.train._job import REFUSED, tell
from nnlo_common.commands.tune._report_figures import figures
from nnlo_common.commands.tune._report_page import page
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts, best_of
from nnlo_common.commands.tune._search_result import RESULT, importances
from nnlo_common.commands.tune._trial_table import short
from nnlo_common.training.report._facts_file import facts_files

__all__ = ["run_report"]


def run_report(runs: Sequence[str], output: str | None = None) -> int:
    """Write the page of one or several runs, or of a search; return the exit status.

    Args:
        runs: their folders; of a search the folder or the journal.
        output: the file to write; None: report.html in the folder of a single run, else in this one.
    """
    try:
        path, lines = _of_search(runs, output) or _of_runs(runs, output)
    except (ConfigurationError, MissingExtraError) as error:
        tell(str(error), "report")
        return REFUSED
    for line in lines:
        print(line)
    print(f"nnlo report: {path}")
    return 0


def _of_runs(runs: Sequence[str], output: str | None) -> tuple[Path, list[str]]:
    """Write the page of runs; return its path, and lines for the terminal."""
    found = [read_run(Path(folder)) for folder in runs]
    told = [verdicts(run) for run in found]
    path = Path(output) if output is not None else _default(found[0].folder, alone=len(found) == 1)
    write_whole(usable(str(path), path), runs_page(found, told, drawn(run_figures(found))))
    return path, [
        f"{run.name}: {one}" for run, sentences in zip(found, told, strict=True) for one in sentences
    ]


def _of_search(runs: Sequence[str], output: str | None) -> tuple[Path, list[str]] | None:
    """Write the page of a search, and return the same; None: these are runs."""
    searches = [_search_at(Path(one)) for one in runs]
    if searches == [None] * len(runs):
        return None
    source = searches[0]
    if source is None or len(runs) > 1:
        told = next(one for one, search in zip(runs, searches, strict=True) if search is not None)
        raise ConfigurationError(
            f"{told} is a search, and a page shows one search or several runs; name it alone"
        )
    given, found = Path(runs[0]), read_search(source)
    path = given / PAGE if given.is_dir() else given.with_suffix(".html")
    facts, home = found.facts, found.facts.home
    if output is not None:
        path, home = Path(output), None  # its links would lead nowhere
    elif home is not None and given.is_dir() and source.parent == given and source.is_dir():
        home = f"{source.name}/{home}"
    write_whole(usable(str(path), path), _search_page(replace(found, facts=replace(facts, home=home))))
    return path, [_best_line(facts, found.trials)]


def _search_page(found: SearchFiles) -> str:
    facts, trials = found.facts, found.trials
    weights, hint = importances(found.study, [one for one in trials if one.value is not None])
    drawings = figures(found.study, trials, facts.metric, weights, blocks=facts.blocks is not None)
    return page(facts, trials, best_of(facts, trials), drawings, hint)


def _search_at(path: Path) -> Path | None:
    """Return the file or the directory of a search without a page of its own; None: there is none."""
    if path.is_dir() and (any(True for _ in facts_files(path)) or (path / RESULT).is_file()):
        return None
    return find_search(path)


def _best_line(facts: PageFacts, trials: Sequence[FinishedTrial]) -> str:
    best = best_of(facts, trials)
    if best is None:
        return f"{facts.place}: none of {len(trials)} trials is complete"
    params = "  ".join(f"{name} {short(value)}" for name, value in best.params.items())
    return f"best of {len(trials)} trials is {best.number}, {facts.metric} {best.value:.4g}: {params}"


def _default(folder: Path, *, alone: bool) -> Path:
    return folder / PAGE if alone else Path(PAGE)
