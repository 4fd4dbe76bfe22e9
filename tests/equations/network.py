"""A network of 26 parameters, its data, and its gradient written by hand in NumPy.

The parameters are one vector: a kernel of 3 x 4 and 4 biases, tanh, a kernel of 4 x 2 and 2 biases; the loss
is the mean over a batch of the cross entropy of a softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["BATCH", "SHAPES", "SIZE", "Batch", "cut", "data_of", "gradient", "initial", "loss"]

Array = NDArray[np.float64]

SHAPES = ((3, 4), (4,), (4, 2), (2,))
SIZE = 26
BATCH = 4


@dataclass(frozen=True)
class Batch:
    """Samples: inputs in rows, and the class of each."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.y)


def initial() -> NDArray[np.float32]:
    """The parameters that every training begins with."""
    return (0.5 * np.random.default_rng(7).standard_normal(SIZE)).astype(np.float32)


def data_of(worker: int, batches: int, *, learnable: bool = False) -> list[Batch]:
    """The batches of a worker's epoch, the last of which is smaller; every worker has others.

    `learnable`: most classes follow from the inputs, so that the gradients of several workers agree in part.
    """
    draw = np.random.default_rng(100 + worker)
    sizes = [BATCH] * (batches - 1) + [BATCH - 1 - 2 * (worker % 2)]
    found = [
        Batch(draw.standard_normal((size, 3)).astype(np.float32), draw.integers(0, 2, size)) for size in sizes
    ]
    if not learnable:
        return found
    rules = [(one.x @ np.float32([1, -0.5, 0.2]) > 0.2).astype(np.int64) for one in found]
    return [
        Batch(one.x, np.where(draw.random(len(one)) < 0.9, rule, one.y))
        for one, rule in zip(found, rules, strict=True)
    ]


def cut(vector: Array) -> list[Array]:
    """The parameters in their shapes, as views of a vector of all."""
    pieces, start = [], 0
    for shape in SHAPES:
        size = int(np.prod(shape))
        pieces.append(vector[start : start + size].reshape(shape))
        start += size
    return pieces


def _forward(parameters: Array, batch: Batch) -> tuple[Array, Array]:
    first, bias, second, offset = cut(parameters)
    hidden = np.tanh(batch.x @ first + bias)
    scores = hidden @ second + offset
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def loss(parameters: Array, batch: Batch) -> float:
    """The mean cross entropy over a batch."""
    _, likely = _forward(parameters, batch)
    return float(-np.log(likely[np.arange(len(batch)), batch.y]).mean())


def gradient(parameters: Array, batch: Batch) -> Array:
    """The gradient of `loss` by the chain rule."""
    hidden, likely = _forward(parameters, batch)
    wrong = likely.copy()
    wrong[np.arange(len(batch)), batch.y] -= 1
    wrong /= len(batch)
    back = (wrong @ cut(parameters)[2].T) * (1 - hidden**2)
    pieces = [batch.x.T @ back, back.sum(axis=0), hidden.T @ wrong, wrong.sum(axis=0)]
    return np.concatenate([piece.ravel() for piece in pieces])
