"""F11: accumulated gradient normalization commits the mean of the gradients that it met on its way."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import AGN, SGD, Adam, Downpour
from nnlo_common.testing import Interleaved, train_virtually


@pytest.mark.parametrize("local", [0.0, 0.25, 3.0])
@pytest.mark.parametrize("every", [1, 2, 3, 7, 10])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_constant_gradient_is_committed_as_it_is(workers: int, every: int, local: float) -> None:
    """-eta g for each push, exactly, whatever lambda and however far the worker strays."""
    gradient, rounds = np.array([1.0, -0.5, 3.0]), 4
    run = train_virtually(
        AGN(every=every, local_learning_rate=local),
        lambda x, rank: gradient,
        np.zeros(3),
        workers=workers,
        steps=rounds * every + every // 2,  # what is accumulated of a round that is not over is not pushed
        optimizer=SGD(0.25),
    )
    assert np.array_equal(run.center, -0.25 * rounds * workers * gradient)
    assert run.servers[0].rule.clock == rounds * workers


@pytest.mark.parametrize("curvature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("every", "rate"), [(1, 0.1), (2, 0.5), (5, 0.1), (12, 0.05), (3, 1.0)])
def test_a_linear_gradient_is_committed_as_a_geometric_mean_of_the_way(
    every: int, rate: float, curvature: float
) -> None:
    """The commit is -(1 - (1 - eta h)^lambda) / lambda of the centre."""
    rounds = 6
    run = train_virtually(
        AGN(every=every, local_learning_rate=rate),
        lambda x, rank: curvature * x,
        [1.0],
        workers=1,
        steps=rounds * every,
        optimizer=SGD(rate),
    )
    commit = (1 - (1 - rate * curvature) ** every) / every
    np.testing.assert_allclose(run.center, [(1 - commit) ** rounds], rtol=1e-5)


@pytest.mark.parametrize("every", [1, 4])
def test_without_local_steps_the_gradients_are_merely_averaged(every: int) -> None:
    run = train_virtually(
        AGN(every=every, local_learning_rate=0.0),
        lambda x, rank: x,
        [1.0],
        workers=1,
        steps=5 * every,
        optimizer=SGD(0.25),
    )
    np.testing.assert_allclose(run.center, [0.75**5], rtol=1e-6)


@pytest.mark.parametrize("optimizer", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.1)])
@pytest.mark.parametrize("lag", [0, 2])
def test_lambda_1_is_downpour_bit_for_bit(optimizer, lag: int) -> None:
    slopes = np.linspace(0.1, 1.0, 6)
    centers = [
        train_virtually(
            algorithm,
            lambda x, rank: slopes * (x - rank),
            np.ones(6),
            workers=3,
            steps=20,
            optimizer=optimizer(),
            schedule=Interleaved(4),
        ).center
        for algorithm in (
            AGN(every=1, local_learning_rate=0.1, lag=lag),
            Downpour(local_learning_rate=0.1, lag=lag),
        )
    ]
    assert np.array_equal(*centers)
    assert np.abs(centers[0] - 1).max() > 0.1


@pytest.mark.parametrize(("workers", "every", "rate"), [(2, 3, 0.1), (4, 2, 0.2)])
def test_several_workers_in_turn(workers: int, every: int, rate: float) -> None:
    """Algorithm 1 in ten lines of float32: explore from the centre, commit the mean, start again from it."""
    slopes, start = np.linspace(0.1, 1.0, 6, dtype=np.float32), np.ones(6, np.float32)
    run = train_virtually(
        AGN(every=every, local_learning_rate=rate),
        lambda x, rank: slopes * (x - np.float32(rank)),
        start,
        workers=workers,
        steps=5 * every,
        optimizer=SGD(rate),
    )
    center, pulled = start.copy(), [start.copy() for _ in range(workers)]
    for _ in range(5):
        for rank in range(1, workers + 1):
            x, total = pulled[rank - 1], np.zeros(6, np.float32)
            for _ in range(every):
                gradient = slopes * (x - np.float32(rank))
                total += gradient
                x = x - np.float32(rate) * gradient
            center = center - np.float32(rate) * (total / np.float32(every))
            pulled[rank - 1] = center
    assert np.array_equal(run.center, center)
