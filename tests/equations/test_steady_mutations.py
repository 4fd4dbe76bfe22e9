"""Mutations of `Steady` are caught by the comparison with its equations: each is planted, and must fail."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

from nnlo_common.algorithms import _gain, _paced, _retreat, _steady  # noqa: E402
from tests.equations import torch_runs  # noqa: E402
from tests.equations.compared import Case, compare  # noqa: E402

pytestmark = pytest.mark.framework("torch")

CASE = Case(wrapper="Steady", options={"every": 1}, optimizer="momentum")
LOST = Case(wrapper="Steady", options={"brake": 0.05}, optimizer="momentum")
ADAM = Case(wrapper="Steady", options={"every": 1}, optimizer="adam")


def run(case: Case) -> None:
    compare(case, torch_runs.run(case))


@pytest.mark.parametrize("case", [CASE, ADAM], ids=str)
def test_nothing_planted_passes(case):
    run(case)


def test_the_gain_of_a_worker_s_own_last_gradient(monkeypatch):
    """The pair of neighbours makes the signal, not the pair of one worker's gradients."""
    see, kept = _gain.Gain.see, {}

    def of_own(gain, sample, metric, **options):
        sender = of_own.sender
        gain.before[:] = kept.get(sender, gain.before)
        found = see(gain, sample, metric, **options)
        kept[sender] = gain.before.copy()
        return found

    begin = _steady.SteadyCenter._begin

    def noted(center, contribution):
        of_own.sender = contribution.rank
        return begin(center, contribution)

    monkeypatch.setattr(_steady.SteadyCenter, "_begin", noted)
    monkeypatch.setattr(_gain.Gain, "see", of_own)
    with pytest.raises(AssertionError, match="off by"):
        run(CASE)


@pytest.mark.parametrize("case", [CASE, ADAM], ids=str)
def test_a_look_ahead_with_the_wrong_sign(monkeypatch, case):
    numbers = _paced.PacedOptimizer._numbers

    def backwards(optimizer, one, pace, *rest):
        factors = numbers(optimizer, one, pace, *rest)
        return factors._replace(lead=-factors.lead)

    monkeypatch.setattr(_paced.PacedOptimizer, "_numbers", backwards)
    with pytest.raises(AssertionError, match="gradient taken at step"):
        run(case)


@pytest.mark.parametrize("place", ["the momentum", "the reply"])
def test_a_scale_that_is_missing_in_one_of_two_places(monkeypatch, place):
    numbers = _paced.PacedOptimizer._numbers

    def unscaled(optimizer, one, pace, *rest):
        factors = numbers(optimizer, one, pace, *rest)
        if place == "the momentum":
            return factors._replace(take=factors.take / pace.scale)
        return factors._replace(lead=factors.lead / pace.scale)

    monkeypatch.setattr(_paced.PacedOptimizer, "_numbers", unscaled)
    with pytest.raises(AssertionError, match="off by"):
        run(CASE)


def test_an_update_in_adam_that_forgets_the_scale(monkeypatch):
    numbers = _paced.PacedOptimizer._numbers

    def unscaled(optimizer, one, pace, *rest):
        factors = numbers(optimizer, one, pace, *rest)
        return factors._replace(rate=factors.rate / pace.scale)

    monkeypatch.setattr(_paced.PacedOptimizer, "_numbers", unscaled)
    with pytest.raises(AssertionError, match="off by"):
        run(ADAM)


def test_a_brake_that_never_works(monkeypatch):
    see = _gain.Gain.see

    def without(gain, *arguments, **options):
        gain.brake = 0.0
        return see(gain, *arguments, **options)

    braked = Case(wrapper="Steady", options={"brake": 0.7}, optimizer="momentum")
    run(braked)
    monkeypatch.setattr(_gain.Gain, "see", without)
    with pytest.raises(AssertionError, match="off by"):
        run(braked)


@pytest.mark.parametrize("constant", ["_LOST", "_SLOWER", "_RECOVERS", "_REMEMBERED"])
def test_a_retreat_with_another_constant(monkeypatch, constant):
    run(LOST)
    monkeypatch.setattr(_retreat, constant, getattr(_retreat, constant) / 2)
    with pytest.raises(AssertionError, match="off by"):
        run(LOST)


def test_a_retreat_that_keeps_its_velocity(monkeypatch):
    monkeypatch.setattr(_paced.PacedOptimizer, "forget", lambda optimizer: None)
    with pytest.raises(AssertionError, match="off by"):
        run(LOST)


def test_gradients_from_the_place_that_was_left(monkeypatch):
    monkeypatch.setattr(_retreat.Retreat, "outdates", lambda retreat, staleness: False)
    with pytest.raises(AssertionError, match="off by"):
        run(LOST)


def test_a_momentum_that_does_not_count_progress(monkeypatch):
    monkeypatch.setattr(_paced, "momentum_at", lambda momentum, pace: momentum)
    with pytest.raises(AssertionError, match="off by"):
        run(CASE)


def test_the_metric_of_adam_left_out_of_the_products(monkeypatch):
    monkeypatch.setattr(
        _paced.SampledMetric, "factors", lambda metric, stretch, sample=None: np.ones(metric.square.size)
    )
    with pytest.raises(AssertionError, match="off by"):
        run(ADAM)
