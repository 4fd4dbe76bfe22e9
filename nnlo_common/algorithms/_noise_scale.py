"""Gradient noise scale: the batch size above which larger batches waste samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import Stateful

__all__ = ["NoiseScale"]


class NoiseScale(Stateful):
    r"""Estimates the simple noise scale tr(S) / |G|^2 (McCandlish et al. 2018, arXiv:1812.06162, app. A.1).

    From gradients of small batches b and their mean, a gradient of the large batch B = p b, all taken at
    the same parameters, both

        |G|^2 = (B |mean|^2 - b mean |g|^2) / (B - b)   and   tr(S) = (mean |g|^2 - |mean|^2) / (1/b - 1/B)

    are unbiased. Each is averaged over time separately, and the ratio is taken last. (The mean of ratios
    is a different number.) The estimate of |G|^2 can be negative while it is mostly noise.

    Both are sums over coordinates, so those of the shards of a centre add up.

    Attributes:
        signal: running average of the estimates of |G|^2.
        noise: running average of the estimates of tr(S).
        count: estimates so far.

    Args:
        decay: of the running averages; 1 takes the plain mean of all estimates.

    Example:
        >>> scale = NoiseScale(decay=1)
        >>> scale.observe(2.0, 1.0, batch=4, workers=2)
        >>> scale.signal, scale.noise, scale.value
        (0.0, 8.0, inf)
    """

    saved = ("signal", "noise", "count")

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = decay
        self.signal = self.noise = 0.0
        self.count = 0

    def observe(self, small: float, large: float, *, batch: float, workers: int) -> None:
        """Add one estimate.

        Args:
            small: mean of |g|^2 over the workers.
            large: |mean g|^2.
            batch: b, samples of one worker; `value` is in the same unit.
            workers: p, at least 2.
        """
        total = batch * workers
        signal = (total * large - batch * small) / (total - batch)
        noise = (small - large) / (1 / batch - 1 / total)
        self.count += 1
        # The plain mean at first, so that the initial 0 has no weight.
        keep = min(self.decay, 1 - 1 / self.count)
        self.signal = keep * self.signal + (1 - keep) * signal
        self.noise = keep * self.noise + (1 - keep) * noise

    @property
    def value(self) -> float:
        """The noise scale in samples: batches much larger than this waste samples; nan before the first."""
        if not self.count:
            return float("nan")
        return self.noise / self.signal if self.signal > 0 else float("inf")


def mean_square(vectors: Sequence[Vector]) -> float:
    """Return the mean of |v|^2."""
    return sum(float(np.dot(vector, vector)) for vector in vectors) / len(vectors)
