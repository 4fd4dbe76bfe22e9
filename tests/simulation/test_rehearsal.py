"""A rehearsal times what a server and a worker do in an exchange, each by itself; its clock is the test's."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from nnlo_common import EASGD, SGD, Adam, ConfigurationError, Downpour, Steady, Synchronous
from nnlo_common.algorithms._agn import AGNWorker
from nnlo_common.algorithms._steady import SteadyGroup
from nnlo_common.simulation import Costs, Ranks, _rehearsal, rehearse, simulate
from nnlo_common.simulation._advice import Advice, example_facts
from nnlo_common.simulation._rehearsal import ExchangeTimes


class Clock:
    """Stands still but for what is planted."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(Clock, "now", 0.0)
    monkeypatch.setattr(_rehearsal, "perf_counter", lambda: Clock.now)


class SlowSteps(SGD):
    def _update(self, x, *given):
        Clock.now += 0.5 + x.size / 200
        super()._update(x, *given)


class SlowPacking(AGNWorker):
    def outgoing(self, parameters, gradient):
        Clock.now += 1.0 + parameters.size / 100
        return super().outgoing(parameters, gradient)


@dataclass(frozen=True, kw_only=True)
class Planted(Downpour):
    every: int = 1

    def worker(self, size, workers):
        return SlowPacking(size, n_push=self.every, n_fetch=self.every, first_push=self.every - 1)


@pytest.mark.parametrize("every", [1, 3])
def test_what_the_server_and_the_worker_do_is_told_apart(clock, every):
    times = rehearse(Planted(every=every), 100, optimizer=SlowSteps(0.1))
    least = {"served_least_s": 0.505, "handled_least_s": 1.01}  # of one number
    assert times == pytest.approx(ExchangeTimes(served_s=1.0, handled_s=2.0, **least))


def test_a_large_model_is_timed_in_part(clock, monkeypatch):
    monkeypatch.setattr(_rehearsal, "_LARGEST", 50)
    times = rehearse(Planted(), 150, optimizer=SlowSteps(0.1))
    assert times == pytest.approx((3 * 0.75, 3 * 1.5, 0.0, 0.505, 1.01))


def test_a_step_of_ranks_without_a_server_is_timed(clock, monkeypatch):
    step = SteadyGroup.step

    def slow_step(self, *given):
        Clock.now += 0.5
        step(self, *given)

    monkeypatch.setattr(SteadyGroup, "step", slow_step)
    optimizer = SGD(0.1, momentum=0.9)
    assert rehearse(Steady(), 100, optimizer=optimizer).together_s == 0.5
    assert optimizer.state() == SGD(0.1, momentum=0.9).state()
    assert rehearse(Synchronous(), 100, optimizer=SGD(0.1)).together_s == 0


def test_ranks_without_a_server_step_by_the_rule_of_a_group_and_handle_their_gradients():
    costs = Costs(
        step=0.05, optimizer_s=0.02, together_s=0.01, handle=0.005, parameters=10, reduce_s=lambda ranks: 0.0
    )
    paces = {
        (rule, ranks): simulate(Ranks(algorithm=rule, group_size=ranks, servers=0), costs).batches_per_s
        for rule in (Steady(), Synchronous())
        for ranks in (1, 2)
    }
    assert paces[Steady(), 1] == pytest.approx(1 / 0.05)
    assert paces[Steady(), 2] == pytest.approx(2 / (0.03 + 0.01 + 0.005))
    assert paces[Synchronous(), 2] == pytest.approx(2 / (0.05 + 0.005))


@pytest.mark.parametrize(
    "rule",
    [
        Downpour(),
        Downpour(lag=1),
        Steady(),
        Steady(lag=1),
        Steady(every=4),
        EASGD(every=10),
        Synchronous(),
    ],
)
def test_every_kind_of_exchange_is_rehearsed(rule):
    times = rehearse(rule, 1001, optimizer=Adam(1e-3))
    assert 0 < times.served_s < 5
    assert 0 < times.handled_s < 5


def test_an_optimizer_that_is_needed_is_asked_for():
    with pytest.raises(ConfigurationError, match="needs an optimizer"):
        rehearse(Downpour(), 10)


def test_where_the_centre_steps_workers_spare_their_optimizer():
    costs = Costs(step=0.05, optimizer_s=0.02, parameters=10, latency_s=0, bytes_per_s=1e12)
    rules = (Downpour(), EASGD(every=10))
    paces = [simulate(Ranks(algorithm=rule, workers=1), costs).batches_per_s for rule in rules]
    assert paces == pytest.approx([1 / 0.03, 1 / 0.05], rel=1e-3)
    alone = simulate(Ranks(algorithm=Steady(), servers=0), costs)
    assert alone.batches_per_s == pytest.approx(1 / 0.05, rel=1e-3)


def test_advice_takes_an_exchange_as_it_was_tried():
    facts = example_facts()
    tried = {Steady(): ExchangeTimes(0.5, 0.25, 0.125)}
    advice = Advice(replace(facts, exchanges=tried))
    found, other = advice.costs_of(Steady()), advice.costs_of(Steady(lag=1))
    assert found.commit.mean == pytest.approx(0.5, abs=1e-3)
    assert found.handle.mean == pytest.approx(0.25, abs=1e-3)
    assert (found.together_s, other.together_s) == (0.125, 0)
    assert (other.commit.mean, other.handle.mean) == (advice.costs.commit.mean, advice.costs.handle.mean)
    assert np.isclose(advice.costs_of(Steady(), packing=1.0).commit.mean, found.commit.mean + 1)


def test_the_scripts_own_optimizer_steps_the_centre_where_the_algorithm_has_none():
    facts = replace(example_facts(), optimizer_s=0.5, commit_s=0.1)
    found = {rule: Advice(facts).costs_of(rule).commit.mean for rule in (Downpour(), Steady(), EASGD())}
    assert found[Downpour()] == pytest.approx(0.5, abs=1e-3)
    assert found[Steady()] == found[EASGD()] == pytest.approx(0.1, abs=1e-3)
    quicker = Advice(replace(facts, optimizer_s=0.05))  # a step of the core is part of what was timed
    assert quicker.costs_of(Downpour()).commit.mean == found[Steady()]


def test_the_caches_are_filled_with_something_else_before_each_exchange():
    cluster = _rehearsal._Rehearsal(Downpour(), 10, SGD(0.1))
    cluster.run()
    assert (cluster._between == 5).all()  # the number of the last step: two to warm up, four that count
    assert cluster._between.nbytes >= 1 << 23
