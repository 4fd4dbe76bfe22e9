"""F4: served in turn, p workers with L replies under way each are SGD whose gradients are (L+1) p - 1 old."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from nnlo_common import SGD
from nnlo_common.algorithms import Algorithm, Downpour, DynSGD, Synchronous
from nnlo_common.testing import train_virtually
from tests.helpers.centers import SCHEDULES, Matrix, radius, watched_centers

Vector = NDArray[np.float32]

START = np.linspace(-1.5, 2, 37, dtype=np.float32)
CASES = [(1, 0), (2, 0), (3, 0), (7, 0), (1, 1), (1, 2), (1, 5), (2, 1), (3, 1), (2, 3), (3, 2)]


def slope(x: Vector, rank: int = 0) -> Vector:
    return x / (np.float32(0.5) + x * x)  # bounded


def sgd_with_delay(
    step_gradient: Callable[[Vector, int], Vector], delay: int, steps: int, rate: float, momentum: float = 0.0
) -> list[Vector]:
    """x_{t+1} = x_t - rate b_{t+1}, b_{t+1} = momentum b_t + g(x_{t-delay}), with x_0 for what was before."""
    path, buffer = [START], np.zeros_like(START)
    for t in range(steps):
        buffer = buffer * np.float32(momentum) + step_gradient(path[max(t - delay, 0)], t)
        path.append(path[-1] - np.float32(rate) * buffer)
    return path[1:]


def limit(delay: int) -> float:
    """x_{t+1} = x_t - a x_{t-delay} is stable iff 0 < a < this."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def companion(a: float, delay: int) -> Matrix:
    matrix = np.eye(delay + 1, k=-1)
    matrix[0, 0] += 1
    matrix[0, delay] -= a
    return matrix


def commits(algorithm: Algorithm, p: int, count: int, rate: float, momentum: float = 0.0) -> list[Matrix]:
    """The first `count` centres of a run."""
    with watched_centers() as trail:
        train_virtually(
            algorithm,
            slope,
            START,
            workers=p,
            steps=-(-count // p),
            optimizer=SGD(rate, momentum=momentum),
        )
    return trail[:count]


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize(("p", "lag"), CASES)
def test_downpour_in_turn_is_delayed_sgd_bit_for_bit(p: int, lag: int, momentum: float) -> None:
    own = commits(Downpour(lag=lag), p, 60, 0.05, momentum)
    expected = sgd_with_delay(lambda x, t: slope(x), (lag + 1) * p - 1, 60, 0.05, momentum)
    assert np.array_equal(own, expected)
    assert len({center.tobytes() for center in own}) == 60  # it moves to the end
    # And another delay is another path.
    other = sgd_with_delay(lambda x, t: slope(x), (lag + 1) * p, 60, 0.05, momentum)
    assert not np.array_equal(own, other)


@pytest.mark.parametrize(("p", "every"), [(1, 2), (2, 3), (5, 2)])
def test_aligned_downpour_is_delayed_sgd_on_sums_of_gradients(p: int, every: int) -> None:
    algorithm = Downpour(n_push=every, n_fetch=every, schedule="aligned")
    with watched_centers() as own:
        train_virtually(algorithm, slope, START, workers=p, steps=every * 8, optimizer=SGD(0.02))
    expected = sgd_with_delay(lambda x, t: sum([slope(x)] * every), p - 1, 8 * p, 0.02)
    assert np.array_equal(own, expected)


@pytest.mark.parametrize(("p", "lag"), CASES)
def test_dynsgd_in_turn_divides_by_its_delay_plus_one_bit_for_bit(p: int, lag: int) -> None:
    delay = (lag + 1) * p - 1
    own = commits(DynSGD(lag=lag), p, 60, 0.3)
    expected = sgd_with_delay(lambda x, t: slope(x) / np.float32(min(t, delay) + 1), delay, 60, 0.3)
    assert np.array_equal(own, expected)


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_synchronous_gradient_lag_is_sgd_with_that_delay_bit_for_bit(p: int, lag: int) -> None:
    """The mean over the workers, each with its own data, of gradients that are `lag` steps old."""

    def own_slope(x: Vector, rank: int) -> Vector:
        return slope(x) - np.float32(rank)

    with watched_centers() as own:
        run = train_virtually(
            Synchronous(lag=lag), own_slope, START, workers=p, steps=40, optimizer=SGD(0.05)
        )
    mean = sgd_with_delay(
        lambda x, t: sum(own_slope(x, rank) for rank in range(1, p + 1)) / np.float32(p), lag, 40, 0.05
    )
    assert np.array_equal(own, mean)
    assert run.servers[0].staleness == {
        staleness: p * count for staleness, count in [*((early, 1) for early in range(lag)), (lag, 40 - lag)]
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize(("algorithm", "p"), [(Downpour, 1), (DynSGD, 1), (Synchronous, 1), (Synchronous, 3)])
def test_the_delay_depends_on_no_timing_and_on_no_number_of_servers(
    algorithm: type[Algorithm], p: int, lag: int, schedule: str
) -> None:
    """A reply that comes early, of one server or of all, still counts only `lag` exchanges later."""
    run = train_virtually(
        algorithm(lag=lag),
        slope,
        np.split(START, [7, 20]),
        workers=p,
        servers=3,
        steps=25,
        optimizer=SGD(0.05),
        schedule=SCHEDULES[schedule](lag),
    )

    def gradient(x: Vector, t: int) -> Vector:
        g = sum([slope(x)] * p) / np.float32(p)
        return g / np.float32(min(t, lag) + 1) if algorithm is DynSGD else g

    assert np.array_equal(run.center, sgd_with_delay(gradient, lag, 25, 0.05)[-1])


@pytest.mark.parametrize("delay", [*range(9), 11, 15])
def test_the_closed_form_is_where_the_recursion_turns(delay: int) -> None:
    assert radius(companion(limit(delay), delay)) == pytest.approx(1, abs=1e-7)
    assert radius(companion(0.99 * limit(delay), delay)) < 1 < radius(companion(1.01 * limit(delay), delay))


def test_the_first_limits() -> None:
    assert [limit(delay) for delay in range(3)] == pytest.approx([2, 1, 0.618033989], rel=1e-9)
    assert all(later < earlier for earlier, later in pairwise(map(limit, range(20))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("algorithm", "p", "factor"),
    [
        *((Downpour(lag=lag), p, 1) for p, lag in CASES),
        *((DynSGD(lag=lag), p, (lag + 1) * p) for p, lag in CASES),
        *((Synchronous(lag=lag), 2, 1) for lag in (0, 1, 2)),
    ],
    ids=str,
)
def test_a_run_turns_there_too(algorithm: Algorithm, p: int, factor: int) -> None:
    """With h = 1 and a learning rate 5 % below and 5 % above the limit, side by side."""
    synchronous = isinstance(algorithm, Synchronous)
    delay = algorithm.lag if synchronous else (algorithm.lag + 1) * p - 1
    h = np.float32(factor * limit(delay)) * np.array([0.95, 1.05], np.float32)
    slowest = min(abs(math.log(radius(companion(a * limit(delay), delay)))) for a in (0.95, 1.05))
    count = math.ceil(math.log(1e4) / slowest)
    with watched_centers() as trail:
        train_virtually(
            algorithm,
            lambda x, rank: h * x,
            [1.0, 1.0],
            workers=p,
            steps=count if synchronous else -(-count // p),
            optimizer=SGD(1.0),
            check=False,
        )
    below, above = np.abs(trail[-2 * (delay + 1) :]).max(0)
    assert below < 1e-2
    assert above > 1e2
