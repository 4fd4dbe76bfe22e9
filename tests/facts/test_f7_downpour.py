"""F7: Downpour with one worker is its server's optimizer, and its schedule is Dean's, line by line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from nnlo_common import SGD, Adadelta, Adagrad, Adam, Downpour, LookaheadMomentum, RMSprop, VectorOptimizer
from nnlo_common.testing import Interleaved, VirtualRun, train_virtually

SIZE, STEPS = 12, 40
CURVATURE = np.linspace(0.1, 2.0, SIZE, dtype=np.float32)
START = np.linspace(-1.0, 3.0, SIZE, dtype=np.float32)
OPTIMIZERS: dict[str, Callable[[], VectorOptimizer]] = {
    "sgd": lambda: SGD(0.1, weight_decay=0.01),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "lookahead": lambda: LookaheadMomentum(0.1, momentum=0.8),
    "adagrad": lambda: Adagrad(0.3),
    "rmsprop": lambda: RMSprop(0.05),
    "adadelta": lambda: Adadelta(1.0),
    "adam": lambda: Adam(0.05),
}


def pull(x: np.ndarray, rank: int) -> np.ndarray:
    """A quadratic whose minimum is another one for each rank."""
    return CURVATURE * (x - np.float32(rank))


def noisy() -> Callable[[np.ndarray, int], np.ndarray]:
    noise = iter(np.random.default_rng(7).standard_normal((STEPS, SIZE)).astype(np.float32))
    return lambda x, rank: CURVATURE * x + next(noise)


def slope(x: np.ndarray, rank: int) -> np.ndarray:
    return 0 * x + 1


# --- one worker is the optimizer alone -------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("schedule", ["dean", "aligned"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_is_the_optimizer_alone_bit_for_bit(name: str, schedule: str, servers: int) -> None:
    path: list[np.ndarray] = []
    run = train_virtually(
        Downpour(schedule=schedule),
        noisy(),
        [START[:5], START[5:6], START[6:]],
        workers=1,
        servers=servers,
        steps=STEPS,
        optimizer=OPTIMIZERS[name](),
        observe=lambda worker, step: path.append(worker.parameters.vector.copy()),
    )
    alone, optimizer, gradient, expected = START.copy(), OPTIMIZERS[name](), noisy(), []
    for _ in range(STEPS):
        optimizer.step(alone, gradient(alone, 1))
        expected.append(alone.copy())
    assert np.array_equal(path, expected)
    assert np.array_equal(run.center, alone)
    assert not np.allclose(alone, START)


@pytest.mark.parametrize(("workers", "steps", "gamma"), [(1, 1, 0.5), (1, 100, 0.1), (3, 20, 0.25)])
def test_adagrad_sums_the_inverse_roots(workers: int, steps: int, gamma: float) -> None:
    gradient = np.array([3.0, -0.01, 7e3, -1e-7])
    run = train_virtually(
        Downpour(),
        lambda x, rank: gradient,
        np.zeros(4),
        workers=workers,
        steps=steps,
        optimizer=Adagrad(gamma),
    )
    pushes = np.arange(1, workers * steps + 1)
    np.testing.assert_allclose(run.center, -gamma * np.sign(gradient) * (pushes**-0.5).sum(), rtol=3e-6)


# --- Dean's schedule -------------------------------------------------------------------------------------


def replica(
    center: np.ndarray, rank: int, options: Downpour, first_push: int, rate: float
) -> Iterator[np.ndarray]:
    """Appendix algorithm 1 of Dean et al. line by line; the other replicas run where this one yields."""
    step, accumulated = 0, np.zeros_like(center)
    while True:
        if step % options.n_fetch == 0:
            x = center.copy()
        yield x
        gradient = pull(x, rank)
        accumulated += gradient
        x = x - np.float32(options.local_learning_rate) * gradient
        if step % options.n_push == first_push:
            center -= np.float32(rate) * accumulated
            accumulated = np.zeros_like(center)
        step += 1


@pytest.mark.parametrize("schedule", ["dean", "aligned"])
@pytest.mark.parametrize(
    ("workers", "n_push", "n_fetch", "local"),
    [
        (1, 1, 1, 0.0),
        (1, 3, 1, 0.0),
        (1, 1, 4, 0.05),
        (1, 2, 3, 0.05),
        (1, 3, 2, 0.0),
        (2, 4, 4, 0.05),
        (3, 2, 3, 0.02),
        (3, 5, 2, 0.0),
        (4, 3, 7, 0.01),
    ],
)
def test_the_schedule_is_deans(workers: int, n_push: int, n_fetch: int, local: float, schedule: str) -> None:
    options = Downpour(n_push=n_push, n_fetch=n_fetch, local_learning_rate=local, schedule=schedule)
    run = train_virtually(options, pull, START, workers=workers, steps=25, optimizer=SGD(0.03))
    center, first_push = START.copy(), 0 if schedule == "dean" else n_push - 1
    replicas = [replica(center, rank, options, first_push, 0.03) for rank in range(1, workers + 1)]
    for _ in range(26):  # the first time they only fetch
        parameters = [next(one) for one in replicas]
    assert np.array_equal(run.center, center)
    assert np.array_equal(run.parameters, parameters)
    assert not np.allclose(center, START)


@pytest.mark.parametrize(
    ("schedule", "n_push", "n_fetch", "pushed"),
    [
        # After 1, 2, 3, ... steps; Dean's first push is after ONE gradient.
        ("dean", 3, 3, [1, 1, 1, 4, 4, 4, 7]),
        ("aligned", 3, 3, [0, 0, 3, 3, 3, 6, 6]),
        ("dean", 2, 5, [1, 1, 3, 3, 5, 5, 7]),
        ("aligned", 2, 5, [0, 2, 2, 4, 4, 6, 6]),
    ],
)
def test_how_many_gradients_are_pushed(schedule: str, n_push: int, n_fetch: int, pushed: list[int]) -> None:
    options = Downpour(n_push=n_push, n_fetch=n_fetch, schedule=schedule)
    for steps, expected in enumerate(pushed, start=1):
        run = train_virtually(options, slope, [0.0], workers=1, steps=steps, optimizer=SGD(1.0))
        assert run.center == [-expected]


@pytest.mark.parametrize(("every", "local", "rate"), [(1, 0.3, 0.1), (4, 0.05, 0.1), (5, 0.5, 0.2)])
def test_local_steps_decay_the_gradients_that_are_pushed(every: int, local: float, rate: float) -> None:
    """With f = x^2 / 2 the pushed sum is c (1 + (1 - a) + (1 - a)^2 + ...)."""
    options = Downpour(n_push=every, n_fetch=every, schedule="aligned", local_learning_rate=local)
    run = train_virtually(options, lambda x, rank: x, [1.0], workers=1, steps=6 * every, optimizer=SGD(rate))
    pushed = (1 - (1 - local) ** every) / local
    np.testing.assert_allclose(run.center, (1 - rate * pushed) ** 6, rtol=2e-6)


# --- warm start ------------------------------------------------------------------------------------------


def warm(
    warm_start: int,
    steps: list[int],
    seed: int | None = None,
    *,
    servers: int = 1,
    losses: dict[int, int] | None = None,
) -> tuple[VirtualRun, list[tuple[int, float]]]:
    """Push 1 in each step; return also who took gradients in which order, and at which centre."""
    calls: list[tuple[int, float]] = []

    def gradient(x: np.ndarray, rank: int) -> np.ndarray:
        calls.append((rank, float(x[0])))
        return slope(x, rank)

    run = train_virtually(
        Downpour(warm_start=warm_start),
        gradient,
        [np.zeros(1, np.float32) for _ in range(servers)],
        workers=len(steps),
        servers=servers,
        steps=steps,
        optimizer=SGD(1.0),
        schedule=None if seed is None else Interleaved(seed),
        losses=losses,
    )
    return run, calls


@pytest.mark.parametrize("warm_start", [0, 1, 6])
def test_the_others_are_let_in_at_the_last_commit_of_the_warm_start(warm_start: int) -> None:
    _, calls = warm(warm_start, [9, 9, 9])
    entered = [(1, 0.0), *((1, -float(n)) for n in range(1, warm_start + 1))]
    assert calls[: warm_start + 3] == [*entered, (2, -float(warm_start)), (3, -float(warm_start))]


@pytest.mark.parametrize("seed", range(8))
def test_warm_start_lets_one_worker_train_alone(seed: int) -> None:
    run, calls = warm(6, [9, 9, 9], seed)
    order = [rank for rank, _ in calls]
    assert len(set(order[:7])) == 1  # six commits, and the gradient after the sixth
    assert set(order[7:]) == {1, 2, 3}
    entered = {rank: x for rank, x in reversed(calls) if rank != order[0]}
    assert all(x <= -6 for x in entered.values())
    assert run.servers[0].rule.clock == -run.center[0] == 27


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("steps", "losses", "handled"),
    [
        ([2, 2, 9], None, 13),  # each leaves before the warm start is over
        ([0, 1, 0, 1], None, 2),
        ([9, 9], {1: 3}, None),  # join and two pushes, then it dies
        ([9, 9, 9], {1: 1, 2: 4}, None),
    ],
)
def test_a_worker_that_goes_during_the_warm_start_releases_the_next(
    steps: list[int], losses: dict[int, int] | None, handled: int | None, seed: int
) -> None:
    run, calls = warm(8, steps, seed, losses=losses)
    (server,) = run.servers
    survivors = [rank for rank in server.peers if rank not in (losses or {})]
    assert all(server.peers[rank].commits == steps[rank - 1] for rank in survivors)
    assert server.finished
    assert handled in (None, server.rule.clock)
    alone = [rank for rank, x in calls if x > -8]
    assert sum(one != other for one, other in pairwise(alone)) == len(set(alone)) - 1  # one after another


@pytest.mark.parametrize("seed", range(12))
def test_warm_start_with_several_servers_never_hangs(seed: int) -> None:
    run, _ = warm(3, [4, 4, 4], seed, servers=2)
    assert [server.rule.clock for server in run.servers] == [12, 12]
