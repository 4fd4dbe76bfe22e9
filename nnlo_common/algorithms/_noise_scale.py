"""Gradient noise scale: the batch size above which larger batches waste samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nnlo_common.algorithms._gain import products, sampled_places
from nnlo_common.base._arguments import is_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import Vector
from nnlo_common.base._state_tree import Stateful

__all__ = ["Coordinates", "NeighbourNoise", "NoiseEstimate", "NoiseScale"]

# Resamplings of a bootstrap, and the least number of gradients at one point.
_RESAMPLED, _LEAST_GRADIENTS = 2000, 4
# One pair of so many contributions is looked at.
_LOOKED_AT = 16


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


class Coordinates:
    """The coordinates by which the squares of long vectors are estimated; of a short one all.

    Args:
        size: the number of coordinates.

    Example:
        >>> some, vector = Coordinates(1_000_000), np.ones(1_000_000, np.float32)
        >>> some.of(vector).size, some.mean_square([some.of(vector)])
        (10000, 1000000.0)
    """

    def __init__(self, size: int) -> None:
        self._places = sampled_places(size)
        self._each = size / max(self._places.size, 1)

    def of(self, vector: Vector) -> Vector:
        """Return a copy of these coordinates."""
        return vector.take(self._places)

    def mean_square(self, samples: Sequence[Vector]) -> float:
        """Return the mean of |v|^2 over vectors of which these are the coordinates."""
        return self._each * sum(products(one, one) for one in samples) / len(samples)


class NeighbourNoise:
    """The noise scale of contributions that arrive one by one: of pairs of neighbours, now and then.

    Two different workers' gradients that arrive one after the other were taken at nearly the same point, so
    their mean is that of a batch twice as large. A sample of the coordinates of one pair in 16 is enough, so
    that it costs nothing. Facts only: nothing else depends on it, and it is not saved.

    Attributes:
        scale: the estimate.

    Args:
        size: the number of coordinates.

    Example:
        >>> noise = NeighbourNoise(2)
        >>> for turn in range(32):
        ...     noise.see(turn % 2, np.array([3.0, 1.0 if turn % 2 else -1.0], np.float32), weight=10.0)
        >>> noise.scale.count, noise.scale.signal, noise.scale.value  # 9 - 1, and 10 * 2 over 8
        (2, 8.0, 2.5)
    """

    def __init__(self, size: int) -> None:
        self.scale = NoiseScale()
        self._coordinates = Coordinates(size)
        self._turn = 0
        self._last, self._in_a_row = -1, 0  # the rank of the last contribution, and its earlier ones in a row
        self._before: tuple[int, Vector, float] | None = None

    def see(self, rank: int, gradient: Vector, weight: float) -> None:
        """Take in a contribution, or let it pass."""
        self._turn += 1
        self._in_a_row = self._in_a_row + 1 if rank == self._last else 0
        self._last = rank
        if self._in_a_row > _LOOKED_AT:
            self._before = None  # the others are gone or slow: the first that comes begins a pair
            return
        if self._turn < _LOOKED_AT - 1:
            return
        sample = self._coordinates.of(gradient)
        before, self._before = self._before, (rank, sample, weight)
        if self._turn == _LOOKED_AT - 1 or before is None:
            return
        other, own, its_weight = before
        # The next one may be a neighbour of this one, if both came from one worker.
        if other == rank:
            return
        self._turn, self._before = 0, None
        if weight == its_weight and weight > 0:
            mean = (own + sample) * np.float32(0.5)
            small, large = (self._coordinates.mean_square(one) for one in ([own, sample], [mean]))
            self.scale.observe(small, large, batch=weight, workers=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseEstimate:
    r"""The simple noise scale with its range, from gradients of several batches taken at the same parameters.

    All pairs of different batches estimate the signal :math:`|G|^2`, as their gradients' errors are
    independent, and the squares the sum of both: with the products
    :math:`K_{ij} = g_i \cdot g_j` of M gradients of batches of b samples,

        |G|^2 = mean of K_ij over i != j      and      tr(S) = b (mean of K_ii - |G|^2)

    are unbiased. Of several points each is added up before the ratio is taken.

    The range is a bootstrap's over the batches, from the 2.5 % to the 97.5 % quantile, which leaves out the
    pairs of a batch with itself. A bootstrap counts the part of a pair's product that no batch explains by
    itself three times (Bickel and Freedman 1981, on degenerate U-statistics), so the resampled signals are
    drawn together to the spread that the products show. Where noise hides the signal, the range has no upper
    end.

    Attributes:
        scale: the noise scale in samples: batches much larger than this waste samples.
        low: the lower end of its range.
        high: its upper end; infinite if the signal cannot be told from none.
        signal: the mean of the estimates of |G|^2 over the points.
        noise: that of tr(S).
        batch: b.

    Example:
        >>> draws = np.random.default_rng(0)
        >>> gradients = 1 + draws.normal(size=(64, 100)).astype(np.float32)  # |G|^2 = tr(S) / b = 100
        >>> found = NoiseEstimate.of([gradients @ gradients.T], batch=32)
        >>> round(found.scale, 1), found.low < 32 < found.high
        (31.8, True)
    """

    scale: float
    low: float
    high: float
    signal: float
    noise: float
    batch: float

    @classmethod
    def of(
        cls, products: Sequence[npt.NDArray[np.floating]], *, batch: float, seed: int = 0
    ) -> NoiseEstimate:
        """Estimate it.

        Args:
            products: for each point a matrix with the products of all gradients there.
            batch: the samples in each batch.
            seed: of the bootstrap.

        Raises:
            ConfigurationError: there are too few gradients, or one is not finite.
        """
        if not (is_number(batch) and 0 < batch < math.inf):
            raise ConfigurationError(f"batch={batch!r} is not possible: use a number of samples above 0")
        tables = [np.asarray(one, np.float64) for one in products]
        for table in tables:
            if table.ndim != 2 or table.shape[0] != table.shape[1] or len(table) < _LEAST_GRADIENTS:
                raise ConfigurationError(
                    f"a noise scale needs the products of at least {_LEAST_GRADIENTS} gradients at a point, "
                    f"as a square matrix, and there is one of {table.shape}; take more batches"
                )
            if not np.isfinite(table).all():
                raise ConfigurationError(
                    "a gradient is not finite, so there is no noise scale; lower the learning rate, or check "
                    "the data for NaN"
                )
        if not tables:
            raise ConfigurationError("a noise scale needs gradients at one point at least, and there is none")
        draws = np.random.default_rng(seed)
        found = [_resampled(table, draws) for table in tables]
        signals = np.mean([signal for signal, _ in found], axis=0)
        noises = batch * (np.mean([square for _, square in found], axis=0) - signals)
        scales = np.where(signals > 0, noises / np.where(signals > 0, signals, 1.0), np.inf)
        low, high = np.quantile(scales[1:], (0.025, 0.975), method="nearest")
        return cls(
            scale=float(scales[0]),
            low=float(min(low, scales[0])),
            high=float(max(high, scales[0])),
            signal=float(signals[0]),
            noise=float(noises[0]),
            batch=float(batch),
        )

    def over(self, samples: float) -> tuple[float, float, float]:
        """Return the scale and the ends of its range over a number of samples.

        Example:
            >>> found = NoiseEstimate(scale=64, low=32, high=128, signal=1, noise=64, batch=8)
            >>> found.over(32)
            (2.0, 1.0, 4.0)
        """
        return self.scale / samples, self.low / samples, self.high / samples

    def __str__(self) -> str:
        """Say it with its range.

        Example:
            >>> print(NoiseEstimate(scale=641, low=322, high=float("inf"), signal=1, noise=64, batch=8))
            640 samples (320 or more)
        """
        if math.isinf(self.scale):
            return f"{_rounded(self.low)} samples or more"
        end = "or more" if math.isinf(self.high) else f"to {_rounded(self.high)}"
        return f"{_rounded(self.scale)} samples ({_rounded(self.low)} {end})"


def _rounded(value: float) -> str:
    """Return a number with the two digits that are known of it."""
    if not math.isfinite(value) or value <= 0:
        return f"{value:g}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):.{max(digits, 0)}f}"


def _resampled(
    table: npt.NDArray[np.float64], draws: np.random.Generator
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the signal and the mean square of a point: the estimates, then those of resampled batches."""
    count, squares = len(table), np.array(np.diag(table))
    pairs = table - np.diag(squares)
    weights = draws.multinomial(count, np.full(count, 1 / count), _RESAMPLED).astype(np.float64)
    products = np.einsum("ri,ij,rj->r", weights, pairs, weights, optimize=True)
    many = weights.sum(1) ** 2 - (weights**2).sum(1)
    signal = pairs.sum() / (count * (count - 1))
    signals = signal + _narrower(pairs, signal) * (products / many - signal)
    mean = squares.mean()
    return np.array([signal, *signals]), np.array([mean, *(weights @ squares / count)])


def _narrower(pairs: npt.NDArray[np.float64], signal: float) -> float:
    """Return the true spread of the mean product over that of a bootstrap, as the products show it."""
    count = len(pairs)
    rows = pairs.sum(1) / (count - 1)
    rest = pairs - rows[:, None] - rows[None, :] + signal
    np.fill_diagonal(rest, 0.0)
    unexplained = (rest**2).sum() / (count * (count - 1))
    by_batch = 4 * rows.var(ddof=1) / count
    pair_part = 2 * unexplained / count**2
    # `by_batch` has the unexplained part twice over: each row's mean is known from its pairs only.
    true = max(by_batch - pair_part, pair_part)
    return math.sqrt(min(true / (by_batch + pair_part), 1.0)) if by_batch + pair_part > 0 else 1.0
