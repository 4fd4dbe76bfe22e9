"""Fact 16: at a rate that is too high for late gradients, Steady goes back, slows down, and stays bounded.

On a quadratic of curvature h, momentum SGD of one process is stable up to a rate of 2 (1 + momentum) / h.
With W workers the gradients arrive W - 1 commits late, and the limit is lower. The running mean of squares
grows with the gradients, so a brake that is relative to it alone slows the growth and does not end it.
"""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import SGD, Steady
from nnlo_common.algorithms._gain import Gain
from nnlo_common.algorithms._retreat import Retreat
from nnlo_common.testing import train_virtually

pytestmark = pytest.mark.sampled(2)

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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [8, 16])
@pytest.mark.parametrize("part", [0.3, 0.5, 0.8])
def test_a_rate_that_one_process_bears_is_borne_by_many_workers(part, workers):
    alone, _ = trained(part * BOUND, 1, 4800)
    together, rule = trained(part * BOUND, workers, 19_200 // workers)
    assert alone < 20  # the noise of one process
    assert together < 1e5  # gradients grow by 64 times at most before it goes back; without, 1e13 and more
    assert rule.retreat.times
    assert rule.gain_report().retreats == rule.retreat.times
    assert rule.gain_report().held_bytes == 4 * SIZE  # one copy of the centre, whatever the workers
    assert 200 < rule.progress < 19_200  # the steps count for what they are


def test_a_calm_training_never_goes_back():
    reached, rule = trained(0.02, 8, 600)
    assert (rule.retreat.times, rule.retreat.throttle) == (0, 1)
    assert reached < 1


def test_gradients_that_grow_for_good_are_followed():
    """In the first steps of a sound training gradients become many times longer, and then stay so."""
    gain, centre = Gain(SIZE, brake=1.5), np.zeros(SIZE, "f4")
    retreat, rng = Retreat(SIZE, gain), np.random.default_rng(0)
    for step in range(2000):
        length = min(1 + step / 100, 10)
        gradient = (length * rng.standard_normal(SIZE)).astype("f4")
        retreat.keep(centre, gain, workers=8)
        assert not retreat.needed(gain.see(gradient, None, workers=8, batches=1)[0], gain, workers=8)
    assert gain.square == pytest.approx(SIZE * 10**2, rel=0.1)


def test_steps_come_back_to_their_length_in_some_rounds():
    gain, centre = Gain(SIZE, brake=1.5), np.zeros(SIZE, "f4")
    retreat = Retreat(SIZE, gain)
    retreat.go_back(centre, gain)
    rounds = 0
    while retreat.throttle < 1:
        for _ in range(8):
            retreat.needed(1.0, gain, workers=8)
        rounds += 1
    assert rounds == 70  # log(2) / 0.01


def test_a_state_of_one_worker_begins_anew_with_several():
    """Where the centre is when the first of several workers contributes is what it goes back to."""
    one, several = Retreat(SIZE, Gain(0, brake=0)), Retreat(SIZE, Gain(SIZE, brake=1.5))
    several.load(one.state())
    several.keep(np.full(SIZE, 7, "f4"), Gain(SIZE, brake=1.5), workers=2)
    assert (several.kept == 7).all()
    again = Retreat(SIZE, Gain(SIZE, brake=1.5))
    again.load(several.state())
    assert again.begun
    assert (again.kept == 7).all()
    one.load(several.state())
    assert one.kept.size == 0
