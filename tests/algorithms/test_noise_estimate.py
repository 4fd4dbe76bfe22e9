"""The noise scale of a quadratic whose noise is known: the estimate, and how often its range is right."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nnlo_common import ConfigurationError, NoiseEstimate, NoiseScale

HESSIAN = np.linspace(0.1, 2.0, 40)
SPREAD = np.linspace(3.0, 0.2, 40)  # of one sample's gradient in each coordinate
BATCH = 16


def products(x, batches, seed):
    """Products of the gradients of batches of samples at x: h x plus noise."""
    noise = np.random.default_rng(seed).normal(size=(batches, 40)) * SPREAD / math.sqrt(BATCH)
    gradients = HESSIAN * x + noise
    return gradients @ gradients.T


def truth(*points):
    signal = np.mean([np.sum((HESSIAN * x) ** 2) for x in points])
    return np.sum(SPREAD**2) / signal


def test_it_is_within_a_tenth_of_the_truth():
    points = [1.0, 0.8, 0.6, 0.5]
    found = NoiseEstimate.of([products(x, 200, seed) for seed, x in enumerate(points)], batch=BATCH)
    assert found.scale == pytest.approx(truth(*points), rel=0.1)
    assert found.noise == pytest.approx(np.sum(SPREAD**2), rel=0.05)
    assert found.low < truth(*points) < found.high
    assert found.high / found.low < 1.5


@pytest.mark.parametrize(
    ("x", "batches"), [(1.0, 32), (0.3, 32), (0.1, 64)], ids=["clear", "noisy", "hidden"]
)
def test_its_range_is_right_in_90_of_100_repetitions(x, batches):
    right = 0
    for seed in range(100):
        found = NoiseEstimate.of([products(x, batches, seed)], batch=BATCH, seed=seed)
        right += found.low <= truth(x) <= found.high
    assert right >= 90


def test_its_range_is_no_wider_than_its_estimates_are_spread():
    found = [NoiseEstimate.of([products(0.5, 48, seed)], batch=BATCH, seed=seed) for seed in range(60)]
    inner = np.quantile([one.scale for one in found], (0.025, 0.975))
    widths = [one.high / one.low for one in found]
    assert np.median(widths) < 1.6 * inner[1] / inner[0]


def test_two_halves_of_it_are_those_of_the_running_estimate():
    # McCandlish's two batch sizes: of two batches the pair is all that there is.
    x, many = 0.7, [products(0.7, 2, seed) for seed in range(4000)]
    running = NoiseScale(decay=1)
    for table in many:
        running.observe(np.diag(table).mean(), table.mean(), batch=BATCH, workers=2)
    found = NoiseEstimate.of([products(x, 200, seed) for seed in range(10)], batch=BATCH)
    assert found.scale == pytest.approx(running.value, rel=0.1)


def test_it_scales_with_the_unit_of_the_loss_and_of_the_batch():
    table = products(0.5, 32, 3)
    one, other = NoiseEstimate.of([table], batch=BATCH), NoiseEstimate.of([1e-6 * table], batch=2 * BATCH)
    assert other.scale == pytest.approx(2 * one.scale)
    assert (other.low, other.high) == pytest.approx((2 * one.low, 2 * one.high))


def test_gradients_without_noise_need_one_worker_only():
    found = NoiseEstimate.of([np.ones((8, 8))], batch=4)
    assert (found.scale, found.low, found.high) == pytest.approx((0, 0, 0))


def test_gradients_without_a_signal_have_no_upper_end():
    noise = np.random.default_rng(5).normal(size=(32, 1000))
    found = NoiseEstimate.of([noise @ noise.T], batch=4)
    assert math.isinf(found.high)
    assert found.low > 500
    assert "or more" in str(found)


@pytest.mark.parametrize(
    ("tables", "batch", "text"),
    [
        ([np.ones((2, 2))], 8, "at least 4 gradients"),
        ([np.ones((4, 5))], 8, "square matrix"),
        ([], 8, "there is none"),
        ([np.full((4, 4), np.nan)], 8, "not finite"),
        ([np.ones((4, 4))], 0, "batch=0"),
        ([np.ones((4, 4))], "8", "batch='8'"),
    ],
)
def test_what_makes_no_sense_is_refused(tables, batch, text):
    with pytest.raises(ConfigurationError, match=text):
        NoiseEstimate.of(tables, batch=batch)
