"""Picture of learning curves with the settings of one process: itself, and 2, 4 and 8 workers of `Steady`.

`python pictures/curve.py` trains on the images that nnlo brings. The workers are simulated, and messages take
no time, so the picture is the same on every machine: it counts batches, and not seconds.
"""

from __future__ import annotations

import sys

import numpy as np
import plotly.graph_objects as go
import torch
from drawing import COLOURS, ROOT, save

sys.path.insert(0, str(ROOT / "benchmarks"))
from settings_kept import Run, Training, cluster_of
from settings_problems import BATCH, PROBLEMS, rows_of

WORKERS = (1, 2, 4, 8)
SEEDS = (1, 2, 3)
POINTS = 40  # measured of each training of one process
NAME, OPTIMIZER = "cnn", "adam"


class WatchedTraining(Training):
    """A training whose centre is measured every few batches of each worker.

    Attributes:
        curve: pairs of the batches that each worker has taken, and the accuracy in per cent.
    """

    def __init__(self, run: Run, epochs: int) -> None:
        problem = PROBLEMS[NAME]
        rows = rows_of(NAME, None, problem.samples)
        super().__init__(run, rows, epochs=epochs, rate=problem.rates[OPTIMIZER])
        self._every = self.whole // BATCH // POINTS
        self.curve: list[tuple[float, float]] = []

    @property
    def batches(self) -> float:
        """The batches that each worker has taken, on average."""
        return self.samples / BATCH / self.run.workers

    def watch(self, center: np.ndarray) -> None:
        """Measure the centre if it is time to."""
        if self.batches >= len(self.curve) * self._every:
            self.curve.append((self.batches, self.measure(center)))


def trained(workers: int, seed: int) -> list[tuple[float, float]]:
    """Return the curve of one training."""
    problem = PROBLEMS[NAME]
    rows = rows_of(NAME, None, problem.samples)
    # More epochs, as there are fewer images: as many steps as in the tables of docs/accuracy.md.
    training = WatchedTraining(
        Run(NAME, OPTIMIZER, "steady", workers, seed), round(problem.epochs * problem.samples / len(rows.x))
    )
    server = cluster_of(training.run, training)
    training.curve.append((training.batches, training.measure(server.rule.center)))
    print(f"{workers} workers, seed {seed}: {training.curve[-1]}", flush=True)
    return training.curve


def mean(curves: list[list[tuple[float, float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of curves, each of which ends a little earlier or later."""
    end = float(np.mean([curve[-1][0] for curve in curves]))
    places = np.linspace(0, 1, len(curves[0]))
    values = [
        np.interp(places, np.array(curve)[:, 0] / curve[-1][0], np.array(curve)[:, 1]) for curve in curves
    ]
    return places * end, np.mean(values, axis=0)


def main() -> None:
    torch.set_num_threads(1)
    figure = go.Figure()
    for place, workers in enumerate(WORKERS):
        x, y = mean([trained(workers, seed) for seed in SEEDS])
        name = "one process" if workers == 1 else f"{workers} workers"
        line = {"color": COLOURS[place]}
        figure.add_trace(go.Scatter(x=x, y=y, name=name, mode="lines", line=line))
        end = go.Scatter(x=x[-1:], y=y[-1:], mode="markers+text", text=[f"{y[-1]:.1f} %"], showlegend=False)
        figure.add_trace(end.update(textposition="top center", marker=line | {"size": 8}, textfont=line))
    figure.update_xaxes(title="batches that each worker has taken (simulated; messages take no time)")
    figure.update_yaxes(title="right answers on 500 test images, %", range=[60, 90])
    save(figure, "curve.svg", legend={"orientation": "h", "y": 1.15})


if __name__ == "__main__":
    main()
