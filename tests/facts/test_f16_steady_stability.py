"""Fact 16: at a rate that is too high for late gradients, Steady makes smaller steps, and stays bounded.

On a quadratic of curvature h, momentum SGD of one process is stable up to a rate of 2 (1 + momentum) / h.
With W workers the gradients arrive W - 1 commits late, and the limit is lower. The running mean of squares
grows with the gradients, so a brake that is relative to it alone slows the growth and does not end it.
"""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import SGD, Steady
from nnlo_common.testing import train_virtually

SIZE, CURVATURES, MOMENTUM = 50, np.linspace(0.1, 1, 50), 0.9
BOUND = 2 * (1 + MOMENTUM)  # of the learning rate of one process, at the largest curvature


def trained(rate, workers, steps):
    """Return the largest coordinate at the end, and the rule of the centre."""
    rng = np.random.default_rng(0)

    def slope(x, rank):
        return (CURVATURES * x + 0.3 * rng.standard_normal(SIZE)).astype("f4")

    start, optimizer = np.ones(SIZE, "f4"), SGD(rate, momentum=MOMENTUM)
    run = train_virtually(Steady(), slope, start, workers=workers, steps=steps, optimizer=optimizer)
    return float(np.abs(run.center).max()), run.servers[0].rule


@pytest.mark.parametrize("part", [0.3, 0.5, 0.8])
def test_a_rate_that_one_process_bears_is_borne_by_eight_workers(part):
    alone, _ = trained(part * BOUND, 1, 4800)
    together, rule = trained(part * BOUND, 8, 600)
    assert alone < 20  # the noise of one process
    assert together < 20
    assert rule.gain.throttle < 1
    assert 50 < rule.progress < 4800  # the steps count for what they are


def test_a_calm_training_is_not_throttled():
    reached, rule = trained(0.02, 8, 600)
    assert rule.gain.throttle == 1
    assert rule.gain.unease == 0
    assert reached < 1


def test_growth_is_not_forgotten_by_the_brake():
    """The means do not follow contributions that were shortened for long."""
    _, rule = trained(0.5 * BOUND, 8, 600)
    square = rule.gain.square
    rule.gain.braked = 1.0
    grown = 100 * np.ones_like(rule.gain.before)
    for _ in range(500):
        shorter, scale = rule.gain.see(grown, None, workers=8, batches=1)
    assert rule.gain.square == square
    assert shorter == pytest.approx(1.5 * np.sqrt(square / (grown @ grown)))
    assert scale < 0.25 / 8
