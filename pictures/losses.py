"""Picture of the test loss over epochs, of the same training by each algorithm.

`python pictures/losses.py` runs `examples/fashion_numpy.py` on one process, and with 1 server and 2 workers.
"""

from __future__ import annotations

import argparse
import re
from itertools import product

import plotly.graph_objects as go
from drawing import COLOURS, run, save
from plotly.subplots import make_subplots

ALGORITHMS = ("downpour", "synchronous", "easgd", "gem", "dynsgd", "localsgd")
OPTIONS = ("--epochs", "12")
LINE = re.compile(r"epoch (\d+)  test accuracy [\d.]+  test loss ([\d.]+)\s+([\d.]+) s")


def curve(ranks: int, algorithm: str) -> list[tuple[float, ...]]:
    printed = run(ranks, "examples/fashion_numpy.py", "--algorithm", algorithm, *OPTIONS)
    return [tuple(map(float, line)) for line in LINE.findall(printed)]


def main() -> None:
    """Draw over epochs; with --seconds also over time, which only an otherwise idle machine can show."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--seconds", action="store_true", help="draw over time, too")
    columns = 2 if options.parse_args().seconds else 1
    curves = {"one process, SGD": curve(1, "downpour")} | {name: curve(3, name) for name in ALGORITHMS}
    figure = make_subplots(1, columns, shared_yaxes=True, horizontal_spacing=0.05)
    for (name, points), column in product(curves.items(), range(columns)):
        line = {"color": COLOURS[list(curves).index(name)]}
        epochs, losses, seconds = zip(*points, strict=True)
        one = go.Scatter(x=(epochs, seconds)[column], y=losses, name=name, line=line, showlegend=column == 0)
        figure.add_trace(one, 1, column + 1)
    titles = ("epochs of 2000 images", "seconds since the start of the first epoch")
    for column in range(columns):
        figure.update_xaxes(title=titles[column], row=1, col=column + 1)
    figure.update_yaxes(title="cross-entropy on 500 test images", row=1, col=1)
    save(figure, "losses.svg", legend={"orientation": "h", "y": 1.15})


if __name__ == "__main__":
    main()
