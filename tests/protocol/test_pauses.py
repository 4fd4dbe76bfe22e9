"""Pauses of all workers together: they cannot lock up, and what is saved in one goes on exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import FlatVector, PeerLostError
from nnlo_common.algorithms import Algorithm
from nnlo_common.protocol import Action, Compute, Server, Shard, Standing, Worker
from nnlo_common.testing import Interleaved, PendingRequest, RoundRobin, ServerDeath, VirtualCluster
from nnlo_common.training.checkpoint import Store, packed_tree, unpacked_tree
from tests.facts.test_f15_resume import CASES, CURVATURE, SHAPES, SIZE, Case, plain

EPOCHS = [[3, 4, 3], [3, 3, 4], [4, 3, 3]]  # the steps of each worker in each epoch


@dataclass
class Course:
    """A training that can be paused at any number of requests handled, saved, and gone on with."""

    case: Case
    lag: int
    servers: int
    steps: list[list[int]]
    spares: bool = False  # a rank after the workers for each server

    def __post_init__(self) -> None:
        self.workers = len(self.steps)
        self.ranks = range(self.servers, self.servers + self.workers)
        self.made = dict.fromkeys(self.ranks, 0)  # steps
        self.ended = dict.fromkeys(self.ranks, 0)  # epochs
        self.begun: dict[int, Any] = {}  # with which parameters
        start = [np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape) for shape in SHAPES]
        places = FlatVector.of(start).layout.cut(self.servers)
        behind = self.servers + self.workers
        shards = [
            Shard(index, index, place, (behind + index,) if self.spares else ())
            for index, place in enumerate(places)
        ]
        algorithm, makes, moves = self.algorithm, self.case.optimizer, self.case.local

        def server(rank: int, shard: Shard) -> Server:
            center = FlatVector.of(start).vector[shard.place].copy()
            rule = algorithm.center(center, self.workers, makes and makes())
            return Server(rule, self.ranks, rank=rank, shard=shard.index, depth=self.lag + 1)

        self.machines = [server(shard.server, shard) for shard in shards]
        self.heirs = [server(rank, shard) for shard in shards for rank in shard.spares]
        self.members = {
            rank: Worker(
                rank,
                algorithm,
                FlatVector.of(start),
                FlatVector.of(start),
                shards,
                workers=self.workers,
                local=moves and moves(),
            )
            for rank in self.ranks
        }

    @property
    def algorithm(self) -> Algorithm:
        return replace(self.case.algorithm, lag=self.lag)

    def program(self, rank: int) -> Iterator[Action]:
        worker = self.members[rank]
        yield from worker.join()
        self.begun[rank] = worker.parameters.vector.copy()
        while self.ended[rank] < len(self.steps[0]):
            of_epochs = self.steps[rank - self.servers]
            before, epoch = sum(of_epochs[: self.ended[rank]]), self.ended[rank]
            fresh = self.made[rank] == before
            if (yield from self.pauses(worker)):
                return
            if fresh:
                yield from worker.begin_epoch()
            while self.made[rank] < before + of_epochs[epoch]:
                yield Compute()
                draw = np.random.default_rng([rank - self.servers, self.made[rank]])
                minimum = draw.standard_normal(SIZE).astype(np.float32)
                worker.gradient.vector[:] = CURVATURE * (worker.gradient_point() - minimum)
                yield from worker.step()
                self.made[rank] += 1
                if self.made[rank] < before + of_epochs[epoch] and (yield from self.pauses(worker)):
                    return
            yield from worker.finish_epoch()
            self.ended[rank] += 1
        yield from worker.leave()

    def pauses(self, worker: Worker) -> Any:
        if not worker.pause_requested:
            return False
        yield from worker.pause()
        return worker.paused

    def run(
        self, schedule: Any, losses: dict[int, int] | None = None, deaths: Sequence[ServerDeath] = ()
    ) -> Course:
        programs = {rank: self.program(rank) for rank in self.ranks}
        cluster = VirtualCluster(
            self.machines,
            self.members,
            programs,
            schedule=schedule,
            losses=losses,
            deaths=deaths,
            spares=self.heirs,
            check=True,
        )
        self.machines = cluster.servers
        try:
            cluster.run()
        except PeerLostError as error:  # who has not been let in waits in vain
            if not self.paused or self.machines[0].peers[error.rank].standing is not Standing.QUEUING:
                raise
        return self

    @property
    def paused(self) -> bool:
        return any(server.pauses.made for server in self.machines)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; who has not been let in has nothing to save."""
        inside = {rank for rank in self.ranks if self.machines[0].peers[rank].standing is Standing.TRAINING}
        return {
            "servers": [server.state() for server in self.machines],
            "workers": {str(rank): self.members[rank].state() for rank in inside},
            "made": {str(rank): self.made[rank] for rank in self.ranks},
            "ended": {str(rank): self.ended[rank] for rank in self.ranks},
        }

    def resumed(self, state: dict[str, Any]) -> Course:
        fresh = Course(self.case, self.lag, self.servers, self.steps)
        for server, saved in zip(fresh.machines, state["servers"], strict=True):
            server.load(saved)
        for rank, saved in state["workers"].items():
            fresh.members[int(rank)].load(saved)
            fresh.made[int(rank)], fresh.ended[int(rank)] = state["made"][rank], state["ended"][rank]
        for rank in {str(rank) for rank in self.ranks} - state["workers"].keys():
            # It begins anew, in the epoch of the others.
            epoch = fresh.ended[int(rank)] = min(state["ended"][other] for other in state["workers"])
            fresh.made[int(rank)] = sum(self.steps[int(rank) - self.servers][:epoch])
        return fresh

    def result(self) -> list[Any]:
        """All that the numbers depend on; who looked when is no part of it."""
        states = [server.state() for server in self.machines]
        return plain([states, [self.members[rank].state() for rank in self.ranks]])


class Asking:
    """A schedule that has the first server ask for a pause after so many requests."""

    def __init__(self, course: Course, after: int, schedule: Any) -> None:
        self.course, self.left, self.schedule = course, after, schedule

    def choose(self, waiting: list[PendingRequest]) -> PendingRequest | None:
        if self.left == 0:
            self.course.machines[0].pauses.wanted = True
        self.left -= 1
        return self.schedule.choose(waiting)


def asked(
    course: Course,
    after: int,
    schedule: Any,
    losses: dict[int, int] | None = None,
    deaths: Sequence[ServerDeath] = (),
) -> Course:
    return course.run(Asking(course, after, schedule), losses, deaths)


def through_a_store(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    assert Store(folder).save({"state.npz": packed_tree(state)}, {})
    newest = Store(folder).newest()
    assert newest is not None
    return unpacked_tree(newest.read("state.npz"))


@st.composite
def courses(draw: st.DrawFn) -> Course:
    name, lag, servers = (
        draw(st.sampled_from(sorted(CASES))),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 2)),
    )
    workers, epochs = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 6), min_size=epochs, max_size=epochs)
    steps = draw(st.lists(counts, min_size=workers, max_size=workers))
    backup = "backup" in name
    return Course(
        CASES[name], lag, 1 if backup else servers, steps + [[2] * epochs] * (backup and workers < 2)
    )


@pytest.mark.slow
@settings(max_examples=60)
@given(courses(), st.integers(0, 60), st.integers(0, 2**16))
def test_whenever_a_pause_is_asked_for_nobody_waits_for_ever(course: Course, after: int, seed: int) -> None:
    """All pause, or all come to the end; and those who have paused come to the end when they go on."""
    asked(course, after, Interleaved(seed))
    done = all(server.finished for server in course.machines)
    assert course.paused is not done
    assert len({server.pauses.made for server in course.machines}) == 1
    if not done:
        again = course.resumed(unpacked_tree(packed_tree(course.state()))).run(Interleaved(seed + 1))
        assert all(server.finished for server in again.machines)
        assert [again.made[rank] for rank in again.ranks] == [sum(steps) for steps in course.steps]


BARRIERS = {"synchronous", "easgd, synchronous", "local sgd", "diloco"}
# With a backup of one a single worker cannot train, and of several it is luck who is waited for.
EXACT = [name for name in CASES if "backup" not in name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "lag", "servers"), list(itertools.product(EXACT, (0, 1, 2), (1, 2))))
def test_a_pause_changes_nothing_and_the_saved_state_goes_on_exactly(
    name: str, lag: int, servers: int, tmp_path: Path
) -> None:
    """With one worker, and where workers step together, in any order; N + M steps equal N, save, load, M."""
    steps = EPOCHS if name in BARRIERS else EPOCHS[:1]
    straight = Course(CASES[name], lag, servers, steps).run(Interleaved(0))
    paused = 0
    for after in (1, 3, 5, 8, 13):
        course = asked(Course(CASES[name], lag, servers, steps), after, Interleaved(after))
        if not course.paused:
            continue  # the training was over before
        paused += 1
        again = course.resumed(through_a_store(course.state(), tmp_path / str(after)))
        again.run(Interleaved(after + 1))
        assert again.result() == straight.result(), after
    assert paused


@pytest.mark.parametrize("name", ["downpour", "gem", *sorted(BARRIERS)])
def test_whoever_dies_amid_a_pause_of_two_servers_nobody_waits_for_ever(name: str) -> None:
    for seed in range(25):
        draw = np.random.default_rng(seed)
        course = Course(CASES[name], 0, 2, EPOCHS)
        after, handled, dead = draw.integers(2, 45), draw.integers(1, 24), draw.choice(course.ranks)
        asked(course, int(after), Interleaved(seed), {int(dead): int(handled)})
        assert len({server.pauses.made for server in course.machines}) == 1, seed
    asked(Course(CASES[name], 0, 2, EPOCHS), 22, Interleaved(22), {3: 14})


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("dies", ["server", "worker"])
def test_whoever_dies_amid_a_warm_start_with_two_servers_no_pause_waits_for_ever(dies: str, lag: int) -> None:
    """The two servers need not let the same workers in at the same time."""
    case = CASES["downpour, warm start"]
    case = replace(case, algorithm=replace(case.algorithm, warm_start=4))
    for seed in [*range(30), 34, 65, 116]:
        draw = np.random.default_rng(seed)
        course = Course(case, lag, 2, EPOCHS, spares=dies == "server")
        after, deaths, losses = int(draw.integers(30)), list[ServerDeath](), dict[int, int]()
        if dies == "server":
            died = int(draw.integers(2, 26))
            deaths = [ServerDeath(int(draw.integers(died)), died, int(draw.integers(2)))]
        else:
            losses = {int(draw.choice(course.ranks)): int(draw.integers(1, 14))}
        asked(course, after, Interleaved(seed), losses, deaths)
        assert course.paused or all(server.finished for server in course.machines), seed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("name", EXACT)
def test_who_had_died_begins_anew_at_the_centre_and_the_others_go_on(
    name: str, lag: int, servers: int, tmp_path: Path
) -> None:
    """With every algorithm, wherever it died, in each epoch."""
    dead, tried = servers + 1, 0
    for handled, after in ((1, 3), (1, 6), (2, 5), (2, 8), (4, 14), (7, 22)):
        course = Course(CASES[name], lag, servers, EPOCHS)
        asked(course, after * servers, Interleaved(after), {dead: handled * servers})
        if not course.paused or course.machines[0].peers[dead].standing is not Standing.LOST:
            continue
        tried += 1
        state = through_a_store(course.state(), tmp_path / str(after))
        again = course.resumed(state)
        centers = [server.rule.center.copy() for server in again.machines]
        again.run(RoundRobin())
        assert again.made == dict.fromkeys(again.ranks, 10)
        for rank, begun in again.begun.items():
            saved = state["workers"].get(str(rank))
            if saved is None and "warm start" not in name:  # where it is let in when others have trained
                assert np.array_equal(begun, np.concatenate(centers)), after
            elif saved is not None:
                assert np.array_equal(begun, saved["parameters"]), after
        assert all(server.finished and server.peers[dead].epochs == 3 for server in again.machines)
    assert tried or lag  # with which a worker that exchanges seldom hears too late of a pause


@pytest.mark.parametrize("name", [name for name in EXACT if not CASES[name].algorithm.tied_to_workers])
def test_where_it_is_allowed_other_workers_go_on_from_the_centre(name: str) -> None:
    tried = (asked(Course(CASES[name], 1, 2, EPOCHS), after, Interleaved(1)) for after in (12, 9, 6, 3))
    course = next(course for course in tried if course.paused)
    centers = [server.rule.center.copy() for server in course.machines]
    others = Course(CASES[name], 1, 2, [[2, 2, 2], [1, 3, 2]])
    for server, saved in zip(others.machines, course.state()["servers"], strict=True):
        server.load_for_others(saved)
        assert {peer.epochs for peer in server.peers.values()} == {max(course.ended.values())}
    for server, center in zip(others.machines, centers, strict=True):
        assert np.array_equal(server.rule.center, center)
    others.run(Interleaved(2))
    assert all(server.finished for server in others.machines)


def test_each_algorithm_says_whether_the_number_of_workers_may_change() -> None:
    tied = {type(case.algorithm).__name__ for case in CASES.values() if case.algorithm.tied_to_workers}
    assert tied == {"Synchronous"}
