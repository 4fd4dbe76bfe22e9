"""Adam's metric at the sampled coordinates, with which `Steady` measures products of gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nnlo_common.algorithms._paced import SampledMetric
from nnlo_common.algorithms._vector_optimizer import Stretch

ADAM = Stretch(place=slice(0, 2), learning_rate=0.1, momentum=0.9, adaptive=True, beta2=0.999, epsilon=1e-8)


def test_a_coordinate_that_was_silent_does_not_outweigh_the_others():
    metric, now = SampledMetric(2), np.ones(2, np.float32)
    metric.see(np.array([1, 0], np.float32), ADAM, 1.0)
    assert metric.factors(ADAM, now) == pytest.approx([1, np.sqrt(2)], rel=1e-3)


def test_the_first_gradient_is_measured_by_itself():
    assert SampledMetric(2).factors(ADAM, np.array([4, 0.5], np.float32)) == pytest.approx([1 / 4, 2])


@pytest.mark.parametrize("measured", [True, False])
def test_the_factors_are_those_of_the_formula(measured):
    rough = replace(ADAM, place=slice(0, 50), epsilon=0.1, beta2=0.9)
    metric, draw, square = SampledMetric(50), np.random.default_rng(0), np.zeros(50)
    for number, shorter in enumerate([1.0, 0.25, 1.0, 0.5], start=1):
        gradient = draw.standard_normal(50).astype("f4")
        gradient[:5] = 0
        now = 0.9 * square + 0.1 * gradient.astype(float) ** 2
        if measured:
            expected = 1 / (np.sqrt(now / (1 - 0.9**number)) + 0.1)
            np.testing.assert_allclose(metric.factors(rough, gradient), expected, rtol=1e-5)
        square = 0.9 * square + 0.1 * (shorter * gradient.astype(float)) ** 2
        metric.see(gradient, rough, shorter)
        if not measured:
            expected = 1 / (np.sqrt(square / (1 - 0.9**number)) + 0.1)
            expected[:5] = 0
            np.testing.assert_allclose(metric.factors(rough), expected, rtol=1e-5)
