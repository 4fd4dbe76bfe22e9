"""F5: how old contributions are, under any order, and what that does to the mean of all random orders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import SGD
from nnlo_common.algorithms import EASGD, GEM, Algorithm, Downpour, DynSGD
from nnlo_common.testing import RandomOrder, Replay, Schedule, VirtualRun, train_virtually
from nnlo_common.testing._schedules import PendingRequest
from tests.helpers.centers import SCHEDULES, watched_centers

RULES: dict[str, Algorithm] = {
    "downpour": Downpour(),
    "dynsgd": DynSGD(),
    "easgd": EASGD(every=1),
    "paper": EASGD(every=1, alpha=0.5, order="paper"),
    "gem": GEM(),
}


class Until:
    """Another schedule, cut off after `requests` requests, so that nobody runs out of steps before."""

    def __init__(self, schedule: Schedule, requests: int) -> None:
        self.schedule, self.left = schedule, requests

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        self.left -= 1
        return self.schedule.choose(waiting) if self.left >= 0 else None


def train(algorithm: Algorithm, p: int, steps: int | list[int], **options: object) -> VirtualRun:
    return train_virtually(
        algorithm,
        lambda x, rank: x - rank,
        [0.0],
        workers=p,
        steps=steps,
        optimizer=SGD(0.01) if algorithm.optimizer_runs == "center" else None,
        local=lambda: SGD(0.01),
        **options,
    )


def clocks(run: VirtualRun, steps: Sequence[int], *, requests_per_step: int = 1) -> dict[int, list[int]]:
    """For each worker the centre's clock after its join and after each of its commits.

    From nothing but the order in which requests were handled: a worker's first is its join, then each step
    has one, or a lock and its commit, and the last is its leave.
    """
    clock, requests, clocks = 0, Counter(), {}
    for rank in run.trace[0]:
        request = requests[rank]
        requests[rank] += 1
        if request == 0:
            clocks[rank] = [clock]
        elif request <= requests_per_step * steps[rank - 1] and request % requests_per_step == 0:
            clock += 1
            clocks[rank].append(clock)
    return clocks


def told_by_the_order(clocks: dict[int, list[int]], lag: int = 0) -> Counter[int]:
    """The staleness of every commit: a worker's k-th uses what it got at its (k-1-lag)-th, or joining."""
    return Counter(
        after - 1 - own[max(k - lag, 0)] for own in clocks.values() for k, after in enumerate(own[1:])
    )


def ages(run: VirtualRun) -> int:
    """The sum of staleness + 1 over all commits."""
    return sum((staleness + 1) * count for staleness, count in run.servers[0].staleness.items())


@pytest.mark.slow
@settings(max_examples=200)
@given(
    rule=st.sampled_from(sorted(RULES)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    seed=st.integers(0, 999),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_it_telescopes_to_the_last_commits(rule: str, schedule: str, seed: int, steps: list[int]) -> None:
    run = train(RULES[rule], len(steps), steps, schedule=SCHEDULES[schedule](seed))
    (server,) = run.servers
    own = clocks(run, steps, requests_per_step=2 if rule == "gem" else 1)
    assert server.rule.clock == sum(steps) == sum(server.staleness.values())
    assert server.staleness == told_by_the_order(own)

    last = {rank: peer.last_commit for rank, peer in server.peers.items()}
    assert last == {rank: after[-1] if after[1:] else 0 for rank, after in own.items()}
    if schedule == "interleaved":  # who joins late has missed nothing: only there do some commit before
        assert ages(run) == sum(after[-1] - after[0] for after in own.values())
    else:
        assert ages(run) == sum(last.values())


@pytest.mark.slow
@settings(max_examples=150)
@given(
    rule=st.sampled_from(["downpour", "dynsgd", "easgd", "paper"]),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    seed=st.integers(0, 999),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    lag=st.integers(1, 3),
)
def test_with_a_pipeline_it_telescopes_to_the_last_lag_plus_one(
    rule: str, schedule: str, seed: int, steps: list[int], lag: int
) -> None:
    run = train(replace(RULES[rule], lag=lag), len(steps), steps, schedule=SCHEDULES[schedule](seed))
    own = clocks(run, steps)
    assert run.servers[0].staleness == told_by_the_order(own, lag)
    ends = [(join, after[-lag - 1 :]) for join, *after in own.values()]
    assert ages(run) == sum(sum(last) - len(last) * join for join, last in ends)


@pytest.mark.parametrize(("p", "lag"), [(1, 0), (2, 0), (5, 0), (16, 0), (1, 1), (1, 3), (3, 2), (4, 1)])
def test_mean_staleness_in_turn(p: int, lag: int) -> None:
    """Towards (lag + 1) p - 1, which is p - 1 without a pipeline."""
    steps = 40
    run = train(Downpour(lag=lag), p, steps)
    # The last lag + 1 rounds, in each of which worker i makes commit (round p + i).
    last = sum(p * turn + i for turn in range(steps - 1 - lag, steps) for i in range(1, p + 1))
    assert ages(run) == last
    missing = (lag + 1) * (p * (1 + Fraction(lag, 2)) - Fraction(p + 1, 2)) / steps
    assert Fraction(ages(run), p * steps) - 1 == (lag + 1) * p - 1 - missing
    full = (lag + 1) * p - 1
    assert run.servers[0].staleness == Counter([*range(full), *[full] * (p * steps - full)])


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 4, 8])
def test_a_random_order_makes_it_geometric(p: int) -> None:
    commits = 10_000
    run = train(
        Downpour(), p, commits, schedule=Until(RandomOrder(12), p + commits), leave=False, check=False
    )
    counts = run.servers[0].staleness
    assert sum(counts.values()) == commits
    mean = ages(run) / commits - 1
    assert mean == pytest.approx(p - 1, abs=0.01 * p)

    def chi_square(q: float) -> tuple[float, int]:
        expected = {k: commits * q * (1 - q) ** k for k in range(commits) if q * (1 - q) ** k * commits > 10}
        tail = commits - sum(expected.values()), commits - sum(counts[k] for k in expected)
        terms = [(counts[k] - value) ** 2 / value for k, value in expected.items()]
        return sum(terms) + (tail[1] - tail[0]) ** 2 / tail[0], len(terms)

    value, freedom = chi_square(1 / p)
    assert abs(value - freedom) < 4 * math.sqrt(2 * freedom)
    value, freedom = chi_square(1 / (1.1 * p))
    assert value - freedom > 4 * math.sqrt(2 * freedom)  # it would see another distribution


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(("p", "commits"), [(1, 10), (2, 10), (3, 6), (4, 5)])
def test_the_mean_of_all_orders_is_heavy_ball(p: int, commits: int) -> None:
    """With each worker served next with probability 1/p: Mitliagkas et al. 2016, for linear gradients.

    E x_{t+1} - E x_t = (1 - 1/p) (E x_t - E x_{t-1}) - (eta / p) h E x_t, after x_1 = x_0 - eta h x_0.
    Exact, because all orders are gone through, and all values are dyadic fractions that float32 holds.
    """
    rate, h = 0.5, np.array([0.5, 1, 1.5, 3])
    total = np.zeros((commits, h.size))
    joins = list(range(1, p + 1))
    for order in product(joins, repeat=commits):
        with watched_centers() as trail:
            train_virtually(
                Downpour(),
                lambda x, rank: h * x,
                np.ones(4),
                workers=p,
                steps=commits + 1,
                optimizer=SGD(rate),
                schedule=Replay({0: [*joins, *order]}),
                check=False,
            )
        total += trail
    path = [np.ones(4), *total / p**commits]
    mean, velocity = path[1], -rate * h * path[0]
    np.testing.assert_allclose(mean - path[0], velocity, rtol=1e-15)
    for expected in path[2:]:
        velocity = (1 - 1 / p) * velocity - rate / p * h * mean
        mean = mean + velocity
        np.testing.assert_allclose(expected, mean, rtol=1e-13, atol=1e-15)
