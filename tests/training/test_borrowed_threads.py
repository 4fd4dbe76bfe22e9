"""The cores of workers that wait: how many threads a server has meanwhile, and for which commits."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pytest

from nnlo_common import SGD, Adam, Downpour, Participant, Steady, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base import _block_threads
from nnlo_common.base._block_threads import (
    cached_blocks,
    longest_block,
    on_threads,
    with_threads,
    work_through,
)
from nnlo_common.base._flat_vector import PartWork
from nnlo_common.cluster._hosts import locate
from nnlo_common.cluster._threads import BorrowedThreads
from nnlo_common.testing import MemoryCluster
from tests.helpers.threads import flat, train

SIZE = 1500
TIMEOUT_S = 180.0


def threads(
    hosts: str, cores: int, servers: Collection[int], groups: list[tuple[int, ...]]
) -> BorrowedThreads:
    """Return those of rank 0, where all ranks of a host may use each of its cores."""
    reports: list[dict[str, int | str]] = [{"host": host, "cores": cores, "gpus": 0} for host in hosts]
    return BorrowedThreads(0, locate(reports), servers, groups)


@pytest.mark.parametrize(
    ("hosts", "cores", "servers", "groups", "own", "waiting", "expected"),
    [
        ("aa", 2, [0], [(1,)], 1, [1], 2),
        ("aa", 2, [0], [(1,)], 1, [], 1),
        ("aaa", 2, [0], [(1,), (2,)], 1, [1], 1),  # the other worker computes, and there is no third core
        ("aaa", 2, [0], [(1,), (2,)], 1, [1, 2], 2),
        ("aaa", 3, [0], [(1,), (2,)], 1, [2], 2),
        ("ab", 2, [0], [(1,)], 1, [1], 1),  # it waits on another host
        ("aaaa", 8, [0], [(1,), (2,), (3,)], 2, [1, 3], 6),
        ("aaaab", 8, [0], [(1, 2), (3, 4)], 1, [1, 3], 4),  # members of groups wait with their leads
        ("aaaa", 4, [0, 1], [(2,), (3,)], 1, [2, 3], 2),  # two servers share what they borrow
        ("aaaa", 4, [0, 1], [(2,), (3,)], 1, [2], 1),
        ("aa", 8, [0], [(1,)], 8, [1], 8),  # each rank has all cores already
        ("aa", 1, [0], [(1,)], 4, [1], 4),  # as the user has set it
    ],
)
def test_a_server_has_the_threads_of_those_that_wait_here(
    hosts: str,
    cores: int,
    servers: list[int],
    groups: list[tuple[int, ...]],
    own: int,
    waiting: list[int],
    expected: int,
) -> None:
    assert threads(hosts, cores, servers, groups)(waiting, own) == expected


def test_a_bound_server_has_no_more_threads_than_its_cores() -> None:
    places = locate([{"host": "a", "cores": 1, "core_mask": hex(1 << core), "gpus": 0} for core in range(3)])
    assert BorrowedThreads(0, places, [0], [(1,), (2,)])([1, 2], 1) == 1


def test_only_what_begins_in_there_has_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_block_threads, "usable_threads", lambda: 1)

    def work(part: slice) -> None:
        pass

    with with_threads(2):
        assert on_threads(work, 1 << 20) is not work
        assert on_threads(work, 1 << 19) is work
        with with_threads(0):
            assert on_threads(work, 1 << 20) is work
        assert on_threads(work, 1 << 20) is not work
    assert on_threads(work, 1 << 20) is work


def test_blocks_are_longer_where_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_block_threads, "usable_threads", lambda: 1)
    size, seen = (1 << 20) + 5, list[int]()

    def work(part: slice) -> None:
        seen.extend(block.stop - block.start for block in cached_blocks(part, 1 << 16))

    work_through(work, size)
    assert set(seen) == {1 << 16, 5}
    seen.clear()
    with with_threads(2):
        work_through(work, size)
    assert set(seen) == {1 << 18, 5}
    assert longest_block(size, 1 << 16) == 1 << 18  # room for each
    assert longest_block(size, 1 << 19) == 1 << 19
    assert longest_block(1 << 17, 1 << 16) == 1 << 16
    assert longest_block(100, 1 << 16) == 100
    work_through(work, size)
    assert seen[-2:] == [1 << 16, 5]


def trained(
    algorithm: Algorithm, optimizer: Callable[[], VectorOptimizer], size: int, workers: int = 1
) -> np.ndarray:
    def program(world=None):  # type: ignore[no-untyped-def]
        start = [np.linspace(-1, 1, size, dtype=np.float32)]
        with Participant(algorithm, start, optimizer=optimizer(), world=world) as me:
            train(me, [5])
            return flat(me.parameters)

    with MemoryCluster(1 + workers) as cluster:  # threads that help stay
        return cluster.run(program, TIMEOUT_S)[0]


@pytest.mark.parametrize(
    ("algorithm", "optimizer", "size", "lends"),
    [
        (Downpour(), lambda: Adam(0.01), SIZE, True),
        (Steady(), lambda: Adam(0.01), SIZE, True),
        (Downpour(), lambda: SGD(0.1, momentum=0.9), SIZE, False),  # made as fast as it is sent
        (Downpour(), lambda: SGD(0.1), SIZE, False),
        (Downpour(lag=1), lambda: Adam(0.01), SIZE, False),  # the worker computes meanwhile
        (Downpour(), lambda: Adam(0.01), 400, False),  # too short for two threads
    ],
)
def test_a_worker_that_waits_for_a_heavy_commit_lends_its_threads(
    algorithm: Algorithm,
    optimizer: Callable[[], VectorOptimizer],
    size: int,
    lends: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_block_threads, "usable_threads", lambda: 1)
    monkeypatch.setattr(_block_threads, "BLOCK", 256)
    monkeypatch.setattr(_block_threads, "WORTH", 256)
    alone, asked, helped = trained(algorithm, optimizer, size), list[set[int]](), list[int]()
    ahead = _block_threads._Ahead

    def two(self: BorrowedThreads, waiting: Collection[int], own: int | None = None) -> int:
        asked.append({*waiting})
        return 2

    def noted(work: PartWork, size: int, threads: int) -> _block_threads._Ahead:
        helped.append(threads)
        return ahead(work, size, threads)

    monkeypatch.setattr(BorrowedThreads, "__call__", two)
    monkeypatch.setattr(_block_threads, "_Ahead", noted)
    assert np.array_equal(trained(algorithm, optimizer, size), alone)
    assert asked == [{1}] * (5 * lends)
    assert set(helped) == ({2} if lends else set())


def test_steady_is_heavy_by_its_own_adam_whoever_has_the_options() -> None:
    start = np.zeros(10, np.float32)
    for optimizer, heavy in ((Adam(0.01), True), (SGD(0.1, momentum=0.9), False)):
        rule = Steady().center(start, 2, optimizer)
        assert rule.heavy == heavy
        rule.optimizer = None  # a framework's is none of the core's
        assert rule.heavy == heavy


def test_all_that_wait_for_a_commit_together_lend_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[set[int]]()

    def noted(self: BorrowedThreads, waiting: Collection[int], own: int | None = None) -> int:
        asked.append({*waiting})
        return 1

    monkeypatch.setattr(BorrowedThreads, "__call__", noted)
    trained(Synchronous(), lambda: Adam(0.01), 1 << 20, workers=2)
    assert [len(one) for one in asked] == [1, 2, 1, 2, 1]  # five batches, of which one worker has three
