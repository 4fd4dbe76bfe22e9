"""The paced optimizer's sums are the means of its equations, in other units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nnlo_common import SGD, Adam, Steady
from nnlo_common.algorithms import Contribution
from nnlo_common.algorithms._paced import Pace, PacedOptimizer, momentum_at
from nnlo_common.algorithms._vector_optimizer import Stretch

SIZE = 103
MOMENTA = (
    Stretch(place=slice(0, 31), learning_rate=0.2, momentum=0.9),
    Stretch(place=slice(31, 70), learning_rate=0.1, momentum=0.5, weight_decay=0.01, maximize=True),
    Stretch(place=slice(75, 90), learning_rate=0.3),
)
ADAMS = (
    Stretch(place=slice(2, 40), learning_rate=0.02, momentum=0.9, adaptive=True, beta2=0.99, epsilon=1e-3),
    Stretch(
        place=slice(40, 99),
        learning_rate=0.01,
        momentum=0.5,
        adaptive=True,
        beta2=0.9,
        epsilon=1e-3,
        epsilon_outside=True,
        weight_decay=0.1,
        decoupled=True,
    ),
)
#: Of each commit: the workers, the gain and the brake change, and one leaves a stretch out.
PACES = [
    Pace(3, 1 / 3),
    Pace(3, 0.9, 0.5),
    Pace(2, 0.7),
    Pace(2, 0.6),
    Pace(1, 0.8),
    Pace(5, 0.4, 1.0, 2.0, 0.3),
]
WITHOUT_THE_FIRST = 3
OPTIMIZERS = pytest.mark.parametrize(
    "optimizer", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01)], ids=["SGD", "Adam"]
)


class Given:
    """What a centre asks of its optimizer."""

    def stretches(self, size, gradient):
        return self.now

    def keep_in(self, velocity, square):
        return 0

    def count(self, steps):
        pass


class Equations:
    """The commits in float64, one number after the other."""

    def __init__(self):
        draw = np.random.default_rng(0)
        self.x, self.m, self.v = draw.standard_normal(SIZE), np.zeros(SIZE), np.zeros(SIZE)
        self.bias, self.steps = {}, 0

    def commit(self, gradient, stretches, pace):
        self.steps += 1
        ahead = None
        for one in stretches:
            mu, here = momentum_at(one.momentum, pace), one.place
            nu = 1 - (1 - mu) / pace.workers
            g = pace.shorter * gradient[here] * (-1 if one.maximize else 1)
            if one.decoupled:
                self.x[here] *= 1 - one.learning_rate * one.weight_decay * pace.scale
            else:
                g = g + one.weight_decay * self.x[here]
            if one.adaptive:
                bias = self.bias[here.start] = self.bias.get(here.start, 1.0) * nu
                self.v[here] = one.beta2 * self.v[here] + (1 - one.beta2) * g**2
                self.m[here] = nu * self.m[here] + (1 - nu) * g
                correction = np.sqrt(1 - one.beta2**self.steps)
                epsilon = one.epsilon * (1 if one.epsilon_outside else correction)
                step = pace.scale * correction / (1 - bias) * self.m[here] / (np.sqrt(self.v[here]) + epsilon)
            elif one.momentum:
                share = pace.scale * (1 - mu) / (1 - one.momentum) / pace.workers
                self.m[here] = nu * self.m[here] + share * g
                step = self.m[here]
            else:
                step = pace.scale * g
            self.x[here] -= one.learning_rate * step
            ahead = self.x.copy() if ahead is None else ahead
            lead = mu * pace.workers if pace.workers > 1 and (one.momentum or one.adaptive) else 0
            ahead[here] = self.x[here] - lead * one.learning_rate * step
        for start in self.bias.keys() - {one.place.start for one in stretches}:
            self.bias[start] *= nu
        return ahead


@pytest.mark.parametrize("sums", [True, False], ids=["sums", "means"])
@pytest.mark.parametrize("stretches", [MOMENTA, ADAMS], ids=["SGD", "Adam"])
@pytest.mark.parametrize("settled_after", [None, 2])
def test_commits_are_those_of_the_equations(sums, stretches, settled_after):
    given, equations, draw = Given(), Equations(), np.random.default_rng(1)
    given.now = stretches
    paced, x = PacedOptimizer(SIZE, given, sums=sums), equations.x.astype("f4")
    for number, pace in enumerate(PACES):
        if number == 4 and stretches is ADAMS:  # by a schedule
            stretches = [replace(ADAMS[0], beta2=0.95), ADAMS[1]]
        moving = stretches[number == WITHOUT_THE_FIRST :]
        gradient = draw.standard_normal(SIZE).astype("f4")
        expected = equations.commit(gradient.astype(float), moving, pace)
        paced.begin(x, gradient, moving, pace)(slice(0, SIZE))
        looked = np.empty_like(x)
        if number == settled_after:
            paced.settle()
            assert paced.units == (1, 1)
        paced.look_ahead(x, looked, slice(0, SIZE))
        moved = np.concatenate([np.arange(one.place.start, one.place.stop) for one in moving])
        np.testing.assert_allclose(gradient[moved], expected[moved], rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(looked, gradient, rtol=1e-6 if number == settled_after else 0, atol=0)
        np.testing.assert_allclose(x, equations.x, rtol=2e-5, atol=1e-6)
        unit_m, unit_v = paced.units
        assert (unit_m == 1) == (not sums or number == settled_after)
        np.testing.assert_allclose(unit_m * paced.velocity, equations.m, rtol=2e-5, atol=1e-6)
        if paced.square.size:
            assert (unit_v == 1) == (unit_m == 1)
            np.testing.assert_allclose(unit_v * paced.square, equations.v, rtol=2e-5, atol=1e-6)


def trained(rule, commits, seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(commits):
        gradient = draw.standard_normal(SIZE).astype("f4")
        rule.commit([Contribution(rank=1, vector=gradient, staleness=0, weight=1.0)])
    return rule


def test_a_momentum_may_begin_in_the_course_of_a_training():
    optimizer = Given()
    optimizer.now = [replace(one, momentum=0.0) for one in MOMENTA]
    paced, equations, draw = PacedOptimizer(SIZE, optimizer), Equations(), np.random.default_rng(1)
    x = equations.x.astype("f4")
    for stretches in (optimizer.now, MOMENTA, MOMENTA):
        gradient = draw.standard_normal(SIZE).astype("f4")
        ahead = equations.commit(gradient.astype(float), stretches, PACES[0])
        paced.begin(x, gradient, stretches, PACES[0])(slice(0, SIZE))
        np.testing.assert_allclose(x, equations.x, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(gradient, ahead, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01)], ids=["SGD", "Adam"]
)
def test_who_looks_at_the_optimizer_sees_means(optimizer):
    rule = trained(Steady().center(np.ones(SIZE, "f4"), 3, optimizer()), 7)
    unit_m, unit_v = rule.paced.units
    assert unit_m != 1
    velocity, square = rule.paced.velocity * np.float32(unit_m), rule.paced.square * np.float32(unit_v)
    kept = [one for one in rule.state()["optimizer"].values() if isinstance(one, np.ndarray)]
    np.testing.assert_array_equal(kept[0], velocity)
    np.testing.assert_array_equal(kept[1:], [square] if square.size else [])


@pytest.mark.parametrize(
    "optimizer", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.01)], ids=["SGD", "Adam"]
)
def test_a_saved_centre_goes_on_with_the_bits_of_the_one_that_was_saved(optimizer):
    rule = trained(Steady().center(np.ones(SIZE, "f4"), 3, optimizer()), 7)
    again = Steady().center(np.zeros(SIZE, "f4"), 3, optimizer())
    trained(again, 2, seed=5)
    again.load(rule.state())
    for one in (rule, again):
        trained(one, 4, seed=1)
    np.testing.assert_array_equal(rule.center, again.center)


def test_one_worker_goes_on_with_what_several_left():
    several = trained(Steady().center(np.ones(SIZE, "f4"), 3, Adam(0.01)), 7)
    state = several.state()
    alone = Steady().center(np.zeros(SIZE, "f4"), 1, Adam(0.01))
    alone.load(state)
    plain, x = Adam(0.01), state["center"].copy()
    plain.load(state["optimizer"])
    draw = np.random.default_rng(2)
    for _ in range(3):
        gradient = draw.standard_normal(SIZE).astype("f4")
        alone.commit([Contribution(rank=1, vector=gradient, staleness=0, weight=1.0)])
        plain.step(x, gradient)
    np.testing.assert_array_equal(alone.center, x)
