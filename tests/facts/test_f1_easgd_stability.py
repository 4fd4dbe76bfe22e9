"""F1: where EASGD is stable on f = h x^2 / 2, with e = learning rate * h and moving rate alpha.

The rules are linear there, so that a run shows its whole map: one coordinate for each unit vector of the
state (c, x_1, ..., x_p), and one such group for each e.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest

from nnlo_common import SGD
from nnlo_common.algorithms import EASGD
from nnlo_common.testing import train_virtually
from tests.helpers.centers import Matrix, elastic_period, radius

LEARNING_RATE = 0.5
ORDERS = ("paper", "step_first")


def states(
    algorithm: EASGD, e: Sequence[float], start: Matrix, *, periods: int, check: bool = False
) -> Matrix:
    """What a run makes of `start`: rows are c, x_1, ..., x_p; each column has its own e."""
    slope = np.asarray(e, np.float32) / np.float32(LEARNING_RATE)
    run = train_virtually(
        algorithm,
        lambda x, rank: slope * x,
        start[0],
        begin=start[1:],
        workers=len(start) - 1,
        steps=algorithm.every * periods,
        local=lambda: SGD(LEARNING_RATE),
        check=check,
    )
    return np.array([run.center, *run.parameters], np.float64)


def own_maps(algorithm: EASGD, p: int, e: Sequence[float], *, periods: int) -> list[Matrix]:
    """The (p + 1) x (p + 1) map of a run over `periods` periods, for each e."""
    units = np.tile(np.eye(p + 1), len(e))
    ends = states(algorithm, np.repeat(e, p + 1), units, periods=periods, check=True)
    return np.split(ends, len(e), axis=1)


def turns(algorithm: EASGD, p: int, e: float, alpha: float) -> tuple[float, float]:
    """By how much a run shrinks or grows a state, and by how much its spectral radius says it does.

    The run is as long as a factor of 1e4 takes.
    """
    contraction = radius(
        elastic_period(
            p, e, alpha, tau=algorithm.every, order=algorithm.order, synchronous=algorithm.synchronous
        )[0]
    )
    periods = math.ceil(math.log(1e4) / abs(math.log(contraction)))
    start = np.random.default_rng(p).standard_normal((p + 1, 1))
    end = states(algorithm, [e], start, periods=periods)
    return float(np.abs(end).max() / np.abs(start).max()), contraction**periods


def assert_the_run_turns(p: int, e: float, stable: float, unstable: float, **options: object) -> None:
    """A run at alpha=`stable` converges, one at `unstable` diverges, and the map says so too."""
    for alpha, converges in ((stable, True), (unstable, False)):
        run, expected = turns(EASGD(alpha=alpha, **options), p, e, alpha)
        assert (expected < 1) is converges, (alpha, expected)
        assert run < 1e-2 if converges else run > 1e2, (alpha, run)


def boundary(stable: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where `stable` stops to hold, by bisection."""
    assert stable(inside)
    assert not stable(outside)
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if stable(middle) else (inside, middle)
    return inside


def critical_alpha(p: int, e: float, **options: object) -> float:
    return boundary(lambda alpha: radius(elastic_period(p, e, alpha, **options)[0]) < 1, 1e-3, 3.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_a_run_goes_by_the_composed_map(p: int, tau: int, order: str, synchronous: bool) -> None:
    e = [0.1, 0.3, 1.8, 1.95]
    for alpha in (0.6 / p, 0.2):
        algorithm = EASGD(every=tau, alpha=alpha, order=order, synchronous=synchronous)
        maps = [
            elastic_period(p, value, alpha, tau=tau, order=order, synchronous=synchronous)[0] for value in e
        ]
        for own, expected in zip(own_maps(algorithm, p, e, periods=1), maps, strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6)
        for own, once in zip(own_maps(algorithm, p, e, periods=50), maps, strict=True):
            expected = np.linalg.matrix_power(once, 50)
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
            # The contraction per period that the run itself shows.
            assert radius(own) ** (1 / 50) == pytest.approx(radius(once), rel=2e-6)


def paper_limit(p: int, e: float) -> float:
    """Synchronous, order of the paper: beta below this, from the sum of all workers' deviations."""
    return (4 - 2 * e) / (2 - e + 2 / p)


def step_first_limit(p: int, e: float) -> float:
    """Synchronous, step first: from 1 + trace + det > 0 and det < 1 of the map of (c, mean x)."""
    flip = 1 + (1 - e) * (1 + 2 / p)
    return min((4 - 2 * e) / flip if flip > 0 else np.inf, p * e / ((p + 1) * (e - 1)) if e > 1 else np.inf)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("order", "p", "e"),
    [
        *product(["paper"], [1, 2, 4], [0.5, 1.0, 1.5, 1.8]),
        *product(["paper"], [2, 4], [0.1]),
        *product(["step_first"], [2, 3, 4], [0.1, 0.5, 1.9]),
        *product(["step_first"], [3, 4], [1.5]),
    ],
)
def test_synchronous_limit(order: str, p: int, e: float) -> None:
    beta = paper_limit(p, e) if order == "paper" else step_first_limit(p, e)
    assert critical_alpha(p, e, order=order, synchronous=True) == pytest.approx(beta / p, rel=1e-6)
    if order == "paper":
        assert beta / p < 2 - e  # differences between workers: never the tighter condition
    assert_the_run_turns(p, e, 0.9 * beta / p, 1.1 * beta / p, order=order, synchronous=True, every=1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("p", "e"), list(product([1, 2, 3, 4, 5, 6], [0.5, 1.0, 1.5, 1.8])))
def test_limit_in_turn_in_the_order_of_the_paper(p: int, e: float) -> None:
    pairwise = (4 - 2 * e) / (4 - e)
    limit = critical_alpha(p, e, order="paper")
    if p % 2:
        # (c, x) = (u, w) with eigenvalue -1 makes (u, w, -w, w, ...) flip its sign in a turn of odd p.
        assert limit == pytest.approx(pairwise, rel=1e-6)
    else:
        assert limit > 1.00005 * pairwise  # symmetric maps: what is stable in pairs is stable in any turn
    assert_the_run_turns(p, e, 0.9 * limit, 1.1 * limit, order="paper", every=1)


@pytest.mark.parametrize(
    ("p", "e", "tau"), [(2, 1.5, 2), (2, 1.9, 2), (4, 1.9, 4), (3, 1.2, 1), (3, 1.9, 2), (1, 1.9, 3)]
)
def test_limit_in_turn_with_steps_between_exchanges(p: int, e: float, tau: int) -> None:
    limit = critical_alpha(p, e, order="paper", tau=tau)
    assert_the_run_turns(p, e, 0.9 * limit, 1.1 * limit, order="paper", every=tau)


@pytest.mark.parametrize("e", [2.1, 2.2])
def test_one_worker_that_steps_first_is_held_by_the_center_even_beyond_2(e: float) -> None:
    low, high = (4 - 2 * e) / (4 - 3 * e), e / (2 * (e - 1))
    assert_the_run_turns(1, e, 1.1 * low, 0.9 * low, order="step_first", every=1)
    assert_the_run_turns(1, e, 0.97 * high, 1.03 * high, order="step_first", every=1)
    for alpha in (0.1, 0.5, 0.9):
        run, _ = turns(EASGD(every=1, alpha=alpha, order="paper"), 1, e, alpha)
        assert run > 1e2


@pytest.mark.parametrize(
    ("p", "synchronous", "limit"),
    [(1, False, 4 / 11), (1, True, 4 / 11), (2, True, 13 / 11), (2, False, None), (4, True, 35 / 22)],
)
def test_the_default_beta_diverges_with_few_workers_in_the_order_of_the_paper(
    p: int, synchronous: bool, limit: float | None
) -> None:
    found = boundary(
        lambda e: radius(elastic_period(p, e, 0.9 / p, order="paper", synchronous=synchronous)[0]) < 1,
        0.1,
        2.0,
    )
    assert found == pytest.approx(limit or 1.448032, rel=1e-6)
    for e, order, converges in (
        (0.95 * found, "paper", True),
        (1.05 * found, "paper", False),
        (0.95 * found, "step_first", True),
        (1.05 * found, "step_first", True),
    ):
        run, _ = turns(EASGD(every=1, order=order, synchronous=synchronous), p, e, 0.9 / p)
        assert run < 1e-2 if converges else run > 1e2, (e, order)


def test_the_divergence_of_the_default_has_the_predicted_speed() -> None:
    algorithm = EASGD(every=1, order="paper")
    start = np.array([[0.0], [1.0]])
    early, late = (states(algorithm, [0.5], start, periods=periods) for periods in (100, 150))
    assert ((late / early) ** (1 / 50)).ravel() == pytest.approx([1.084077] * 2, rel=1e-5)
