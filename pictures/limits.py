"""Picture of stability limits: found in the virtual cluster, beside the formulas.

`python pictures/limits.py`; it gives the same picture on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
from drawing import COLOURS, save
from plotly.subplots import make_subplots

from nnlo_common import EASGD, SGD, Downpour
from nnlo_common.testing import train_virtually


def border(grows: Callable[[float], bool], high: float) -> float:
    """Halve the interval from 0 to `high` ten times."""
    low = 0.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (low, middle) if grows(middle) else (middle, high)
    return low


def stale_grows(workers: int, rate: float) -> bool:
    """Whether Downpour on a parabola of curvature 1 leaves it; each gradient is workers - 1 commits late."""
    run = train_virtually(
        Downpour(), lambda x, rank: x, [1.0], workers=workers, steps=100, optimizer=SGD(rate), check=False
    )
    return not abs(run.center[0]) <= 1  # also if it is NaN


def elastic_grows(rate: float, alpha: float) -> bool:
    """Whether one worker of EASGD, in the paper's order, leaves the parabola."""
    run = train_virtually(
        EASGD(every=1, alpha=alpha, order="paper"),
        lambda x, rank: x,
        [1.0],
        workers=1,
        steps=400,
        local=SGD(rate),
        begin=[[0.5]],
        check=False,
    )
    return not abs(run.center[0]) + abs(run.parameters[0][0]) <= 1


@np.errstate(all="ignore")  # what diverges overflows
def main() -> None:
    figure = make_subplots(1, 2, subplot_titles=("Downpour with SGD", "EASGD, the paper's order, one worker"))
    workers = [1, 2, 3, 5, 8, 12, 20]
    found = [border(lambda rate, p=p: stale_grows(p, rate), 2.2) for p in workers]
    formula = [2 * np.sin(np.pi / (4 * (p - 1) + 2)) for p in workers]
    rates = [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 1.95]
    elastic = [border(lambda alpha, e=e: elastic_grows(e, alpha), 0.99) for e in rates]
    curves = [
        (workers, found, formula, "2 sin(π / (4 p - 2))"),
        (rates, elastic, [(4 - 2 * e) / (4 - e) for e in rates], "(4 - 2 e) / (4 - e)"),
    ]
    for column, (x, measured, law, name) in enumerate(curves, 1):
        line = {"color": COLOURS[1]}
        figure.add_trace(go.Scatter(x=x, y=law, name=name, mode="lines", line=line), 1, column)
        dots = go.Scatter(
            x=x, y=measured, name="found", mode="markers", marker={"color": COLOURS[4], "size": 8}
        )
        figure.add_trace(dots.update(showlegend=column == 1), 1, column)
    figure.update_xaxes(title="p, number of workers", row=1, col=1)
    figure.update_xaxes(title="e, learning rate times curvature", row=1, col=2)
    figure.update_yaxes(
        title="largest stable learning rate times curvature", type="log", dtick="D2", row=1, col=1
    )
    figure.update_yaxes(title="largest stable alpha", row=1, col=2)
    save(figure, "limits.svg", legend={"orientation": "h", "y": -0.2})


if __name__ == "__main__":
    main()
