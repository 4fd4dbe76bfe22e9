"""Page of an advice: what to do, then the numbers with plots."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from nnlo_common.commands._html_page import drawn, html_page, html_table
from nnlo_common.commands.report._run_figures import gradient_sizes
from nnlo_common.simulation._advice import Advice

__all__ = ["advice_page"]

_UNDRAWN = "Figures need plotly: pip install 'nnlo[report]'"
_SHOWN = {
    "Time against core-hours": "Each point is a number of workers, in the time and the core-hours of one "
    "process.",
    "Step against batch": "Samples a second on one rank, for each size of batch that was tried.",
    "Memory against batch": "The most memory of one process.",
    "Gradients by layer": "How large the values of each layer's gradient are; left of the line float16 has "
    "zero.",
}
# Of Okabe and Ito.
_BLUE = "#0072b2"


def advice_page(advice: Advice) -> str:
    """Return the page as HTML."""
    facts = advice.facts
    parts = [f"<p>{escape(f'{facts.framework} on {facts.device}, batches of {facts.batch}')}</p>"]
    figures = drawn(_figures(advice))
    for title, lines in advice.lines().items():
        items = "".join(f"<li>{escape(line)}</li>" for line in lines)
        parts.append(f"<h2>{escape(title)}</h2><ul>{items}</ul>")
    for title, drawing in figures.items():
        parts.append(f"<h2>{escape(title)}</h2><p>{escape(_SHOWN[title])}</p>")
        parts.append(f'<div class="scroll">{drawing}</div>')
    if not figures:
        parts.append(f"<p>{escape(_UNDRAWN)}</p>")
    rows = [
        [
            str(point.workers),
            str(point.layout.ranks.size),
            f"{1 / point.time:.2f}",
            f"{1 / point.high:.2f} to {1 / point.low:.2f}",
            f"{point.core_hours:.2f}",
            point.layout.call,
        ]
        for point in advice.curve
    ]
    heads = ["workers", "ranks", "times as fast", "range", "core-hours", "in a script"]
    parts += ["<h2>The curve</h2>", f'<div class="scroll">{html_table(heads, rows)}</div>']
    return html_page(f"Advice: {facts.parameters:,} parameters", parts)


def _figures(advice: Advice) -> dict[str, Any]:
    try:
        import plotly.graph_objects as go
    except ImportError:
        return {}
    facts = advice.facts
    found = {"Time against core-hours": _curve(go, advice)}
    sizes = [*facts.steps_s]
    paces = [size / float(np.median(facts.steps_s[size])) for size in sizes]
    found["Step against batch"] = _line(go, sizes, paces, "samples", "samples a second")
    peaks = [size / 2**20 for size in facts.peak_bytes.values()]
    if peaks:
        found["Memory against batch"] = _line(go, [*facts.peak_bytes], peaks, "samples", "MiB")
    if any(one.size for one in facts.histograms.values()):
        found["Gradients by layer"] = gradient_sizes(
            go, {name: one.counts for name, one in facts.histograms.items()}
        )
    return found


def _curve(go: Any, advice: Advice) -> Any:
    points = advice.curve
    figure = go.Figure(
        go.Scatter(
            x=[point.core_hours for point in points],
            y=[point.time for point in points],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [point.high - point.time for point in points],
                "arrayminus": [point.time - point.low for point in points],
            },
            text=[str(point.workers) for point in points],
            mode="lines+markers+text",
            textposition="top center",
            line={"color": _BLUE},
        )
    )
    figure.update_xaxes(title="core-hours, of one process", type="log")
    figure.update_yaxes(title="time, of one process", type="log")
    return figure


def _line(go: Any, x: list[int], y: list[float], of_x: str, of_y: str) -> Any:
    figure = go.Figure(go.Scatter(x=x, y=y, mode="lines+markers", line={"color": _BLUE}))
    figure.update_xaxes(title=of_x, type="log")
    figure.update_yaxes(title=of_y, rangemode="tozero")
    return figure
