"""F8: p synchronous workers are one process with p times the batch, whoever is late, leaves or dies."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nnlo_common import SGD, Adagrad, Adam, ConfigurationError, Synchronous, VectorOptimizer
from nnlo_common.protocol import Standing
from nnlo_common.testing import ByTime, Interleaved, RandomOrder, Schedule, train_virtually

SIZE, STEPS = 6, 20
CURVATURE = np.linspace(0.2, 2.0, SIZE, dtype=np.float32)
START = np.linspace(-2.0, 2.0, SIZE, dtype=np.float32)
OPTIMIZERS: dict[str, Callable[[], VectorOptimizer]] = {
    "sgd": lambda: SGD(0.2),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda: Adagrad(0.5),
    "adam": lambda: Adam(0.1),
}
SCHEDULES: dict[str, Callable[[], Schedule | None]] = {
    "round robin": lambda: None,
    **{f"interleaved {seed}": lambda seed=seed: Interleaved(seed) for seed in range(6)},
    "random": lambda: RandomOrder(5),
    "by time": lambda: ByTime(5),
}


class Samples:
    """Each sample (x - s)^2 h / 2 has a minimum s of its own; each worker draws its batches in order."""

    def __init__(self, sizes: Sequence[int], servers: int = 1) -> None:
        rng = np.random.default_rng(3)
        self.first = servers  # the servers have the ranks before the workers
        self.batches = [
            [rng.standard_normal((size, SIZE)).astype(np.float32) for size in sizes] for _ in range(STEPS)
        ]
        self.drawn: Counter[int] = Counter()
        self.points: dict[int, list[np.ndarray]] = defaultdict(list)

    def __call__(self, x: np.ndarray, rank: int) -> np.ndarray:
        batch = self.batches[self.drawn[rank]][rank - self.first]
        self.drawn[rank] += 1
        self.points[rank].append(x.copy())
        return self.gradient(x, batch)

    @staticmethod
    def gradient(x: np.ndarray, batch: np.ndarray) -> np.ndarray:
        return (CURVATURE * (x - batch)).mean(axis=0)


def one_process(samples: Samples, optimizer: VectorOptimizer) -> np.ndarray:
    """Step with the mean over all samples of a step."""
    x = START.copy()
    for batches in samples.batches:
        optimizer.step(x, samples.gradient(x, np.concatenate(batches)))
    return x


def in_rank_order(samples: Samples, counts: Sequence[int], optimizer: VectorOptimizer) -> np.ndarray:
    """Sum the gradients of those who are still there in rank order, divide, step: float32 throughout."""
    x = START.copy()
    for step in range(max(counts)):
        present = [i for i, count in enumerate(counts) if count > step]
        total = samples.gradient(x, samples.batches[step][present[0]])
        for i in present[1:]:
            total = total + samples.gradient(x, samples.batches[step][i])
        optimizer.step(x, total / np.float32(len(present)))
    return x


# --- equal to one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("workers", "batch"), [(1, 4), (2, 8), (3, 5), (5, 1), (8, 3)])
def test_workers_are_one_process_with_a_larger_batch(workers: int, batch: int, name: str) -> None:
    samples = Samples([batch] * workers)
    run = train_virtually(
        Synchronous(), samples, START, workers=workers, steps=STEPS, optimizer=OPTIMIZERS[name]()
    )
    expected = one_process(samples, OPTIMIZERS[name]())
    np.testing.assert_allclose(run.center, expected, rtol=1e-6, atol=1e-6)
    assert run.servers[0].staleness == {0: STEPS * workers}
    assert run.servers[0].rule.clock == STEPS


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("servers", [1, 2])
def test_the_order_of_arrival_never_changes_a_bit(name: str, servers: int) -> None:
    samples = Samples([2] * 5, servers)
    run = train_virtually(
        Synchronous(),
        samples,
        [START[:2], START[2:]],
        workers=5,
        servers=servers,
        steps=STEPS,
        optimizer=OPTIMIZERS["nesterov"](),
        schedule=SCHEDULES[name](),
    )
    assert np.array_equal(run.center, in_rank_order(samples, [STEPS] * 5, OPTIMIZERS["nesterov"]()))
    assert all(np.array_equal(parameters, run.center) for parameters in run.parameters)


def weighted(samples: Samples, weights: Sequence[float]) -> np.ndarray:
    """Train with weights that are set after a first step, whose gradient is zero."""
    workers = len(weights)
    first: set[int] = set()

    def gradient(x: np.ndarray, rank: int) -> np.ndarray:
        if rank in first:
            return samples(x, rank)
        first.add(rank)
        return 0 * x

    run = train_virtually(
        Synchronous(),
        gradient,
        START,
        workers=workers,
        steps=STEPS + 1,
        optimizer=SGD(0.2),
        observe=lambda worker, step: worker.set_weight(weights[worker.rank - 1]),
    )
    return run.center


@pytest.mark.parametrize("sizes", [(1, 3), (8, 1, 2), (5, 5, 6, 4)])
def test_unequal_batches_weigh_what_they_hold(sizes: tuple[int, ...]) -> None:
    center = weighted(Samples(sizes), sizes)
    expected = one_process(Samples(sizes), SGD(0.2))
    np.testing.assert_allclose(center, expected, rtol=1e-6, atol=1e-6)
    unweighted = in_rank_order(Samples(sizes), [STEPS] * len(sizes), SGD(0.2))
    assert np.abs(unweighted - expected).max() > 1e-3


def test_equal_weights_are_no_weights_to_the_bit() -> None:
    sizes = (2, 2, 2)
    expected = in_rank_order(Samples(sizes), [STEPS] * 3, SGD(0.2))
    assert np.array_equal(weighted(Samples(sizes), (7.0, 7.0, 7.0)), expected)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_with_lag_a_gradient_is_applied_that_many_steps_late(lag: int) -> None:
    """x_{t+1} = x_t - eta mean g(x_{t-L}); while nothing has come back, the worker stands at the start."""
    samples = Samples([2] * 3)
    run = train_virtually(
        Synchronous(lag=lag),
        samples,
        START,
        workers=3,
        steps=STEPS,
        optimizer=SGD(0.1),
        schedule=Interleaved(1),
    )
    centers = [START.copy()]
    for batches in samples.batches:
        at = centers[max(0, len(centers) - 1 - lag)]
        total = samples.gradient(at, batches[0])
        for batch in batches[1:]:
            total = total + samples.gradient(at, batch)
        centers.append(centers[-1] - np.float32(0.1) * (total / np.float32(3)))
    assert np.array_equal(run.center, centers[-1])
    assert max(run.servers[0].staleness) == lag


# --- backup workers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "backup"), [(2, 1), (4, 1), (4, 3), (6, 2)])
def test_the_first_of_each_step_commit_and_the_late_are_dropped_and_refreshed(
    workers: int, backup: int
) -> None:
    """In turns the last ranks always come after the commit: as if they were not there."""
    needed, samples = workers - backup, Samples([2] * workers)
    run = train_virtually(
        Synchronous(backup=backup), samples, START, workers=workers, steps=STEPS, optimizer=SGD(0.2)
    )
    (server,) = run.servers
    late = list(range(needed + 1, workers + 1))
    assert np.array_equal(run.center, in_rank_order(samples, [STEPS] * needed + [0] * backup, SGD(0.2)))
    assert [peer.dropped for peer in server.peers.values()] == [0] * needed + [STEPS] * backup
    assert [peer.commits for peer in server.peers.values()] == [STEPS] * needed + [0] * backup
    assert server.staleness == {0: needed * STEPS}
    assert all(np.array_equal(samples.points[rank], samples.points[1]) for rank in late)


def test_a_slow_worker_is_not_waited_for() -> None:
    """Rank 3 needs the time of eleven steps for its gradient; meanwhile the others have gone on."""
    samples = Samples([2] * 3)
    clock = ByTime(0, compute_s=lambda draw, rank: 11.0 if rank == 3 else 1.0, communicate_s=lambda *_: 0.01)
    run = train_virtually(
        Synchronous(backup=1),
        samples,
        START,
        workers=3,
        steps=[20, 20, 1],
        optimizer=SGD(0.2),
        schedule=clock,
    )
    (server,) = run.servers
    assert np.array_equal(run.center, in_rank_order(samples, [20, 20, 0], SGD(0.2)))
    assert (server.peers[3].dropped, server.peers[3].commits, server.rule.clock) == (1, 0, 20)
    assert run.seconds < 21
    waited = train_virtually(
        Synchronous(), Samples([2] * 3), START, workers=3, steps=3, optimizer=SGD(0.2), schedule=clock
    )
    assert waited.seconds > 33


@pytest.mark.parametrize(("workers", "backup", "servers"), [(3, 1, 2), (4, 2, 2), (4, 1, 3), (4, 3, 2)])
def test_backup_workers_with_several_servers_are_refused(workers: int, backup: int, servers: int) -> None:
    """Each server would see another order of arrival: a worker early here and late there hangs them all."""
    with pytest.raises(
        ConfigurationError, match=f"backup={backup} works with one server, not with {servers}"
    ):
        train_virtually(
            Synchronous(backup=backup),
            Samples([1] * workers, servers),
            [START[:2], START[2:4], START[4:]],
            workers=workers,
            servers=servers,
            steps=6,
            optimizer=SGD(0.2),
        )


# --- who leaves or dies is not waited for ----------------------------------------------------------------

COUNTS = [[1, 4, 2, 7], [0, 3, 3, 0], [5, 0, 0, 0], [0, 0, 0, 1], [3, 3, 3, 3], [0, 0, 0, 0]]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("backup", [0, 1, 2, 3])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_uneven_numbers_of_steps_never_hang(counts: list[int], backup: int, lag: int) -> None:
    for seed in range(5):
        samples = Samples([1] * 4)
        run = train_virtually(
            Synchronous(backup=backup, lag=lag),
            samples,
            START,
            workers=4,
            steps=counts,
            optimizer=SGD(0.2),
            schedule=Interleaved(seed),
        )
        (server,) = run.servers
        assert [peer.commits + peer.dropped for peer in server.peers.values()] == counts
        assert {peer.standing for peer in server.peers.values()} == {Standing.LEFT}
        assert server.staleness.total() == sum(peer.commits for peer in server.peers.values())
        if backup == 0 and lag == 0 and any(counts):
            assert np.array_equal(run.center, in_rank_order(samples, counts, SGD(0.2)))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_lost_worker_counts_up_to_its_last_commit(rank: int) -> None:
    """In turns, what rank 3 sends last makes the commit; what ranks 1 and 2 send last waits, and is lost."""
    for handled in range(1, STEPS + 3):  # joining is the first request, leaving the last
        samples = Samples([1] * 3)
        run = train_virtually(
            Synchronous(), samples, START, workers=3, steps=STEPS, optimizer=SGD(0.2), losses={rank: handled}
        )
        (server,) = run.servers
        sent = max(0, min(handled - 1, STEPS))
        counted = sent if rank == 3 or handled > STEPS + 1 else max(0, sent - 1)
        counts = [counted if r == rank else STEPS for r in (1, 2, 3)]
        assert server.peers[rank].standing is Standing.LOST, f"after {handled} requests"
        assert [peer.commits for peer in server.peers.values()] == counts
        assert np.array_equal(run.center, in_rank_order(samples, counts, SGD(0.2)))


def test_a_worker_that_dies_before_its_first_request_is_as_good_as_none() -> None:
    samples = Samples([1] * 3)
    run = train_virtually(
        Synchronous(), samples, START, workers=3, steps=STEPS, optimizer=SGD(0.2), losses={2: 0}
    )
    assert run.servers[0].peers[2].standing is Standing.LOST
    assert np.array_equal(run.center, in_rank_order(samples, [STEPS, 0, STEPS], SGD(0.2)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("servers", "backup"), [(1, 0), (1, 1), (1, 2), (2, 0), (3, 0)])
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_the_loss_of_a_worker_at_any_request_never_hangs(servers: int, backup: int, lag: int) -> None:
    steps = 4
    for handled in range(1, servers * (steps + 2) + 1):
        for seed in range(3):
            run = train_virtually(
                Synchronous(backup=backup, lag=lag),
                Samples([1] * 3, servers),
                [START[:2], START[2:4], START[4:]],
                workers=3,
                servers=servers,
                steps=steps,
                optimizer=SGD(0.2),
                schedule=Interleaved(seed),
                losses={servers: handled},
            )
            dead, *living = range(servers, servers + 3)
            for server in run.servers:
                assert server.peers[dead].standing is Standing.LOST
                assert all(server.peers[r].standing is Standing.LEFT for r in living)
                assert all(server.peers[r].commits + server.peers[r].dropped == steps for r in living)
                assert np.isfinite(server.rule.center).all()
