"""Problems of `settings_kept.py`: data, network, and the settings of one process, found by its --tune.

Each trains in 5 to 10 s on one core, near to its plateau.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import fashion_data
import toy_jets
from jet_networks import JEDINet

BATCH = 50


class Rows(NamedTuple):
    """Samples and labels to train on and to test with."""

    x: torch.Tensor
    y: torch.Tensor
    x_test: torch.Tensor
    y_test: torch.Tensor

    def validating(self):
        """Return the same without the test set: a fifth of the training samples takes its place."""
        first = len(self.x) * 4 // 5 // BATCH * BATCH
        return Rows(self.x[:first], self.y[:first], self.x[first:], self.y[first:])


class Problem(NamedTuple):
    """One problem.

    Attributes:
        rows: makes the data, from the folder of Fashion-MNIST or None, and a number of samples.
        network: makes the network.
        samples: to train on.
        epochs: of one process.
        rates: the learning rate of each optimizer, found by --tune.
    """

    rows: Callable[[str | None, int], Rows]
    network: Callable[[], nn.Module]
    samples: int
    epochs: int
    rates: dict[str, float]


def images(folder, samples):
    """Return the first images, each averaged over squares of four pixels."""
    data = fashion_data.load(folder)
    halved = [
        nn.functional.avg_pool2d(torch.from_numpy(one).reshape(-1, 1, 28, 28), 2)
        for one in (data.x_train[:samples], data.x_test)
    ]
    centre, width = halved[0].mean(), halved[0].std()
    x, x_test = ((one - centre) / width for one in halved)
    return Rows(x, torch.from_numpy(data.y_train[:samples]), x_test, torch.from_numpy(data.y_test))


def jets(_, samples):
    """Return toy jets of their ten hardest particles, features of mean 0 and width 1, padding 0."""
    (x, labels), (x_test, labels_test) = (toy_jets.make_jets(n, n, 10) for n in (samples, 5000))
    real = (x[..., 3] > 0)[..., None]
    centre = (x * real).sum((0, 1)) / real.sum()
    width = np.sqrt((((x - centre) * real) ** 2).sum((0, 1)) / real.sum()) + 1e-6
    scaled = [torch.from_numpy((one - centre) / width * (one[..., 3:4] > 0)).float() for one in (x, x_test)]
    y, y_test = (torch.from_numpy(one[:, -6:-1].argmax(axis=1)) for one in (labels, labels_test))
    return Rows(scaled[0], y, scaled[1], y_test)


SYMBOLS, LENGTH = 24, 12


def text(_, samples):
    """Return lines of symbols, each drawn by the two before it from a random table, and those that follow."""
    draw = np.random.default_rng(5)
    table = draw.dirichlet(np.full(SYMBOLS, 0.1), (SYMBOLS, SYMBOLS)).cumsum(axis=-1)
    lines = draw.integers(0, SYMBOLS, (samples + 2000, LENGTH + 1))
    for place in range(2, LENGTH + 1):
        below = table[lines[:, place - 2], lines[:, place - 1]] < draw.random((len(lines), 1))
        lines[:, place] = np.minimum(below.sum(axis=1), SYMBOLS - 1)
    found = torch.from_numpy(lines)
    x, y = found[:, :-1], found[:, 1:].clone()
    y[:, 0] = -100  # nothing can be known of the second symbol
    return Rows(x[:samples], y[:samples], x[samples:], y[samples:])


class Transformer(nn.Module):
    """Two layers of masked attention over a line of symbols; scores of the next one at each place."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.symbol, self.place = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(width, SYMBOLS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (lines, symbols, places)."""
        seen = self.symbol(x) + self.place.weight
        return self.scores(self.layers(seen, mask=self.mask, is_causal=True)).transpose(1, 2)


def convolutions(norm=lambda channels: nn.Identity()):
    """Return the network of accuracy_torch.py, for images of half its height and width."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 3 * 3, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def normalised():
    """Return it with BatchNorm that knows the batch only."""
    return convolutions(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False))


# The learning rates that --tune tries.
GRID = {"sgd": [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8], "adam": [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016]}
# Of the rates within half a point of the best the middle one, of two the lower.
PROBLEMS = {
    "cnn": Problem(images, convolutions, 20000, 4, {"sgd": 0.05, "adam": 0.004}),
    "batchnorm": Problem(images, normalised, 20000, 3, {"sgd": 0.05, "adam": 0.008}),
    "jets": Problem(jets, JEDINet, 12000, 6, {"sgd": 0.1, "adam": 0.004}),
    "text": Problem(text, Transformer, 20000, 4, {"sgd": 0.4, "adam": 0.008}),
}


@cache
def rows_of(name, folder, samples):
    """Return the data of a problem; made once."""
    return PROBLEMS[name].rows(folder, samples)


def given(chosen, name):
    """Return the data of a problem, and the number of epochs: more with fewer samples, for as many steps."""
    problem = PROBLEMS[name]
    rows = rows_of(name, chosen.data, chosen.samples or problem.samples)
    return rows, chosen.epochs or round(problem.epochs * problem.samples / len(rows.x))


def loss_of(scores, y):
    return nn.functional.cross_entropy(scores, y)


@torch.no_grad()
def accuracy(model, x, y):
    """Return the share of right answers, in per cent."""
    right = known = 0
    for some, labels in zip(x.split(500), y.split(500), strict=True):
        asked = labels >= 0
        right += int((model(some).argmax(dim=1) == labels)[asked].sum())
        known += int(asked.sum())
    return 100 * right / known
