"""Elastic tree: every state equals an independent NumPy reference, whatever the order of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nnlo_common.algorithms import EASGD
from nnlo_common.algorithms._easgd import ElasticCenter, ElasticWorker
from nnlo_common.algorithms._optimizers import SGD
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.base._flat_vector import FlatVector, Vector
from nnlo_common.protocol import Action, Compute, Server, SubServer, Worker
from nnlo_common.testing import Interleaved, RandomOrder, RoundRobin, VirtualTree, tree_machines
from tests.helpers.trees import HALF, replayed

BRANCHES = ((1, 2, 3, 4), (5, 6, 7))  # 2 sub-servers with 3 and 2 workers
START = np.array([0.5, -1.25, 3.0, 0.1, 7.0], np.float32)
RULE = EASGD(every=3, sub_servers=2, sub_every=5, beta=0.9, sub_alpha=0.35)
RATE = np.float32(0.07)


def gradient(x: Vector, rank: int) -> Vector:
    """Pull each worker to a place of its own."""
    return np.float32(0.3 + 0.1 * rank) * (x - np.float32(rank))


class Reference:
    """The tree as plain arithmetic, told only of the order of commits."""

    def __init__(self, rule: EASGD = RULE) -> None:
        self.rule, self.top = rule, START.copy()
        self.sub = {sub: START.copy() for sub, *_ in BRANCHES}
        self.worker = {rank: START.copy() for _, *ranks in BRANCHES for rank in ranks}
        self.answered = {sub: START.copy() for sub, *_ in BRANCHES}  # without a reply that is under way
        self.exchanges: Counter[int] = Counter()
        self.alpha = {sub: np.float32(0.9 / (len(ranks) + 1)) for sub, *ranks in BRANCHES}

    def join(self, sub: int) -> None:
        """A sub-server starts from the top's centre, and so do its workers."""
        for rank in next(branch for branch in BRANCHES if branch[0] == sub)[1:]:
            self.worker[rank] = self.top.copy()
        self.sub[sub] = self.answered[sub] = self.top.copy()

    def step(self, rank: int) -> None:
        self.worker[rank] = self.worker[rank] - RATE * gradient(self.worker[rank], rank)

    def commit(self, server: int, rank: int) -> None:
        if server == 0:
            move = np.float32(0.35) * (self.sub[rank] - self.top)
            assert self.exchanges[rank] % self.rule.sub_every == 0
            self.top, self.sub[rank] = self.top + move, self.sub[rank] - move
            return
        move = self.alpha[server] * (self.worker[rank] - self.sub[server])
        self.sub[server], self.worker[rank] = self.sub[server] + move, self.worker[rank] - move
        self.answered[server] = self.sub[server]
        self.exchanges[server] += 1


def watched(server: Server, told: Callable[[int, int], object]) -> None:
    """Tell of each commit of a server."""
    apply = server.rule.apply

    def telling(contributions: list[object]) -> None:
        apply(contributions)
        told(server.rank, contributions[0].rank)

    server.rule.apply = telling


def program(worker: Worker, steps: tuple[int, ...], seen: Callable[[Worker], object]) -> Iterator[Action]:
    yield from worker.join()
    for steps_of_epoch in steps:
        yield from worker.begin_epoch()
        for _ in range(steps_of_epoch):
            yield Compute()
            worker.gradient.vector[:] = gradient(worker.parameters.vector, worker.rank)
            yield from worker.step()
            seen(worker)
        yield from worker.finish_epoch()
        view = np.empty_like(START)
        yield from worker.look(view, when_all_are_there=True)
        worker.viewed = view
        now = np.empty_like(START)
        yield from worker.look(now)
    yield from worker.leave()


def run(
    schedule: object, steps: tuple[int, ...] = (31, 23), **options: object
) -> tuple[VirtualTree, Reference]:
    """Train, and compare all states with the reference after every message and every step."""
    machines, workers = tree_machines(RULE, FlatVector.of([START]), BRANCHES)
    reference, done = Reference(), Counter()
    for worker in workers.values():
        worker.local = SGD(float(RATE))
    for server in machines.values():
        watched(server, lambda server, rank: (due(rank) if server else None, reference.commit(server, rank)))

    def due(rank: int) -> None:
        """A worker has stepped and asks for an exchange."""
        reference.step(rank)
        done[rank] += 1

    def seen(worker: Worker) -> None:
        if done[worker.rank] < worker.shard_clients[0].rule.clock:  # no exchange in this step
            due(worker.rank)
        np.testing.assert_array_equal(worker.parameters.vector, reference.worker[worker.rank])

    def compare() -> bool:
        if tree.trace and tree.trace[-1][0] == 0 and tree.trace.count(tree.trace[-1]) == 1:
            reference.join(tree.trace[-1][1])
        np.testing.assert_array_equal(machines[0].rule.center, reference.top)
        for sub, *_ in BRANCHES:
            machine = machines[sub]
            assert isinstance(machine, SubServer)
            if machine.rule.clock:
                waits = machine.client.unanswered and not machine.client.looking
                expected = reference.answered[sub] if waits else reference.sub[sub]
                np.testing.assert_array_equal(machine.rule.center, expected)
        return False

    programs = {rank: program(worker, steps, seen) for rank, worker in workers.items()}
    tree = VirtualTree(machines, workers, programs, schedule=schedule, check=True, **options)
    tree.run(compare)
    compare()
    return tree, reference


@pytest.mark.parametrize("seed", range(12))
def test_every_state_is_that_of_the_reference(seed: int) -> None:
    tree, reference = run(Interleaved(seed))
    # 54 steps make 18 exchanges of each worker
    assert reference.exchanges == {1: 3 * 18, 5: 2 * 18}
    assert tree.machines[0].rule.clock == 54 // 5 + 36 // 5
    assert all(machine.finished for machine in tree.machines.values())
    # A view at the end of an epoch is the top's centre on all ranks, and so is what sub-servers show at last.
    views = [worker.viewed for worker in tree.workers.values()]
    assert all(np.array_equal(view, tree.machines[0].rule.center) for view in views)
    for sub, *_ in BRANCHES:
        np.testing.assert_array_equal(tree.machines[sub].shown, tree.machines[0].rule.center)
        assert tree.machines[sub].final


def test_nothing_is_lost_between_the_levels() -> None:
    still = {rank: np.full(5, rank, np.float32) for rank in (2, 3, 4, 6, 7)}
    machines, workers = tree_machines(RULE, FlatVector.of([START]), BRANCHES)

    def moved(worker: Worker) -> Iterator[Action]:
        yield from worker.join()
        worker.parameters.vector[:] = still[worker.rank]
        for _ in range(90):
            yield from worker.step()
        yield from worker.leave()

    before = 3 * START + sum(still.values())
    VirtualTree(machines, workers, {r: moved(w) for r, w in workers.items()}, schedule=RoundRobin()).run()
    after = sum(machine.rule.center for machine in machines.values())
    after = after + sum(worker.parameters.vector for worker in workers.values())
    np.testing.assert_allclose(after, before, rtol=3e-7)


@pytest.mark.parametrize("mutation", ["only the top moves", "only the sub-server moves", "alpha of workers"])
def test_the_comparison_notices(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation == "only the top moves":
        incoming = ElasticWorker.incoming

        def still(self: ElasticWorker, x: Vector, reply: Vector) -> None:
            if self.every != RULE.sub_every:
                incoming(self, x, reply)

        monkeypatch.setattr(ElasticWorker, "incoming", still)
    elif mutation == "only the sub-server moves":
        apply = ElasticCenter.apply

        def one_sided(self: ElasticCenter, contributions: list[object]) -> None:
            before = self.center.copy()
            apply(self, contributions)
            if self.alpha == np.float32(0.35):
                self.center[:] = before

        monkeypatch.setattr(ElasticCenter, "apply", one_sided)
    else:
        monkeypatch.setattr(EASGD, "sub_moving_rate", EASGD.moving_rate)
    with pytest.raises(AssertionError):
        run(Interleaved(1))


@pytest.mark.parametrize("seed", range(4))
def test_a_sub_server_drops_a_dead_worker(seed: int) -> None:
    tree, _ = run(Interleaved(seed), losses={3: 11})
    assert [rank for rank, peer in tree.machines[1].peers.items() if peer.standing.name == "LOST"] == [3]
    assert all(machine.finished for machine in tree.machines.values())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"synchronous": True}, "synchronous=True with sub_servers is not possible"),
        ({"lag": 1}, "lag=1 with sub_servers is not possible"),
        ({"sub_alpha": 1.0}, "sub_alpha=1.0 is not possible: it must be above 0 and below 1"),
        ({"sub_every": 0}, "sub_every=0 is not possible"),
        ({"sub_servers": -1}, "sub_servers=-1 is not possible"),
        ({"sub_servers": 0, "sub_every": 3}, "say how many with sub_servers"),
    ],
)
def test_impossible_options(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told.replace("(", r"\(")):
        EASGD(**{"sub_servers": 2, **options})


def test_rates_are_checked_for_each_server() -> None:
    assert EASGD(sub_servers=2).moving_rate(3) == 0.9 / 4
    assert EASGD(sub_servers=3).sub_moving_rate(3) == 0.9 / 4
    assert EASGD(sub_servers=3, beta_per="step").sub_moving_rate(3) == 0.9 / 4 / 10
    with pytest.raises(ConfigurationError, match="sub_alpha=1, but it must be below 1"):
        EASGD(sub_servers=1, beta=2).sub_moving_rate(1)
    assert "sub_" not in EASGD().describe()
    assert EASGD(sub_servers=2).describe().endswith("sub_servers=2, sub_every=10, sub_alpha=None)")


@pytest.mark.parametrize("seed", range(6))
def test_a_pause_and_a_new_start_change_no_number(seed: int) -> None:
    """All pause somewhere in the middle, and new machines go on from what is saved; so does the reference."""
    commits: dict[int, list[int]] = {sub: [] for sub, *_ in ((0,), *BRANCHES)}

    def made() -> tuple[dict[int, Server], dict[int, Worker]]:
        machines, workers = tree_machines(RULE, FlatVector.of([START]), BRANCHES)
        for worker in workers.values():
            worker.local = SGD(0.5)
        for server in machines.values():
            watched(server, lambda server, rank: commits[server].append(rank))
        return machines, workers

    def train(worker: Worker, steps: int, *, until_paused: bool) -> Iterator[Action]:
        yield from worker.join()
        while worker.shard_clients[0].rule.clock < steps:
            worker.gradient.vector[:] = HALF * (worker.parameters.vector - np.float32(worker.rank))
            yield Compute()
            yield from worker.step()
            if until_paused and worker.pause_requested:
                yield from worker.pause()
                if worker.paused:
                    return
        yield from worker.leave()

    machines, workers = made()
    tree = VirtualTree(
        machines,
        workers,
        {rank: train(worker, 47, until_paused=True) for rank, worker in workers.items()},
        schedule=RandomOrder(seed),  # all join first, at the same centre
        check=True,
    )
    tree.run(lambda: len(commits[0]) == 4)
    machines[0].pauses.wanted = True
    tree.continue_with(0, machines[0].tell_wishes())
    assert all(machine.pauses.made == 1 for machine in machines.values())
    saved = {rank: one.state() for rank, one in (*machines.items(), *workers.items())}
    assert all(worker.shard_clients[0].rule.clock < 47 for worker in workers.values())

    machines, workers = made()
    for rank, one in (*machines.items(), *workers.items()):
        one.load(saved[rank])
    programs = {rank: train(worker, 47, until_paused=False) for rank, worker in workers.items()}
    VirtualTree(machines, workers, programs, schedule=Interleaved(seed + 100), check=True).run()
    expected = replayed(
        commits,
        BRANCHES,
        START,
        every=3,
        sub_every=5,
        alphas={0: 0.35, 1: 0.9 / 4, 5: 0.9 / 3},
        steps=dict.fromkeys(workers, 47),
    )
    np.testing.assert_array_equal(machines[0].rule.center, expected.top)
    for rank, vector in expected.subs.items():
        np.testing.assert_array_equal(machines[rank].rule.center, vector)
    for rank, vector in expected.workers.items():
        np.testing.assert_array_equal(workers[rank].parameters.vector, vector)
