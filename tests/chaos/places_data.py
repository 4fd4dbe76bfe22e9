"""Samples that a small network learns within a few epochs, for strikes on places."""

from __future__ import annotations

import numpy as np

__all__ = ["BATCH", "EPOCHS", "FEATURES", "PACE_S", "SAMPLES", "samples", "with_numbers"]

EPOCHS, SAMPLES, BATCH, FEATURES = 6, 1200, 10, 8
#: How long a worker sleeps in a step, so that a job lasts long enough to be struck.
PACE_S = 0.008


def samples(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features and the numbers of their classes; one label in twenty is wrong, of the first seed.

    Args:
        count: how many samples.
        seed: 0 for those to train on; another one for those to measure with, whose labels are right.
    """
    draw = np.random.default_rng([5, seed])
    x = draw.normal(size=(count, FEATURES)).astype(np.float32)
    y = (x @ np.linspace(-1, 1, FEATURES) + x[:, 0] * x[:, 1] > 0).astype(np.int64)
    if seed == 0:
        y ^= draw.random(count) < 0.05
    return x, y


def with_numbers(x: np.ndarray) -> np.ndarray:
    """Return features with the number of each sample as the last one."""
    return np.concatenate([x, np.arange(len(x), dtype=np.float32)[:, None]], axis=1)
