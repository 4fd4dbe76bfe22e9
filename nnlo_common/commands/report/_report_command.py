"""The command, step by step: read the runs or the search, judge them, draw, write the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from nnlo_common.base._errors import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import usable, write_whole
from nnlo_common.commands._html_page import drawn, html_page, html_table
from nnlo_common.commands.report._run_figures import run_figures
from nnlo_common.commands.report._run_reader import PAGE, RankFacts, RunFacts, read_run
from nnlo_common.commands.report._search_reader import SearchFiles, find_search, read_search
from nnlo_common.commands.report._verdicts import verdicts
from nnlo_common.commands.train._job import REFUSED, tell
from nnlo_common.commands.tune._report_page import figures, lasting, page, short
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts, best_of
from nnlo_common.commands.tune._search_result import RESULT, importances
from nnlo_common.training.report._facts_writer import facts_files

__all__ = ["run_report", "runs_page"]

# -- page of a report: what to change first, then what came out, how, and with what --------------------

_UNDRAWN = "Figures need plotly: pip install 'nnlo[report]'"
_GOOD = "Nothing to change was found."
#: What a figure shows, where its axes do not say so.
_SHOWN = {
    "Time of each rank": "What each rank did, from its start to its end.",
    "Staleness": "How many commits came between a worker's fetch of the centre and its contribution.",
    "Gain": "How many workers' work the workers did: less than their number where their gradients agree.",
    "Gradients by layer": "How large the values of each layer's gradient were, when last looked at.",
    "Pace": "How fast each rank trained, epoch by epoch.",
    "Memory": "Of each rank's process, sampled while it trained.",
    "Processor": "How many cores each rank kept busy; 1 is a whole core.",
    "Files and sockets": "What each rank read and wrote, messages over sockets included.",
}


def runs_page(runs: Sequence[RunFacts], told: Sequence[Sequence[str]], drawings: Mapping[str, str]) -> str:
    """Return the page as HTML.

    Args:
        runs: one, or several to compare.
        told: the verdicts about each.
        drawings: figures as HTML, by title; empty: plotly is not installed, or there is nothing to draw.
    """
    parts = ["<h2>What to change</h2>", *_told(runs, told)]
    if len(runs) > 1:
        parts += ["<h2>Runs</h2>", _scroll(_compared(runs))]
    for title, drawing in drawings.items():
        shown = f"<p>{escape(_SHOWN[title])}</p>" if title in _SHOWN else ""
        parts += [f"<h2>{escape(title)}</h2>{shown}", _scroll(drawing)]
    if not drawings:
        parts.append(f"<p>{escape(_UNDRAWN)}</p>")
    for run in runs:
        parts += _of_run(run, heading=f"{run.name}: " if len(runs) > 1 else "")
    return html_page(_title(runs), parts)


def _title(runs: Sequence[RunFacts]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    (run,) = runs
    last = _last(run)
    return f"{run.name}: {last}" if last else run.name


def _told(runs: Sequence[RunFacts], told: Sequence[Sequence[str]]) -> list[str]:
    parts = []
    for run, sentences in zip(runs, told, strict=True):
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        items = "".join(f"<li>{escape(prefix + one)}</li>" for one in sentences)
        parts.append(f"<ul>{items}</ul>" if items else f"<p>{escape(prefix + _GOOD)}</p>")
    return parts


def _compared(runs: Sequence[RunFacts]) -> str:
    first = runs[0].samples_per_second
    base = runs[0].workers_count or 1
    rows = []
    for run in runs:
        pace = run.samples_per_second
        speed = pace / first if pace and first else None
        workers = run.workers_count
        rows.append(
            [
                run.name,
                str(workers),
                "" if run.seconds is None else lasting(run.seconds),
                "" if pace is None else f"{pace:,.0f}".replace(",", " "),
                "" if speed is None else f"{speed:.2f}",
                "" if speed is None or not workers else f"{speed * base / workers:.2f}",
                _last(run),
            ]
        )
    heads = ["run", "workers", "time", "samples/s", "speed-up", "efficiency", "at the end"]
    return html_table(heads, rows)


def _of_run(run: RunFacts, heading: str) -> list[str]:
    """Return the tables of one run."""
    cached = any(map(_cached_mb, run.ranks))
    rows = [
        [
            str(one.rank),
            f"{one.role}, before" if one.former else one.role,
            one.host,
            "" if one.cores is None else str(one.cores),
            str(one.samples or ""),
            str(one.exchanges or ""),
            f"{one.staleness:.2f}" if one.exchanges else "",
            str(one.dropped or ""),
            f"{one.epochs[-1].memory_mb:.0f}" if one.epochs else "",
            "" if one.peak_memory_mb is None else f"{one.peak_memory_mb:.0f}",
            *([f"{_cached_mb(one):.0f}"] if cached else []),
        ]
        for one in run.ranks
    ]
    heads = ["rank", "role", "host", "cores", "samples", "exchanges", "staleness", "dropped"]
    heads += ["memory (MB)", "its peak (MB)", *(["samples kept on its host (MB)"] if cached else [])]
    parts = [f"<h2>{escape(heading)}Ranks</h2>", _scroll(html_table(heads, rows))]
    if stalls := [f"<li>{escape(text)}</li>" for one in run.ranks for text in one.stalls]:
        parts.append(f"<h2>{escape(heading)}Silent for longer than usual</h2><ul>{''.join(stalls)}</ul>")
    facts = {"began": run.began, "command": run.command, "folder": str(run.folder.resolve())}
    facts["time"] = "it has not ended" if run.seconds is None else lasting(run.seconds)
    if run.center is not None and run.center.gain is not None:
        facts["gain"] = str(run.center.gain)
        if run.center.gain.held_bytes:
            facts["kept to go back"] = f"{run.center.gain.held_bytes / 1e6:.3g} MB, a copy of the centre"
    if run.center is not None and run.center.noise_scale is not None:
        unit, what = ("batches", "number of them") if run.center.noise_in_batches else ("samples", "batch")
        facts["noise scale"] = f"{run.center.noise_scale:.3g} {unit} at the end: the critical {what}"
    facts |= {**run.layout, **run.versions}
    told = [[name, value] for name, value in facts.items() if value]
    parts += [f"<h2>{escape(heading)}With what</h2>", html_table(["what", "value"], told, long=True)]
    if run.config:
        parts += [f"<h2>{escape(heading)}Options</h2>", f"<pre>{escape(run.config)}</pre>"]
    return parts


def _cached_mb(rank: RankFacts) -> float:
    """Return what the samples take that a rank keeps in memory, together with the others of its host."""
    found = rank.epochs[-1].reading.get("cached_mb", 0.0) if rank.epochs else 0.0
    return float(found)


def _last(run: RunFacts) -> str:
    """Return the metrics at the end, in one line."""
    ends = {name: values[-1] for name, values in run.history.items() if values}
    return ", ".join(f"{name} {'not finite' if one is None else f'{one:.4f}'}" for name, one in ends.items())


def _scroll(text: str) -> str:
    return f'<div class="scroll">{text}</div>'


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
