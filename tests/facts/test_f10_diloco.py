"""F10: DiLoCo on a quadratic is a recursion of two terms; its special cases are older algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnlo_common import SGD, Adam, DiLoCo, LocalSGD, Synchronous
from nnlo_common.testing import Interleaved, VirtualRun, train_virtually

SIZE, STEPS = 4, 24
CURVATURE = np.linspace(0.2, 1.4, SIZE)
START = np.linspace(-1.0, 2.0, SIZE, dtype=np.float32)


def minibatches(seed: int = 2) -> Callable[[np.ndarray, int], np.ndarray]:
    """Quadratics whose minimum is another one for each worker and step."""
    minima = np.random.default_rng(seed).standard_normal((8, 400, SIZE))
    drawn = {rank: iter(minima[rank]) for rank in range(8)}
    return lambda x, rank: CURVATURE * (1 + rank / 8) * (x - next(drawn[rank]))


def train(algorithm: Any, gradient: Any = None, start: Any = START, **options: Any) -> VirtualRun:
    return train_virtually(algorithm, gradient or minibatches(), start, **{"steps": STEPS, **options})


def on_one_parabola(rate: float, momentum: float, inner: float, every: int, rounds: int) -> np.ndarray:
    """The centre after each round, with f = x^2 / 2 on two workers and x = 1 at the start."""
    path = [1.0]

    def observe(worker: Any, step: int) -> None:
        if worker.rank == 1 and (step + 1) % every == 0:
            path.append(float(worker.parameters.vector[0]))

    train(
        DiLoCo(every=every),
        lambda x, rank: x,
        [1.0],
        workers=2,
        steps=rounds * every,
        optimizer=SGD(rate, momentum=momentum, nesterov=momentum > 0),
        local=lambda: SGD(inner),
        observe=observe,
    )
    return np.array(path)


def terms(rate: float, momentum: float, q: float) -> tuple[float, float]:
    """A and B of c_{t+1} = A c_t - B c_{t-1}: b <- mu b + q c, c <- c - lr (q c + mu b) without b."""
    return 1 + momentum - rate * q * (1 + momentum), momentum * (1 - rate * q)


# --- the recursion ---------------------------------------------------------------------------------------


def test_the_papers_outer_optimizer_is_the_default() -> None:
    runs = [
        train(DiLoCo(every=3), workers=2, local=lambda: SGD(0.1), optimizer=optimizer)
        for optimizer in (None, SGD(0.7, momentum=0.9, nesterov=True))
    ]
    assert np.array_equal(runs[0].center, runs[1].center)
    assert DiLoCo().every == 500


def test_the_first_rounds_by_hand() -> None:
    """The inner optimizer solves in one step: D = c. b = 1, 0.57, ...; c - 0.7 (D + 0.9 b)."""
    path = on_one_parabola(0.7, 0.9, 1.0, 1, 3)
    np.testing.assert_allclose(path, [1.0, -0.33, -0.4581, -0.172017], rtol=1e-5)


@pytest.mark.parametrize(
    ("rate", "momentum", "inner", "every"),
    [
        (0.7, 0.9, 1.0, 1),  # q = 1
        (0.7, 0.9, 1.0, 5),
        (0.7, 0.9, 0.1, 4),
        (0.7, 0.5, 0.3, 2),
        (0.5, 0.0, 0.2, 3),
        (1.0, 0.9, 0.05, 10),
        (1.2, 0.3, 1.5, 3),  # q > 1
    ],
)
def test_the_centre_follows_the_recursion(rate: float, momentum: float, inner: float, every: int) -> None:
    q = 1 - (1 - inner) ** every
    a, b = terms(rate, momentum, q)
    path = on_one_parabola(rate, momentum, inner, every, 20)
    expected = [1.0, 1 - rate * q * (1 + momentum)]
    while len(expected) < len(path):
        expected.append(a * expected[-1] - b * expected[-2])
    np.testing.assert_allclose(path, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("momentum", "inner", "every"), [(0.9, 1.0, 1), (0.9, 0.1, 8), (0.5, 0.3, 2), (0.0, 0.5, 3)]
)
@pytest.mark.parametrize("share", [0.9, 0.97, 1.03, 1.1])
def test_stable_below_the_limit_and_not_above(
    momentum: float, inner: float, every: int, share: float
) -> None:
    """Stable iff lr q < (2 + 2 mu) / (1 + 2 mu); and the rate of growth is the recursion's."""
    q = 1 - (1 - inner) ** every
    rate = share * (2 + 2 * momentum) / ((1 + 2 * momentum) * q)
    path = np.abs(on_one_parabola(rate, momentum, inner, every, 80))
    assert (path[80] < path[60]) == (share < 1)
    a, b = terms(rate, momentum, q)
    radius = np.abs(np.roots([1, -a, b])).max()
    assert (path[80] / path[40]) ** (1 / 40) == pytest.approx(radius, rel=1e-4)


# --- special cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "every"), [(0.1, 1), (0.1, 7), (0.5, 3), (1.9, 2)])
def test_outer_sgd_with_rate_1_is_federated_averaging(inner: float, every: int) -> None:
    path = on_one_parabola(1.0, 0.0, inner, every, 8)
    np.testing.assert_allclose(path, (1 - inner) ** (every * np.arange(9)), rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("every", [1, 4, STEPS])  # one round of all steps is a soup
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam"])
def test_outer_sgd_with_rate_1_is_local_sgd_whatever_the_inner_optimizer(
    name: str, every: int, workers: int
) -> None:
    """So inner momentum stays with its worker from round to round, as local SGD's does."""
    inner = {"sgd": lambda: SGD(0.1), "momentum": lambda: SGD(0.05, momentum=0.9), "adam": lambda: Adam(0.1)}[
        name
    ]
    diloco = train(DiLoCo(every=every), workers=workers, optimizer=SGD(1.0), local=inner)
    local = train(LocalSGD(every=every), workers=workers, local=inner)
    np.testing.assert_allclose(diloco.center, local.center, rtol=2e-5, atol=2e-6)
    assert np.abs(diloco.center - START).max() > 0.1


@pytest.mark.parametrize(("rate", "momentum"), [(0.1, 0.0), (0.1, 0.9), (0.3, 0.5)])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_rounds_of_one_step_are_nesterov_sgd(workers: int, rate: float, momentum: float) -> None:
    """Inner SGD with rate eta makes D = eta g; outer SGD with rate 1 then steps with eta g."""
    nesterov = {"momentum": momentum, "nesterov": momentum > 0}
    diloco = train(DiLoCo(every=1), workers=workers, optimizer=SGD(1.0, **nesterov), local=lambda: SGD(rate))
    synchronous = train(Synchronous(), workers=workers, optimizer=SGD(rate, **nesterov))
    np.testing.assert_allclose(diloco.center, synchronous.center, rtol=1e-5, atol=2e-6)


def test_displacements_are_weighted() -> None:
    """A round weighs what its steps do: 1 and then twice 1, 2, 5, on displacements of 3 steps of 1, 2, 3."""
    run = train(
        DiLoCo(every=3),
        lambda x, rank: np.float32(rank),
        [0.0],
        workers=3,
        steps=3,
        optimizer=SGD(1.0),
        local=lambda: SGD(1.0),
        observe=lambda worker, step: worker.set_weight({1: 1.0, 2: 2.0, 3: 5.0}[worker.rank]),
    )
    np.testing.assert_allclose(run.center, [-3 * (3 * 1 + 5 * 2 + 11 * 3) / (3 + 5 + 11)], rtol=1e-6)


# --- lag -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_with_lag_no_progress_is_lost_or_counted_twice(every: int, lag: int) -> None:
    """Each round moves rank i by -i H, so with outer rate 1 each moves the centre by the mean."""
    run = train(
        DiLoCo(every=every, lag=lag),
        lambda x, rank: np.float32(rank),
        [0.0],
        workers=3,
        steps=7 * every,
        optimizer=SGD(1.0),
        local=lambda: SGD(1.0),
        schedule=Interleaved(lag),
    )
    np.testing.assert_allclose(run.center, [-2.0 * 7 * every], rtol=1e-6)


@pytest.mark.parametrize(("rate", "momentum"), [(1.0, 0.0), (0.7, 0.9)])
@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_a_late_centre_is_added_to_the_progress_made_since(
    every: int, lag: int, rate: float, momentum: float
) -> None:
    rounds, workers = 9, 3
    moves = np.random.default_rng(13).integers(-8, 9, (rounds, workers)).astype(float)  # per step
    left = {rank: iter(np.repeat(-moves[:, rank - 1], every)) for rank in range(1, workers + 1)}
    seen: list[list[float]] = [[] for _ in range(workers)]
    train(
        DiLoCo(every=every, lag=lag),
        lambda x, rank: next(left[rank]),
        [0.0],
        workers=workers,
        steps=rounds * every,
        optimizer=SGD(rate, momentum=momentum, nesterov=momentum > 0),
        local=lambda: SGD(1.0),
        observe=lambda worker, step: seen[worker.rank - 1].append(float(worker.parameters.vector[0])),
    )
    center, buffer, centers, x = 0.0, 0.0, [], np.zeros(workers)
    for number, move in enumerate(moves * every):
        displacement = -move.mean()
        buffer = momentum * buffer + displacement
        center -= rate * (displacement + momentum * buffer)
        centers.append(center)
        x = x + move
        if number >= lag:
            x = centers[number - lag] + (moves * every)[number - lag + 1 : number + 1].sum(axis=0)
        ends = [track[(number + 1) * every - 1] for track in seen]
        np.testing.assert_allclose(ends, x, rtol=1e-5, atol=1e-4, err_msg=f"after round {number + 1}")
