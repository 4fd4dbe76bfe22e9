"""Adam's metric at the sampled coordinates, with which `Steady` measures products of gradients."""

from __future__ import annotations

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
