"""Figures of a search for its report: Optuna's own, and one of the blocks; plotly draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnlo_common.commands._html_page import drawn
from nnlo_common.commands.tune._search_facts import FinishedTrial
from nnlo_common.commands.tune._trial_table import lasting, short

__all__ = ["figures"]

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
