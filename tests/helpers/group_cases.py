"""Trainings in groups, beside those of single ranks with batches as large as a group's together."""

from __future__ import annotations

from typing import Any

import numpy as np

from nnlo_common import Participant
from tests.helpers.numpy_cases import CASES, initial
from tests.helpers.threads import flat

__all__ = ["GROUPED", "IN_STEP", "SIZES", "batches_of", "close", "merged", "train_grouped"]

#: Cases whose numbers do not depend on which of several workers comes first.
IN_STEP = ("synchronous", "easgd_synchronous", "localsgd", "diloco")
#: Every algorithm and option of the other tests.
GROUPED = tuple(CASES)
#: Sums of float32 numbers in another order differ by some roundings, which later steps carry on.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}

# Numbers of samples in the batches of an epoch: unequal, so that weights matter, and neither 2 nor 3 divides
# the number of batches.
SIZES = [3, 5, 2, 4, 1, 3, 5, 2, 4, 3, 2, 1, 2]
SAMPLES = sum(SIZES)


def close(found: Any, expected: Any) -> bool:
    """Whether two vectors are equal up to rounding."""
    return bool(np.allclose(found, expected, **CLOSE))


def merged(sizes: list[int], k: int) -> list[int]:
    """The sizes of batches k times as large; the last one may be of fewer."""
    return [sum(sizes[start : start + k]) for start in range(0, len(sizes), k)]


def batches_of(sizes: list[int], epoch: int) -> list[np.ndarray]:
    """The samples of an epoch, in batches of these sizes, one after another."""
    order = np.random.default_rng([7, epoch]).permutation(SAMPLES)[: sum(sizes)]
    return np.split(order, np.cumsum(sizes)[:-1])


def gradient_of(x: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The mean gradient over samples: each pulls the parameters to a place of its own."""
    places = [np.random.default_rng(int(sample)).standard_normal(x.size) for sample in samples]
    curvature = np.linspace(0.2, 1.0, x.size)
    return (curvature * (x.astype(np.float64) - np.mean(places, axis=0))).astype(np.float32)


def train_grouped(
    name: str, sizes: list[int], *, world: Any = None, epochs: int = 2, **options: Any
) -> tuple[np.ndarray, list[int], int]:
    """Train a case; the final parameters, the samples that this rank has had, and its steps."""
    case = CASES[name]
    optimizer = case.optimizer and case.optimizer()
    seen = []
    with Participant(case.algorithm, initial(), optimizer=optimizer, world=world, **options) as me:
        for epoch in range(epochs):
            for samples in me.batches(batches_of(sizes, epoch)):
                value, start = gradient_of(flat(me.point), samples), 0
                for part in me.gradients:
                    part.flat[:] = value[start : start + part.size]
                    start += part.size
                me.step(len(samples))
                seen += samples.tolist()
    return flat(me.parameters), seen, me.report().steps
