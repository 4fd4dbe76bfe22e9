"""Report page of a search: one file that needs no network; its figures come with what draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from nnlo_common.commands._html_page import drawn, html_page, html_table
from nnlo_common.commands.tune._figure_of_merit import remark
from nnlo_common.commands.tune._search_facts import FinishedTrial, PageFacts
from nnlo_common.commands.tune._trial_table import lasting, short

__all__ = ["figures", "page"]

# -- figures of a search for its report: Optuna's own, and one of the blocks; plotly draws them --------

_COLOURS = {"complete": "#3567b0", "pruned": "#b8860b", "failed": "#9aa3b2"}


def figures(
    study: Any,
    trials: Sequence[FinishedTrial],
    name: str,
    weights: Mapping[str, float],
    *,
    blocks: bool = True,
) -> dict[str, str]:
    """Return figures as HTML, by title; the first contains plotly itself, so that no network is needed.

    Args:
        study: with all trials.
        trials: the finished ones.
        name: of the figure of merit.
        weights: the importance of each parameter.
        blocks: whether it is known which block trained what.

    Returns:
        No figures if plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
    except ImportError:
        return {}
    from optuna import visualization

    found: dict[str, Any] = {}
    good = [one for one in trials if one.value is not None]
    if good:
        found["History"] = visualization.plot_optimization_history(study, target_name=name)
        if weights:
            titles = {"xaxis_title": "importance, all together 1", "yaxis_title": "parameter"}
            found["Importance"] = go.Figure(
                go.Bar(x=[*weights.values()], y=[*weights], orientation="h"), titles
            )
        if any(one.params for one in good):
            found["Slices"] = visualization.plot_slice(study, target_name=name)
            lines = visualization.plot_parallel_coordinate(study, target_name=name)
            found["Parallel coordinates"] = lines.update_layout(xaxis_title="each trial is a line")
        if any(one.steps for one in trials):
            found["Epochs"] = visualization.plot_intermediate_values(study)
    if blocks:
        found["Blocks"] = go.Figure(_shifts(trials), {"barmode": "overlay", "xaxis_title": "seconds"})
    return drawn(found)


def _shifts(trials: Sequence[FinishedTrial]) -> list[dict[str, Any]]:
    """Return bars that show which block trained which trial when, a series for each state."""
    began_s = min((one.began_s for one in trials), default=0.0)
    series = []
    for state, colour in _COLOURS.items():
        shifts = [(one, *shift) for one in trials if one.state == state for shift in one.shifts]
        bars = {
            "y": [f"block {block}" for _, block, _, _ in shifts],
            "base": [since_s - began_s for _, _, since_s, _ in shifts],
            "x": [until_s - since_s for _, _, since_s, until_s in shifts],
            "hovertext": [_tooltip(one, until_s - since_s) for one, _, since_s, until_s in shifts],
        }
        marker = {"color": colour, "line": {"color": "white", "width": 1}}
        series.append({"type": "bar", "orientation": "h", "name": state, "marker": marker, **bars})
    return series


def _tooltip(one: FinishedTrial, seconds: float) -> str:
    value = one.fate if one.value is None else f"{one.value:.5g}"
    params = ", ".join(f"{name} {short(value)}" for name, value in one.params.items())
    return f"trial {one.number}: {value}; {params}; {lasting(seconds)}"


_TOLD = {
    "History": "the value of each trial, and the best so far",
    "Slices": "the value over each parameter",
    "Parallel coordinates": "a thread for each trial",
    "Epochs": "the value after each epoch",
}
_UNDRAWN = "Figures need plotly: pip install 'nnlo[tune]'"


def page(
    facts: PageFacts,
    trials: Sequence[FinishedTrial],
    best: FinishedTrial | None,
    drawings: Mapping[str, str],
    hint: str,
) -> str:
    """Return the page as HTML.

    Args:
        facts: of the search.
        trials: the finished ones.
        best: the best; None: none is complete.
        drawings: figures as HTML, by title; empty: plotly is not installed.
        hint: a remark about the importances.
    """
    parts = [f"<p>{escape(_summary(facts, trials))}</p>"]
    told = {title: text for title, text in _TOLD.items() if title in drawings}
    if best is not None:
        good = [one for one in trials if one.value is not None]
        parts += [f'<p class="big">{escape(_compared(facts, best, good))}</p>']
        if noise := remark([one.folds for one in good], len(good), facts.more_folds):
            parts += [f"<p>{escape(noise)}</p>"]
        parts += [html_table(["parameter", "value"], [[name, short(v)] for name, v in best.params.items()])]
        told["Importance"] = hint
    if facts.blocks is not None:
        told["Blocks"] = _busy(facts.blocks, trials)
    for title, text in told.items():
        parts += [f"<h2>{title}</h2>", f"<p>{escape(text)}</p>"]
        parts.append(f'<div class="scroll">{drawings.get(title, "")}</div>')
    if not drawings:
        parts.append(f"<p>{_UNDRAWN}</p>")
    parts += [*_failures(trials), "<h2>Trials</h2>", '<div class="scroll">', _table(facts, trials), "</div>"]
    return html_page(_heading(facts, best), parts)


def _heading(facts: PageFacts, best: FinishedTrial | None) -> str:
    if best is None or best.value is None:
        return "A search without a result"
    return f"{facts.metric} {best.value:.4g} in trial {best.number}"


def _summary(facts: PageFacts, trials: Sequence[FinishedTrial]) -> str:
    fates = Counter(one.fate for one in trials)
    fates["not finished"] = facts.unfinished
    known = ("complete", "pruned", "failed", "broken off", "not finished")
    counts = ", ".join(f"{fates[fate]} {fate}" for fate in known if fates[fate])
    split = f", {facts.folds} folds each" if facts.folds > 1 else ""
    told = f"{facts.direction} {facts.metric}: {counts or 'no trials'}{split}"
    if _timed(trials):
        began = min(one.began_s for one in trials)
        told += f", in {lasting(max(one.ended_s for one in trials) - began)}"
    return f"{told}; {facts.place}"


def _timed(trials: Sequence[FinishedTrial]) -> bool:
    """Return whether it is known when trials began and ended."""
    return any(one.ended_s for one in trials)


def _compared(facts: PageFacts, best: FinishedTrial, good: Sequence[FinishedTrial]) -> str:
    """Return the best value with its spread, and the value of the defaults."""
    told = f"{best.value:.4g}"
    if len(best.folds) > 1:
        told += f" ± {np.std(best.folds):.2g} over {len(best.folds)} folds"
    first = next((one for one in good if one.params == facts.default), None)
    if facts.default is None or first is None:
        return told
    return f"{told}; the defaults gave {first.value:.4g}, in trial {first.number}"


def _failures(trials: Sequence[FinishedTrial]) -> list[str]:
    """Return the reasons of failed trials, each once."""
    reasons: dict[str, list[str]] = {}
    for one in trials:
        if one.fate == "failed":
            reasons.setdefault(one.problem, []).append(str(one.number))
    if not reasons:
        return []
    rows = [(", ".join(numbers), problem[:600]) for problem, numbers in reasons.items()]
    return ["<h2>Failures</h2>", html_table(["trials", "what happened"], rows, long=True)]


def _busy(blocks: int, trials: Sequence[FinishedTrial]) -> str:
    """Return the share of the time in which the blocks trained."""
    if not trials:
        return "no trial was trained"
    span = max(one.ended_s for one in trials) - min(one.began_s for one in trials)
    busy_s = sum(end - start for one in trials for _, start, end in one.shifts)
    share = busy_s / (span * blocks) if span else 1.0
    return (
        f"from the first trial to the last, blocks trained {100 * min(share, 1.0):.0f} % of the time; "
        "a search that was interrupted and resumed has gaps"
    )


def _table(facts: PageFacts, trials: Sequence[FinishedTrial]) -> str:
    """Return a row for each trial; a column about which nothing is known is left out."""
    columns = [
        ("trial", [str(one.number) for one in trials]),
        (facts.metric, [one.fate if one.value is None else f"{one.value:.5g}" for one in trials]),
    ]
    if any(one.folds for one in trials):
        columns.append(("folds", [" ".join(f"{value:.4g}" for value in one.folds) for one in trials]))
    columns += [(name, [short(one.params.get(name, "")) for one in trials]) for name in facts.parameters]
    if facts.blocks is not None:
        columns.append(("block", [str(one.block) for one in trials]))
    if _timed(trials):
        columns.append(("time", [lasting(one.ended_s - one.began_s) for one in trials]))
    columns.append((facts.named, [one.folder for one in trials]))
    heads, cells = zip(*columns, strict=True)
    home = facts.home
    links = [] if home is None else [f"{home}{one.folder}/" if one.folder else "" for one in trials]
    return html_table(heads, zip(*cells, strict=True), links=links)
