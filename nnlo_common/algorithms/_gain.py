"""Gain: how much more progress a step may make because several workers contribute.

Johnson et al. 2020 (AdaScale SGD, arXiv:2007.05105) scale the step of a mean over W gradients by

    gain = (noise + signal) / (noise / W + signal)          between 1 and W

with signal = |E g|^2 and noise = E |g|^2 - |E g|^2. Where gradients agree, W workers are worth one, and
where noise rules each counts in full. Here contributions arrive one by one, so the signal is the mean
product of *neighbouring* contributions: different workers' gradients at nearly the same point. A worker's
own last gradient would not do: where the centre swings, successive gradients of one worker point against
each other, the signal reads zero, and the swing grows; neighbours point the same way then, and the scale
falls.

A sample of the coordinates is enough, so that the products cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import Stateful

__all__ = ["Gain", "MeanGain", "MemberNorms", "products", "sampled_places", "worth_having"]

# One coordinate of so many is sampled, but at least and at most so many. With W workers n of them give a gain
# that is off by about sqrt(W / 4 n): with 64 workers by 6 to 3 %.
_EVERY, _LEAST, _MOST = 100, 4096, 1 << 14
# Contributions in the running means: this many, or four of each worker.
_REMEMBERED = 100
# The brake works once the means have seen so many pairs.
_SETTLED = 10
# With more than this share of contributions shortened, and fully with twice as many, the training is at the
# edge of stability, where a short memory of the momentum is the less stable one.
_UNEASY = 0.08
# A signal below this part of the square is rounding.
_TINY = 1e-12


def sampled_places(size: int) -> npt.NDArray[np.int64]:
    """Return the sampled coordinates of a vector: one at random in each stretch of equal length.

    A fixed stride could always meet the same column of a matrix. The places depend on the size only.

    Example:
        >>> sampled_places(3), sampled_places(1_000_000).size
        (array([0, 1, 2]), 10000)
    """
    count = min(size, max(_LEAST, min(size // _EVERY, _MOST)))
    starts = np.arange(count + 1) * size // max(count, 1)
    draws = np.random.default_rng(0).random(count)
    places: npt.NDArray[np.int64] = starts[:-1] + (draws * np.diff(starts)).astype(np.int64)
    return places


def products(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
    """Return the sum of the products of two vectors, in float64.

    `@` would give it to BLAS: its bits depend on the number of threads there, and these keep cores busy for
    a while after each call.

    Example:
        >>> products(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
        11.0
    """
    return float(np.einsum("i,i", one, other, dtype=np.float64))


def worth_having(noise: float, signal: float) -> float:
    """Return the number of workers at which each still does half of the work that it does alone.

    With W workers the gain is (noise + signal) / (noise / W + signal); gain / W is 1/2 at 2 + noise / signal.

    Example:
        >>> worth_having(noise=18.0, signal=1.0)
        20.0
    """
    return 2 + noise / signal if signal > 0 else math.inf


class Gain(Stateful):
    """Running estimate of signal and noise, from one contribution after the other.

    Attributes:
        pairs: the number of pairs of neighbouring contributions so far.
        dot: the running mean of their products: the signal.
        square: the running mean of their squares: signal and noise.
        braked: the running share of contributions that were shortened.
        before: the sampled coordinates of the last contribution.

    Args:
        size: the number of sampled coordinates.
        brake: shorten contributions longer than so many times the running root mean square; 0: none.

    Example:
        >>> gain = Gain(2, brake=0)
        >>> for one in ([3.0, 1.0], [3.0, -1.0], [3.0, 1.0]):
        ...     shortened, scale = gain.see(np.array(one, np.float32), None, workers=4, batches=1)
        >>> gain.signal, gain.noise  # products 8 and 8, squares 10
        (8.0, 2.0)
        >>> round(4 * scale, 3)  # 10 / (2 / 4 + 8)
        1.176
    """

    saved = ("pairs", "seen", "dot", "square", "braked", "before")

    def __init__(self, size: int, *, brake: float) -> None:
        self.brake = brake
        self.pairs = self.seen = 0
        self.dot = self.square = self.braked = 0.0
        self.before: Vector = np.zeros(size, np.float32)

    @property
    def signal(self) -> float:
        """The squared length of the mean gradient."""
        return max(self.dot, _TINY * self.square)

    @property
    def noise(self) -> float:
        """The variance of a contribution."""
        return max(self.square - self.signal, 0.0)

    @property
    def unease(self) -> float:
        """How near the training is to the edge of stability, from 0 to 1."""
        return min(1.0, max(0.0, self.braked / _UNEASY - 1))

    def see(
        self, sample: Vector, metric: Vector | None, *, workers: int, batches: float
    ) -> tuple[float, float]:
        """Take in a contribution; return by how much it is shortened, and the scale of its step.

        A scale of 1 is a step of one process with one batch; gain / workers, at least 1 / workers.

        Args:
            sample: the sampled coordinates of the gradient.
            metric: a factor for each of them in products; None: 1.
            workers: the number of workers that contribute.
            batches: the number of batches whose mean the gradient is.
        """
        weighted = sample if metric is None else sample * metric
        square, shorter = products(weighted, sample), 1.0
        if self.brake and workers > 1 and self.pairs >= _SETTLED and square > 0:
            shorter = min(1.0, self.brake * math.sqrt(self.square / square))
        self.braked += 0.01 * ((shorter < 1) - self.braked)
        product = shorter * products(weighted, self.before)
        square *= shorter**2
        np.multiply(sample, shorter, out=self.before)
        self.seen += 1
        if self.seen == 1:
            return shorter, 1 / workers
        self.pairs += 1
        remembered = max(_REMEMBERED, 4 * workers)
        share = 1 / min(self.pairs, remembered)
        self.dot += share * (product - self.dot)
        self.square += share * (square - self.square)
        return shorter, self.scale(workers, batches)

    def scale(self, workers: int, batches: float) -> float:
        """Return gain / workers, for contributions that are means over `batches`."""
        signal, noise = self.signal, self.noise
        if not signal:  # nothing but zeros so far
            return 1 / workers
        scale = (batches * noise + signal) / (noise / workers + signal) / workers
        return min(batches, max(1 / workers, scale))


class MeanGain(Stateful):
    """Running estimate of signal and noise where workers step together, from norms: theirs and the mean's.

    Attributes:
        steps: the number of steps so far.
        signal: the running mean of |E g|^2.
        noise: the running mean of the variance of one gradient.

    Example:
        >>> gain = MeanGain()
        >>> gain.see([10.0, 10.0], 8.0)  # signal 6, noise 4
        1.25
    """

    saved = ("steps", "signal", "noise")

    def __init__(self) -> None:
        self.steps, self.signal, self.noise = 0, 0.0, 0.0

    def see(self, squares: Sequence[float], mean: float) -> float:
        """Take in a step; return the gain.

        Args:
            squares: the squared norm of each gradient.
            mean: that of their mean.
        """
        workers = len(squares)
        single = sum(squares) / workers
        if workers == 1:
            return 1.0
        noise = max(single - mean, 0.0) * workers / (workers - 1)
        self.steps += 1
        share = 1 / min(self.steps, _REMEMBERED)
        self.noise += share * (noise - self.noise)
        self.signal += share * (max(mean - noise / workers, 0.0) - self.signal)
        both = self.noise / workers + self.signal
        return min(float(workers), max(1.0, (self.noise + self.signal) / both)) if both > 0 else 1.0


class MemberNorms:
    """Squared norms of a rank's own gradient and of its group's mean, from parts as they come.

    Attributes:
        own: of this rank's gradient.
        of_mean: of the mean.
        metric: a factor for each sampled coordinate; None: 1.

    Args:
        places: the sampled coordinates, in order.
    """

    def __init__(self, places: npt.NDArray[np.int64]) -> None:
        self.places = places
        self.metric: Vector | None = None
        self.own = self.of_mean = 0.0

    def begin(self) -> None:
        """Begin a gradient."""
        self.own = 0.0

    def add(self, gradient: Vector, place: slice) -> None:
        """Take in a part of this rank's gradient."""
        first, last = np.searchsorted(self.places, [place.start, place.stop])
        self.own += self._square(gradient, slice(int(first), int(last)))

    def take_mean(self, gradient: Vector) -> None:
        """Take in the mean."""
        self.of_mean = self.square(gradient)

    def square(self, gradient: Vector) -> float:
        """Return the squared norm of a gradient."""
        return self._square(gradient, slice(0, self.places.size))

    def _square(self, gradient: Vector, some: slice) -> float:
        sample = gradient[self.places[some]].astype(np.float64)
        return products(sample, sample if self.metric is None else sample * self.metric[some])
