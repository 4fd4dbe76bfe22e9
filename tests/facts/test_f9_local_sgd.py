"""F9: averaging parameters leaves their mean alone, so on a common Hessian it cannot matter how often."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from nnlo_common import SGD, LocalSGD, Synchronous
from nnlo_common.testing import Interleaved, train_virtually

SIZE, STEPS, RATE = 5, 48, 0.1
ROOT = np.random.default_rng(11).standard_normal((SIZE, SIZE)) / 2
HESSIAN = ROOT @ ROOT.T + 0.2 * np.eye(SIZE)
START = np.linspace(-1.0, 1.0, SIZE, dtype=np.float32)
PULLS = np.random.default_rng(12).standard_normal((STEPS, 5, SIZE))


def minibatches(hessians: Callable[[int], np.ndarray]) -> Callable[[np.ndarray, int], np.ndarray]:
    """H_i x - b: the linear term is another one for each worker and step."""
    pulls = {rank: iter(PULLS[:, rank - 1]) for rank in range(1, 6)}
    return lambda x, rank: hessians(rank) @ x.astype(np.float64) - next(pulls[rank])


def common() -> Callable[[np.ndarray, int], np.ndarray]:
    return minibatches(lambda rank: HESSIAN)


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("every", [1, 3, 5, 7, 16, 48, 50])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_on_a_common_hessian_the_mean_is_minibatch_sgd_for_every_h(
    workers: int, every: int, lag: int
) -> None:
    run = train_virtually(
        LocalSGD(every=every, lag=lag),
        common(),
        START,
        workers=workers,
        steps=STEPS,
        local=lambda: SGD(RATE),
        schedule=Interleaved(every),
        leave=False,  # where a round is not over, the parameters are far apart; their mean is not
    )
    x = START.astype(np.float64)
    for step in range(STEPS):
        x -= RATE * (HESSIAN @ x - PULLS[step, :workers].mean(axis=0))
    np.testing.assert_allclose(np.mean(run.parameters, axis=0), x, rtol=0, atol=6e-7)
    spread = np.ptp(run.parameters, axis=0).max()
    assert (spread == 0) == (workers == 1 or (lag == 0 and STEPS % every == 0))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_averaging_after_every_step_is_synchronous_sgd(workers: int) -> None:
    def hessian(rank: int) -> np.ndarray:
        return HESSIAN * (1 + rank / 4)

    runs = [
        train_virtually(
            algorithm,
            minibatches(hessian),
            START,
            workers=workers,
            steps=STEPS,
            optimizer=optimizer,
            local=local,
        )
        for algorithm, optimizer, local in [
            (LocalSGD(every=1), None, lambda: SGD(RATE)),
            (Synchronous(), SGD(RATE), None),
        ]
    ]
    np.testing.assert_allclose(runs[0].center, runs[1].center, rtol=1e-6, atol=1e-6)
    assert runs[0].servers[0].rule.clock == runs[1].servers[0].rule.clock == STEPS


@pytest.mark.parametrize(
    ("every", "warmup", "averages"),
    [
        # After 1, 2, 3, ... steps.
        (4, 3, [1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5]),
        (3, 0, [0, 0, 1, 1, 1, 2, 2, 2, 3]),
        (1, 2, [1, 2, 3, 4]),
        (5, 1, [1, 1, 1, 1, 1, 2]),
        (2, 9, [1, 2, 3, 4, 5]),
    ],
)
def test_warm_up_averages_every_step_and_then_every_h(every: int, warmup: int, averages: list[int]) -> None:
    seen: list[int] = []
    run = train_virtually(
        LocalSGD(every=every, warmup=warmup),
        common(),
        START,
        workers=2,
        steps=len(averages),
        local=lambda: SGD(RATE),
        observe=lambda worker, step: (
            seen.append(worker.shard_clients[0].pulled_at) if worker.rank == 1 else None
        ),
    )
    assert seen == averages
    assert run.servers[0].rule.clock == averages[-1]


@pytest.mark.parametrize(("every", "warmup"), [(1, 0), (4, 0), (5, 3)])
def test_momentum_stays_with_its_worker(every: int, warmup: int) -> None:
    run = train_virtually(
        LocalSGD(every=every, warmup=warmup),
        common(),
        START,
        workers=3,
        steps=STEPS,
        local=lambda: SGD(RATE, momentum=0.8),
    )
    x, velocity = np.tile(START.astype(np.float64), (3, 1)), np.zeros((3, SIZE))
    for step in range(1, STEPS + 1):
        velocity = 0.8 * velocity + x @ HESSIAN - PULLS[step - 1, :3]
        x = x - RATE * velocity
        if step <= warmup or (step - warmup) % every == 0:
            x[:] = x.mean(axis=0)
    np.testing.assert_allclose(run.parameters, x, rtol=0, atol=3e-6)


@pytest.mark.parametrize("counts", [(9, 4, 2), (0, 6, 6), (1, 1, 8)], ids=str)
def test_who_has_left_is_no_longer_averaged(counts: tuple[int, ...]) -> None:
    """Each step of rank i moves it by i; every second step is averaged over those who make it."""
    run = train_virtually(
        LocalSGD(every=2),
        lambda x, rank: np.float32(-rank),
        [0.0],
        workers=3,
        steps=counts,
        local=lambda: SGD(1.0),
        schedule=Interleaved(3),
    )
    center = 0.0
    for done in range(2, max(counts) + 1, 2):
        center += np.mean([2 * rank for rank, count in enumerate(counts, start=1) if count >= done])
    np.testing.assert_allclose(run.center, [center], rtol=1e-6)


# --- lag -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_with_lag_workers_that_stand_still_agree_on_their_mean(lag: int) -> None:
    begin = [[1.0], [2.0], [6.0]]
    run = train_virtually(
        LocalSGD(every=1, lag=lag),
        lambda x, rank: 0 * x,
        [0.0],
        workers=3,
        steps=12,
        local=lambda: SGD(RATE),
        begin=begin,
    )
    np.testing.assert_allclose(run.parameters, [[3.0]] * 3, rtol=1e-6)
    np.testing.assert_allclose(run.center, [3.0], rtol=1e-6)


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_a_late_mean_is_added_to_the_progress_made_since(every: int, lag: int) -> None:
    """Where x_i stood at the end of round k is replaced by its mean; what came after is kept."""
    rounds, workers = 9, 3
    moves = np.random.default_rng(13).integers(-8, 9, (rounds * every, workers)).astype(float)
    left = {rank: iter(-moves[:, rank - 1]) for rank in range(1, workers + 1)}
    seen: list[list[float]] = [[] for _ in range(workers)]
    train_virtually(
        LocalSGD(every=every, lag=lag),
        lambda x, rank: next(left[rank]),
        [0.0],
        workers=workers,
        steps=rounds * every,
        local=lambda: SGD(1.0),
        observe=lambda worker, step: seen[worker.rank - 1].append(float(worker.parameters.vector[0])),
    )
    x, ends, expected = np.zeros(workers), [], []
    for step, move in enumerate(moves):
        x = x + move
        if (step + 1) % every == 0:
            ends.append((step, x))
            if len(ends) > lag:
                then, stood = ends[-1 - lag]
                x = stood.mean() + moves[then + 1 : step + 1].sum(axis=0)
        expected.append(x)
    np.testing.assert_allclose(np.transpose(seen), expected, rtol=1e-5, atol=1e-4)
