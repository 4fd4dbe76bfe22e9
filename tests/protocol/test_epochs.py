"""Epochs in the protocol: who is waited for, where the next one begins, and what is shown when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import EASGD, SGD, DiLoCo, Downpour, LocalSGD, ProtocolError, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.protocol import Action, Compute, Kind, Lost, Server, Shard, Worker
from nnlo_common.testing import Interleaved, Replay, RoundRobin, VirtualCluster, train_virtually
from tests.protocol.test_server_and_worker import ALGORITHMS, Table, center_optimizer, granted
from tests.training.test_participant import train_in_memory

from tests.helpers.numpy_cases import Case  # isort: skip - test_participant has made it importable
from tests.testing.test_mpi_replay import again  # isort: skip

F4 = np.float32
thoroughly = settings(max_examples=150)


# --- numbers -----------------------------------------------------------------------------------------------

SHARES = [[3, 4], [2, 5]]  # steps of each worker in each epoch


def towards(x: np.ndarray, rank: int) -> np.ndarray:
    """The gradient of a constant pull: worker 1 moves by 1 in each step, worker 2 by 2 (with a rate of 1)."""
    return np.full_like(x, -rank)


class Bookkeeper:
    """The rules in plain numbers: x is the workers', c the centre's, who are the workers in a commit."""

    def __init__(self) -> None:
        self.x, self.c = [0.0, 0.0], 0.0

    def step(self, who: list[int]) -> None:
        for worker in who:
            self.x[worker] += worker + 1


def synchronous(ledger: Bookkeeper, who: list[int]) -> None:
    ledger.c += sum(worker + 1 for worker in who) / len(who)
    for worker in who:
        ledger.x[worker] = ledger.c


def local_sgd(ledger: Bookkeeper, who: list[int]) -> None:
    ledger.step(who)
    ledger.c = sum(ledger.x[worker] if worker in who else ledger.c for worker in (0, 1)) / 2
    for worker in who:
        ledger.x[worker] = ledger.c


def easgd(ledger: Bookkeeper, who: list[int]) -> None:
    ledger.step(who)
    pulls = {worker: 0.25 * (ledger.x[worker] - ledger.c) for worker in who}
    for worker, pull in pulls.items():
        ledger.x[worker] -= pull
        ledger.c += pull


class Displacements:
    """DiLoCo with an outer SGD: each worker is measured from where it stood after its last exchange."""

    def __init__(self) -> None:
        self.anchor = [0.0, 0.0]

    def __call__(self, ledger: Bookkeeper, who: list[int]) -> None:
        ledger.step(who)
        ledger.c += 0.5 * sum(ledger.x[worker] - self.anchor[worker] for worker in who) / 2
        for worker in who:
            ledger.x[worker] = self.anchor[worker] = ledger.c


RULES: dict[str, tuple[Algorithm, Callable[[], Callable[[Bookkeeper, list[int]], None]]]] = {
    "synchronous": (Synchronous(), lambda: synchronous),
    "local sgd": (LocalSGD(every=1), lambda: local_sgd),
    "easgd": (EASGD(every=1, alpha=0.25, synchronous=True), lambda: easgd),
    "diloco": (DiLoCo(every=1, outer_learning_rate=0.5, outer_momentum=0), Displacements),
}


def run(algorithm: Algorithm, shares: Any, schedule: Any = None, **options: Any) -> Any:
    """Both workers pull at the centre, or at themselves, with a rate of 1."""
    at_center = algorithm.optimizer_runs == "center"
    return train_virtually(
        algorithm,
        options.pop("gradient", towards),
        options.pop("initial", [0.0]),
        workers=len(shares),
        steps=shares,
        optimizer=SGD(1.0) if at_center else None,
        local=None if at_center else lambda: SGD(1.0),
        schedule=schedule,
        **options,
    )


@pytest.mark.parametrize(
    "shares", [SHARES, [[0, 3], [4, 1]], [[2, 2], [2, 2]], [[5, 0, 1], [0, 0, 4]]], ids=str
)
@pytest.mark.parametrize("name", RULES)
def test_a_commit_is_of_the_workers_of_its_own_epoch(name: str, shares: list[list[int]]) -> None:
    algorithm, make = RULES[name]
    ledger, commit, commits = Bookkeeper(), make(), 0
    for epoch in range(len(shares[0])):
        if name == "synchronous":
            ledger.x = [ledger.c] * 2
        for step in range(max(counts[epoch] for counts in shares)):
            commit(ledger, [worker for worker in (0, 1) if step < shares[worker][epoch]])
            commits += 1
    for schedule in (RoundRobin(), *map(Interleaved, range(8))):
        found = run(algorithm, shares, schedule)
        (server,) = found.servers
        assert server.rule.clock == commits
        assert found.center.tolist() == pytest.approx([ledger.c])
        assert [x.item() for x in found.parameters] == pytest.approx(ledger.x)


def test_exact_numbers_of_uneven_epochs() -> None:
    """The same by hand: 1.5 while both are there, then the one that is left alone moves the centre."""
    assert run(Synchronous(), SHARES).center.tolist() == [1.5 * 2 + 1 + 1.5 * 4 + 2]
    # 1.5, 3; worker 1 alone: (4 + 3) / 2 = 3.5; worker 2 goes on from 3: (4.5 + 5) / 2, + 1.5 * 3, + 1
    assert run(LocalSGD(every=1), SHARES).center.tolist() == [4.75 + 1.5 * 3 + 1]


@pytest.mark.parametrize("leaves", [False, True])
def test_who_has_ended_the_epoch_counts_as_it_was_whether_it_has_left_or_not(leaves: bool) -> None:
    """Else the end of a training would depend on how soon the first worker leaves."""
    table = Table(LocalSGD(every=1), size=1).joined()
    center = table.server.rule.center

    def contribute(rank: int, value: float) -> None:
        request = table.request(rank)
        table.all(table.hear(request._replace(vector=np.array([value], F4))))

    contribute(1, 4.0)
    contribute(2, 8.0)
    assert center == 6
    finish(table, 1)
    if leaves:
        table.hear(table.request(1, "leave"))
    contribute(2, 8.0)
    assert center == 7  # worker 1 counts with the 6 that it last got
    contribute(2, 9.0)
    assert center == 8
    finish(table, 2)
    if leaves:  # in an epoch that worker 1 has no part in
        contribute(2, 9.0)
        assert center == 9


def test_the_dead_do_not_count_though_they_had_ended_the_epoch() -> None:
    table = Table(DiLoCo(every=1, outer_learning_rate=1.0, outer_momentum=0), size=1).joined()
    finish(table, 1)
    for expected in (-1, -3):  # by half a displacement of 2, and after the death a whole one
        request = table.request(2)
        table.all(table.hear(request._replace(vector=np.array([2], F4))))
        assert table.server.rule.center == expected
        table.server.handle(Lost(1))


# --- nothing is dropped, and all begin at the same centre --------------------------------------------------

UNEVEN = st.integers(1, 3).flatmap(
    lambda epochs: st.lists(
        st.lists(st.integers(0, 4), min_size=epochs, max_size=epochs), min_size=1, max_size=4
    )
)


@pytest.mark.slow
@thoroughly
@given(UNEVEN, st.integers(0, 2), st.integers(1, 2), st.integers(0, 999))
def test_synchronous_workers_begin_an_epoch_where_the_last_one_ended(
    shares: list[list[int]], lag: int, servers: int, seed: int
) -> None:
    """Every gradient is taken at the newest centre (with a lag, at one so old), and none is dropped."""
    seen: dict[int, list[float]] = {}

    def gradient(x: np.ndarray, rank: int) -> np.ndarray:
        seen.setdefault(rank, []).append(float(x[0]))
        return np.full_like(x, -1)  # so the centre counts its commits

    initial = [np.zeros(2, F4) for _ in range(servers)]
    found = run(
        Synchronous(lag=lag), shares, Interleaved(seed), gradient=gradient, initial=initial, servers=servers
    )
    longest = [max(counts[epoch] for counts in shares) for epoch in range(len(shares[0]))]
    for server in found.servers:
        assert server.rule.clock == sum(longest)
        assert all(peer.dropped == 0 for peer in server.peers.values())
        assert server.staleness.total() == sum(map(sum, shares))
        assert max(server.staleness, default=0) <= lag
    assert found.center.tolist() == [sum(longest)] * found.center.size
    for worker, counts in enumerate(shares):
        begun = [sum(longest[:epoch]) for epoch in range(len(longest))]
        points = [
            start + max(0, step - lag)
            for start, count in zip(begun, counts, strict=True)
            for step in range(count)
        ]
        assert seen.get(servers + worker, []) == points


# --- any order ends ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Course:
    """A training in uneven epochs, with evaluations between them, in any order."""

    name: str
    shares: list[list[int]]
    looks: list[int]  # how often all look at the centre after each epoch
    lag: int
    servers: int
    losses: dict[int, int]
    seed: int

    @property
    def algorithm(self) -> Algorithm:
        return replace(ALGORITHMS[self.name], lag=self.lag)

    def run(self, schedule: Any = None) -> tuple[VirtualCluster, dict[int, list[np.ndarray]]]:
        size, workers = 2 * self.servers, len(self.shares)
        arrays = [np.zeros(2, F4) for _ in range(self.servers)]
        shards = [
            Shard(index, index, place)
            for index, place in enumerate(FlatVector.of(arrays).layout.cut(self.servers))
        ]
        ranks = range(self.servers, self.servers + workers)
        seen: dict[int, list[np.ndarray]] = {rank: [] for rank in ranks}

        def program(worker: Worker, counts: list[int]) -> Iterator[Action]:
            yield from worker.join()
            draw = np.random.default_rng(worker.rank)
            for count, looks in zip(counts, self.looks, strict=True):
                yield from worker.begin_epoch()
                for _ in range(count):
                    yield Compute()
                    worker.gradient.vector[:] = draw.standard_normal(size)
                    yield from worker.step()
                yield from worker.finish_epoch()
                for _ in range(looks):
                    view = np.empty(size, F4)
                    yield from worker.look(view, when_all_are_there=True)
                    seen[worker.rank].append(view)
            yield from worker.leave()

        algorithm = self.algorithm
        servers = [
            Server(
                algorithm.center(np.zeros(2, F4), workers, center_optimizer(algorithm, 0.1)),
                ranks,
                rank=shard.server,
                shard=shard.index,
                depth=algorithm.lag + 1,
            )
            for shard in shards
        ]
        members = {
            rank: Worker(
                rank,
                algorithm,
                FlatVector.of(arrays),
                FlatVector.of(arrays),
                shards,
                workers=workers,
                local=SGD(0.1),
            )
            for rank in ranks
        }
        cluster = VirtualCluster(
            servers,
            members,
            {rank: program(members[rank], counts) for rank, counts in zip(ranks, self.shares, strict=True)},
            schedule=Interleaved(self.seed) if schedule is None else schedule,
            losses={self.servers + worker: after for worker, after in self.losses.items()},
            check=True,
        )
        cluster.run()
        return cluster, seen


@st.composite
def courses(draw: st.DrawFn, names: tuple[str, ...]) -> Course:
    name, shares = draw(st.sampled_from(names)), draw(UNEVEN)
    if len(shares) == 1:
        shares = shares * 2
    servers = 1 if "backup" in name else draw(st.integers(1, 2))
    losses = draw(st.dictionaries(st.integers(0, len(shares) - 1), st.integers(0, 12 * servers), max_size=2))
    looks = draw(st.lists(st.integers(0, 2), min_size=len(shares[0]), max_size=len(shares[0])))
    return Course(name, shares, looks, draw(st.integers(0, 2)), servers, losses, draw(st.integers(0, 999)))


#: With a warm start workers are let in one by one, by commits; a look may then be at odds with that.
COURSES = tuple(name for name in ALGORITHMS if "warm" not in name)
BARRIERS = ("synchronous", "easgd, synchronous", "local sgd", "diloco")


@pytest.mark.slow
@thoroughly
@given(courses(COURSES))
def test_in_any_order_uneven_epochs_end_and_barriers_show_all_the_same_centre(course: Course) -> None:
    cluster, seen = course.run()
    assert all(server.finished for server in cluster.servers)
    living = [rank for rank in seen if rank - course.servers not in course.losses]
    for rank in living:
        assert len(seen[rank]) == sum(course.looks)
    if course.name in BARRIERS and not course.losses:
        # Some may have begun the next epoch, but in it nothing moves without the others.
        for views in zip(*seen.values(), strict=True):
            assert len({view.tobytes() for view in views}) == 1


@pytest.mark.slow
@thoroughly
@given(courses(BARRIERS))
def test_barriers_give_the_same_bits_in_any_order(course: Course) -> None:
    course = replace(course, losses={})
    (first, _), (second, _) = course.run(), course.run(Interleaved(course.seed + 1))
    for one, other in zip(first.servers, second.servers, strict=True):
        assert one.rule.center.tobytes() == other.rule.center.tobytes()
        assert one.staleness == other.staleness
    for rank, worker in first.workers.items():
        assert worker.parameters.vector.tobytes() == second.workers[rank].parameters.vector.tobytes()


# --- who is shown the centre -------------------------------------------------------------------------------


def look(rank: int) -> Callable[[Table], Any]:
    def request(table: Table) -> Any:
        (action,) = table[rank].look(np.empty(2, F4), when_all_are_there=True)
        return action.message

    return request


def finish(table: Table, *ranks: int) -> None:
    for rank in ranks:
        assert granted(table.hear(table.request(rank, "finish_epoch"))) == []


def test_a_look_is_answered_when_all_have_finished_as_many_epochs() -> None:
    table = Table(Downpour(), workers=3).joined()
    (answer,) = table.hear(look(1)(table))  # before the first epoch nobody has to be waited for
    assert answer.message.kind is Kind.CENTER
    table.all([answer])
    finish(table, 1, 2)
    assert table.hear(look(1)(table)) == []
    assert table.hear(look(2)(table)) == []
    actions = table.hear(table.request(3, "finish_epoch"))
    assert granted(actions) == [1, 2]
    assert [peer.views for peer in table.server.peers.values()] == [2, 1, 0]
    assert not table.server.peers.have_viewed(1)
    table.all(table.hear(look(3)(table)))
    assert table.server.peers.have_viewed(1)
    assert not table.server.peers.have_viewed(2)


@pytest.mark.parametrize("end", ["leave", "die"])
def test_a_look_does_not_wait_for_who_has_gone(end: str) -> None:
    table = Table(Downpour(), workers=3).joined()
    finish(table, 1, 2)
    assert table.hear(look(1)(table)) == []
    actions = table.hear(table.request(3, "leave")) if end == "leave" else table.server.handle(Lost(3))
    table.server.validate()
    assert granted(actions) == [1]
    assert table.hear(look(2)(table)) != []
    assert table.server.peers.have_viewed(1)


def test_a_look_waits_for_who_has_not_joined_yet() -> None:
    table = Table(Downpour(), workers=2).joined(1)
    finish(table, 1)
    assert table.hear(look(1)(table)) == []
    table.joined(2)
    assert granted(table.hear(table.request(2, "finish_epoch"))) == [1]


def test_who_dies_while_it_looks_is_forgotten() -> None:
    table = Table(Downpour()).joined()
    finish(table, 1)
    request = table.carry(look(1)(table))
    assert table.server.handle(request) == []
    (release,) = table.server.handle(Lost(1))
    assert release.frame is request.frame
    table.server.validate()
    assert granted(table.hear(table.request(2, "finish_epoch"))) == []


def test_a_state_is_refused_while_somebody_waits_for_a_look() -> None:
    table = Table(Downpour()).joined()
    finish(table, 1)
    table.hear(look(1)(table))
    with pytest.raises(ProtocolError, match="pause all first"):
        table.server.state()
    table.hear(table.request(2, "finish_epoch"))
    table.server.state()


def test_a_loaded_server_knows_who_has_ended_the_epoch() -> None:
    table = Table(Synchronous()).joined()
    finish(table, 1)
    fresh = Table(Synchronous())
    fresh.server.load(table.server.state())
    fresh.joined()
    fresh[2]._sequence = table.server.peers[2].sequence
    assert granted(fresh.hear(fresh.request(2))) == [2]  # it need not wait for worker 1


def test_a_refresh_is_not_counted_as_a_look() -> None:
    table = Table(Synchronous()).joined()
    finish(table, 1, 2)
    for rank in (1, 2):
        (action,) = table[rank].refresh()
        assert action.message.refreshes
        table.all(table.hear(action.message))
    assert not table.server.peers.have_viewed(1)


def test_looking_leaves_what_a_worker_has_pulled_as_it_is_and_a_refresh_does_not() -> None:
    table = Table(Synchronous()).joined()
    for _ in range(2):
        for rank in (1, 2):
            table.all(table[rank].exchange())
    assert table[1].pulled_at == 2
    finish(table, 1)
    table.all(table[2].exchange())  # worker 2 alone
    finish(table, 2)
    table.all(table.hear(look(1)(table)))
    assert table[1].pulled_at == 2
    (action,) = table[1].refresh()
    table.all(table.hear(action.message))
    assert table[1].pulled_at == 3
    assert np.array_equal(table[1].parameters, table.server.rule.center)


# --- options -----------------------------------------------------------------------------------------------


class Told(SGD):
    """An optimizer that can be told its learning rate and remembers each step's."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.rates: list[float] = []

    def configure(self, options: np.ndarray) -> None:
        self.learning_rate = float(options[0])

    def step(self, x: np.ndarray, gradient: np.ndarray) -> None:
        self.rates.append(self.learning_rate)
        super().step(x, gradient)


def told(algorithm: Algorithm, workers: int = 2) -> tuple[Table, Told]:
    table, optimizer = Table(algorithm, workers=workers), Told()
    table.server.rule.optimizer = optimizer
    return table.joined(), optimizer


def configure(table: Table, rank: int, rate: float) -> None:
    for action in table.workers[rank].configure(np.array([rate, 0, 0], F4)):  # more numbers than the centre
        (release,) = table.hear(action.message)
        assert isinstance(action.message.vector, np.ndarray)
        assert release.rank == rank


def test_options_are_those_of_the_worker_whose_contribution_it_is() -> None:
    table, optimizer = told(Downpour())
    table.all(table[1].exchange())
    configure(table, 1, 0.5)
    table.all(table[1].exchange())
    configure(table, 2, 0.25)
    assert optimizer.rates == [1.0, 0.5]  # nothing happens before the next contribution
    table.all(table[2].exchange())
    table.all(table[1].exchange())
    table.all(table[2].exchange())
    assert optimizer.rates == [1.0, 0.5, 0.25, 0.5, 0.25]


def test_options_of_a_barrier_are_those_of_the_last_rank_whoever_comes_first() -> None:
    for order in ((1, 2), (2, 1)):
        table, optimizer = told(Synchronous())
        for rank in order:
            configure(table, rank, 0.5 * rank)
            table.all(table[rank].exchange())
        assert optimizer.rates == [1.0]
    table, optimizer = told(Synchronous())
    table.all(table[1].exchange())
    configure(table, 2, 0.125)
    table.all(table[2].exchange())
    assert optimizer.rates == [0.125]


def test_options_keep_the_place_that_they_were_sent_at() -> None:
    """With a pipeline the contributions before them may still wait."""
    table, optimizer = told(Downpour(lag=2), workers=1)
    for rate in (0.5, 0.25, 0.125):
        configure(table, 1, rate)
        table.all(table[1].exchange())
    assert optimizer.rates == [0.5, 0.25, 0.125]


def test_options_are_a_copy_of_their_message() -> None:
    table, optimizer = told(Downpour(), workers=1)
    (action,) = table[1].options(np.array([0.5], F4))
    received = table.carry(action.message)
    table.server.handle(received)
    received.frame.vector[:] = 9
    table.all(table[1].exchange())
    assert optimizer.rates == [0.5]


# --- replay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("name", ["Synchronous", "Downpour", "LocalSGD"])
def test_replaying_the_logged_order_of_uneven_epochs_gives_the_same_bits(
    name: str, lag: int, servers: int, tmp_path: Any
) -> None:
    algorithm = {"Synchronous": Synchronous(), "Downpour": Downpour(), "LocalSGD": LocalSGD(every=2)}[name]
    case, workers = Case(replace(algorithm, lag=lag), lambda: SGD(0.2, momentum=0.5)), 3
    epochs = [7, 2, 10]  # shares of 3, 2, 2; of 1, 1, 0; of 4, 3, 3
    results, orders = train_in_memory(case, workers + servers, servers, tmp_path / "order.json", epochs)
    steps = [[len(range(worker, count, workers)) for count in epochs] for worker in range(workers)]
    assert [count for _, count in results[servers:]] == [sum(counts) for counts in steps]
    replayed = again(case, workers + servers, servers, steps, Replay(orders))
    assert replayed.trace == orders
    for vector, _ in results[:servers]:
        assert np.array_equal(vector, replayed.center)
    for (vector, _), expected in zip(results[servers:], replayed.parameters, strict=True):
        assert np.array_equal(vector, expected)


def test_a_warm_start_ends_with_the_first_workers_first_epoch():
    """It may wait for the others there: to validate, say."""
    run = train_virtually(
        Downpour(warm_start=100),
        lambda x, rank: x,
        [1.0],
        workers=2,
        steps=[[3, 3], [3, 3]],
        optimizer=SGD(0.1),
    )
    first = run.trace[0].index(2, 2)  # both ask to join at once
    assert run.trace[0][2:first] == [1] * 4  # three pushes and the epoch's end
    assert 1 in run.trace[0][first:-2]
