"""Picture of the test loss over epochs and over time, of the same training by each algorithm.

`python pictures/losses.py` runs `examples/fashion_numpy.py` on one process, and with 1 server and 2 workers.
"""

from __future__ import annotations

import re
from itertools import product

import plotly.graph_objects as go
from drawing import COLOURS, run, save
from plotly.subplots import make_subplots

ALGORITHMS = ("downpour", "synchronous", "easgd", "gem", "dynsgd", "localsgd")
OPTIONS = ("--hidden", "512", "--epochs", "10")
LINE = re.compile(r"epoch (\d+)  test accuracy [\d.]+  test loss ([\d.]+)\s+([\d.]+) s")


def curve(ranks: int, algorithm: str) -> list[tuple[float, ...]]:
    printed = run(ranks, "examples/fashion_numpy.py", "--algorithm", algorithm, *OPTIONS)
    return [tuple(map(float, line)) for line in LINE.findall(printed)]


def main() -> None:
    curves = {"one process, SGD": curve(1, "downpour")} | {name: curve(3, name) for name in ALGORITHMS}
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.05)
    for (name, points), column in product(curves.items(), (1, 2)):
        epochs, losses, seconds = zip(*points, strict=True)
        colour = COLOURS[list(curves).index(name)]
        line = go.Scatter(x=(epochs, seconds)[column - 1], y=losses, name=name, line={"color": colour})
        figure.add_trace(line.update(showlegend=column == 1), 1, column)
    figure.update_xaxes(title="epochs of 2000 images", row=1, col=1)
    figure.update_xaxes(title="seconds since the start of the first epoch", row=1, col=2)
    figure.update_yaxes(title="cross-entropy on 500 test images", row=1, col=1)
    save(figure, "losses.svg", legend={"orientation": "h", "y": 1.15})


if __name__ == "__main__":
    main()
