"""F12: DynSGD divides a push by its staleness plus one, exactly; one worker is never stale."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from nnlo_common import SGD, Adam, Downpour, DynSGD
from nnlo_common.testing import Interleaved, Replay, train_virtually


def slope(x: np.ndarray, rank: int) -> np.ndarray:
    return 0 * x + 1


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("optimizer", [lambda: SGD(0.1, momentum=0.9), lambda: Adam(0.1)])
def test_one_worker_is_downpour_bit_for_bit(optimizer, every: int) -> None:
    slopes = np.linspace(0.1, 1.0, 6)
    centers = [
        train_virtually(
            algorithm, lambda x, rank: slopes * x, np.ones(6), workers=1, steps=20, optimizer=optimizer()
        ).center
        for algorithm in (DynSGD(every=every), Downpour(n_push=every, n_fetch=every, schedule="aligned"))
    ]
    assert np.array_equal(*centers)
    assert np.abs(centers[0] - 1).max() > 0.1


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stale", [0, 1, 2, 5, 6, 13])
def test_staleness_k_divides_by_k_plus_1(stale: int, every: int) -> None:
    """Rank 1 takes the centre, rank 2 commits k times, then rank 1 commits: into a coordinate of its own."""
    run = train_virtually(
        DynSGD(every=every),
        lambda x, rank: np.eye(2)[rank - 1],
        np.zeros(2),
        workers=2,
        steps=[every, stale * every],
        optimizer=SGD(1.0),
        schedule=Replay({0: [1, 2, *[2] * stale, 1]}),
    )
    assert np.array_equal(run.center, -np.float32([every, every]) / np.float32([stale + 1, 1]) * [1, stale])
    assert run.servers[0].staleness == Counter([0] * stale + [stale])


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_in_turns_each_worker_gets_its_share_of_one_step(workers: int) -> None:
    """The first turn sees staleness 0, 1, ..., p - 1 and moves by 1 + 1/2 + ... + 1/p; then each p - 1."""
    turns = 6
    run = train_virtually(DynSGD(), slope, [0.0], workers=workers, steps=turns, optimizer=SGD(1.0))
    first = sum(Fraction(1, k) for k in range(1, workers + 1))
    np.testing.assert_allclose(run.center, [-float(first + turns - 1)], rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("lag", [0, 2])
def test_every_push_is_divided_by_the_staleness_that_is_counted(seed: int, lag: int) -> None:
    """Each push has a coordinate of its own, so that the centre shows what it was divided by."""
    workers, steps = 4, 6
    pushes = iter(np.eye(workers * steps, dtype=np.float32))
    run = train_virtually(
        DynSGD(lag=lag),
        lambda x, rank: next(pushes),
        np.zeros(workers * steps),
        workers=workers,
        steps=steps,
        optimizer=SGD(1.0),
        schedule=Interleaved(seed),
    )
    divisors = 1 / -run.center.astype(np.float64)
    np.testing.assert_allclose(divisors, divisors.round(), rtol=1e-6)
    assert Counter((divisors.round() - 1).astype(int).tolist()) == run.servers[0].staleness
    assert len(run.servers[0].staleness) > 2
