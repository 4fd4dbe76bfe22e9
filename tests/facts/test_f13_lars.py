"""F13: LARS moves each parameter by the same share of its length; LARC never further than SGD."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import LARS, SGD, ConfigurationError, Downpour, FlatVector
from nnlo_common.algorithms._vector_optimizer import fitted
from nnlo_common.testing import train_virtually

SIZES = [4, 1, 0, 7]
PARTS = [slice(0, 4), slice(4, 5), slice(5, 12)]


def vectors(seed, scale=1.0):
    draw = np.random.default_rng(seed)
    return draw.standard_normal(12).astype("f4"), (scale * draw.standard_normal(12)).astype("f4")


def moved(optimizer, x, gradient):
    optimizer.fit(SIZES)
    after = x.copy()
    optimizer.step(after, gradient)
    return after - x


@settings(max_examples=40)
@given(st.integers(0, 99), st.floats(1e-3, 1.0), st.floats(1e-3, 0.5), st.floats(1e-3, 1e3))
def test_each_parameter_moves_by_rate_times_trust_of_its_length(seed, rate, trust, loss_scale):
    x, gradient = vectors(seed)
    step = moved(LARS(rate, trust=trust, epsilon=0), x, gradient)
    scaled = moved(LARS(rate, trust=trust, epsilon=0), x, (gradient * np.float32(loss_scale)).astype("f4"))
    for part in PARTS:
        length = np.linalg.norm(x[part])
        # The difference of two float32 vectors is as exact as the vectors are long.
        close = {"rtol": 1e-4, "atol": 4e-7 * length}
        np.testing.assert_allclose(np.linalg.norm(step[part]), rate * trust * length, **close)
        np.testing.assert_allclose(scaled[part], step[part], **close)


@settings(max_examples=40)
@given(st.integers(0, 99), st.floats(1e-3, 1.0), st.floats(1e-3, 10.0), st.floats(1e-3, 1e3))
def test_larc_never_moves_further_than_sgd(seed, rate, trust, scale):
    x, gradient = vectors(seed, scale)
    larc, lars = (moved(LARS(rate, trust=trust, epsilon=0, clip=clip), x, gradient) for clip in (True, False))
    for part in PARTS:
        sgd = rate * np.linalg.norm(gradient[part])
        slack = 1e-6 * (np.linalg.norm(x[part]) + sgd)
        assert np.linalg.norm(larc[part]) <= sgd + slack
        ratio = trust * np.linalg.norm(x[part]) / np.linalg.norm(gradient[part])
        if ratio >= rate * 1.001:  # r / rate is clipped to 1: plain SGD
            np.testing.assert_allclose(larc[part], -rate * gradient[part], rtol=1e-3, atol=slack)
        elif ratio <= rate * 0.999:  # not clipped: rate * r / rate
            np.testing.assert_allclose(larc[part] * rate, lars[part], rtol=1e-3, atol=slack)


def test_the_whole_equation_against_float64():
    """Momentum, weight decay and epsilon, over several steps."""
    x, _ = vectors(3)
    optimizer = LARS(0.5, trust=0.1, momentum=0.9, weight_decay=0.05, epsilon=1e-3)
    optimizer.fit(SIZES)
    y, buffer = x.astype("f8"), np.zeros(12)
    for step in range(20):
        gradient = vectors(100 + step)[1]
        optimizer.step(x, gradient)
        for part in PARTS:
            w, g = y[part], gradient[part].astype("f8")
            norm = np.linalg.norm(w)
            ratio = 0.1 * norm / (np.linalg.norm(g) + 0.05 * norm + 1e-3)
            buffer[part] = 0.9 * buffer[part] + ratio * (g + 0.05 * w)
            y[part] = w - 0.5 * buffer[part]
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_parameter_or_gradient_of_length_zero_is_stepped_plainly():
    x, gradient = np.zeros(2, "f4"), np.array([2, 0], "f4")
    optimizer = LARS(0.5, trust=0.1, weight_decay=0.1)
    optimizer.step(x, gradient)
    assert np.array_equal(x, [-1, 0])
    optimizer.step(x, np.zeros(2, "f4"))
    assert np.array_equal(x, [-1, 0])


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_on_a_cut_centre_each_server_knows_its_parameters(servers):
    """As many servers as parameters or fewer: the same bits."""
    arrays = [np.arange(1, 5, dtype="f4"), np.ones(1, "f4"), np.linspace(-1, 1, 7, dtype="f4")]
    run = train_virtually(
        Downpour(),
        lambda x, rank: 0.1 * x + 1,
        arrays,
        workers=1,
        servers=servers,
        steps=5,
        optimizer=LARS(0.5, trust=0.1, momentum=0.5),
    )
    alone = LARS(0.5, trust=0.1, momentum=0.5)
    alone.fit([4, 1, 7])
    x = np.concatenate(arrays)
    for _ in range(5):
        alone.step(x, (0.1 * x + 1).astype("f4"))
    assert np.array_equal(run.center, x)


def test_fitting_leaves_the_users_object_alone_and_others_as_they_are():
    layout = FlatVector.of([np.zeros(3, "f4"), np.zeros(2, "f4")]).layout
    mine = LARS(0.1)
    first = fitted(mine, layout, slice(0, 3))
    with pytest.raises(ConfigurationError, match="3 values together"):
        first.step(np.ones(5, "f4"), np.ones(5, "f4"))
    mine.step(np.ones(5, "f4"), np.ones(5, "f4"))
    assert fitted(SGD(0.1), layout, slice(0, 3)).learning_rate == 0.1


def test_its_state_is_exact():
    x, gradient = vectors(1)
    one = LARS(0.1, trust=0.1, momentum=0.9)
    one.fit(SIZES)
    one.step(x, gradient)
    other, y = LARS(0.7, trust=0.1, momentum=0.9), x.copy()
    other.fit(SIZES)
    other.load(copy.deepcopy(one.state()))
    for _ in range(3):
        one.step(x, gradient)
        other.step(y, gradient)
    assert np.array_equal(x, y)
