"""Report page of a search: one file that needs no network; its figures come with what draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from nnlo_common.commands._html_page import drawn, html_page, html_table
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._figure_of_merit import remark
from nnlo_common.commands.tune._search_facts import HELPERS, FinishedTrial, PageFacts, SearchFacts, best_of
from nnlo_common.commands.tune._search_folder import BEGAN, BLOCK

__all__ = ["Board", "TrialRow", "figures", "lasting", "page", "short"]

# -- table of a running search: finished and running trials, a line each --------------------------------

_WIDTH = 110


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A running trial.

    Attributes:
        number: its number.
        block: the number of its block; None: it has not begun.
        began_s: the start, in seconds since 1970.
        params: its parameters.
        epoch: the number of finished epochs.
        value: the last value; None before the first.
        helpers: the blocks that help.
    """

    number: int
    block: int | None
    began_s: float
    params: dict[str, Any]
    epoch: int
    value: float | None
    helpers: tuple[int, ...] = ()

    @classmethod
    def of(cls, trial: Any) -> TrialRow:
        """Return the state of a running trial of a study."""
        steps, user = trial.intermediate_values, trial.user_attrs
        last = max(steps, default=-1)
        began = user.get(BEGAN, 0.0)
        helpers = tuple(block for block, _ in user.get(HELPERS, ()))
        return cls(
            trial.number, user.get(BLOCK), began, dict(trial.params), last + 1, steps.get(last), helpers
        )


class Board:
    """Lines on the terminal about a search at one moment.

    Args:
        facts: of the search.
        trials: the finished ones.
        now_s: the time, in seconds since 1970.
    """

    def __init__(self, facts: SearchFacts, trials: Sequence[FinishedTrial], now_s: float) -> None:
        self._facts, self._trials, self._now_s = facts, trials, now_s
        self._asked = facts.request.search.num_iterations

    def line(self, one: FinishedTrial, best: FinishedTrial | None) -> str:
        """Return the line of a finished trial.

        Args:
            one: the trial.
            best: the best one so far.
        """
        came_to = one.fate if one.value is None else f"{self._facts.figure.name} {one.value:.4f}"
        star = " (best)" if best is not None and one.number == best.number else ""
        problem = f": {one.problem}" if one.fate == "failed" else ""
        seconds = lasting(one.ended_s - one.began_s)
        parts = [f"trial {one.number}", f"{came_to}{star}{problem}", f"{seconds}", _params(one.params)]
        return _cut(f"nnlo tune: {'  '.join(parts)}", 3 * _WIDTH)

    def rows(self, running: Sequence[TrialRow]) -> list[str]:
        """Return a line for each block, and one for the whole search."""
        by_block = {block: one for one in running for block in (*one.helpers, one.block) if block is not None}
        count = max(len(self._facts.layout.blocks), 1)
        rows = [self._row(block, by_block.get(block)) for block in range(count)]
        return [_cut(row, _WIDTH) for row in [*rows, self._whole()]]

    def left_s(self) -> float | None:
        """Estimate the remaining time from complete trials; None before the first."""
        lasted = [one.ended_s - one.began_s for one in self._trials if one.state == "complete"]
        if not lasted:
            return None
        blocks = max(len(self._facts.layout.blocks), 1)
        return max(self._asked - len(self._trials), 0) * sum(lasted) / len(lasted) / blocks

    def _row(self, block: int, one: TrialRow | None) -> str:
        if one is None:
            return f"  block {block:<3} idle"
        if one.block != block:
            return f"  block {block:<3} helps with trial {one.number}"
        epochs = self._facts.request.given.get("epochs")
        total = f"/{epochs.read(OPTIONS['epochs'])}" if epochs is not None else ""
        value = "" if one.value is None else f"  {self._facts.figure.name} {one.value:.4f}"
        lasts = lasting(self._now_s - one.began_s)
        epoch = f"epoch {one.epoch}{total}"
        return f"  block {block:<3} trial {one.number:<4} {lasts:>8}  {epoch}{value}  {_params(one.params)}"

    def _whole(self) -> str:
        best = best_of(self._facts.figure, self._trials)
        told = "" if best is None else f"  best {self._facts.figure.name} {best.value:.4f}"
        left = self.left_s()
        rest = "" if left is None else f"  about {lasting(left)} left"
        return f"  {len(self._trials)} of {self._asked} trials{told}{rest}"


def lasting(seconds: float) -> str:
    """Return a duration for people.

    Example:
        >>> lasting(3.14), lasting(75), lasting(7300)
        ('3.1 s', '1:15 min', '2:01 h')
    """
    if seconds < 60:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def short(value: Any) -> str:
    """Return a value as a short text.

    Example:
        >>> short(0.000123456), short(64), short(True)
        ('0.0001235', '64', 'True')
    """
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _params(params: dict[str, Any]) -> str:
    return "  ".join(f"{name} {short(value)}" for name, value in params.items())


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


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
