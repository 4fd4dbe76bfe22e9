"""Several threads on the blocks of a vector: the bits of one thread, parts when the caller asks for them."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nnlo_common import AGN, EASGD, SGD, Adam, DiLoCo, Downpour, DynSGD, LocalSGD, Steady, Synchronous
from nnlo_common.algorithms import Algorithm
from nnlo_common.algorithms._vector_optimizer import VectorOptimizer
from nnlo_common.base import _block_threads
from nnlo_common.base._block_threads import Scratch, on_threads, work_through
from nnlo_common.base._flat_vector import PartWork
from nnlo_common.testing import RandomOrder, train_virtually

BLOCK = 256
SIZE = 5 * BLOCK + 37
LIMIT_S = 30.0


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vectors of a thousand numbers be worth three threads."""
    monkeypatch.setattr(_block_threads, "BLOCK", BLOCK)
    monkeypatch.setattr(_block_threads, "WORTH", BLOCK)
    monkeypatch.setattr(_block_threads, "usable_threads", lambda: 3)


def starts(of: list[slice]) -> list[int]:
    return sorted(part.start for part in of)


@pytest.mark.usefixtures("three_threads")
def test_each_block_is_done_once_by_several_threads() -> None:
    done: list[slice] = []
    together = threading.Barrier(3)  # passes only if three threads are at work at once

    def work(part: slice) -> None:
        if part.start < 3 * BLOCK:
            together.wait(LIMIT_S)
        done.append(part)

    work_through(work, SIZE)
    assert starts(done) == [0, 256, 512, 768, 1024, 1280]
    assert max(part.stop for part in done) == SIZE


@pytest.mark.usefixtures("three_threads")
def test_a_part_is_done_when_its_call_returns_and_others_need_not_be() -> None:
    caller, together = threading.current_thread(), threading.Barrier(3)
    first, others = threading.Event(), threading.Event()
    done: list[int] = []

    def work(part: slice) -> None:
        if part.start < 3 * BLOCK:
            together.wait(LIMIT_S)  # each thread has one of the first three blocks
        if threading.current_thread() is not caller:
            assert (others if part.start else first).wait(LIMIT_S)
        elif not part.start:
            first.set()
        done.append(part.start)

    letting_go = threading.Timer(0.05, first.set)
    letting_go.start()
    move = on_threads(work, SIZE)
    move(slice(0, 1))
    early = list(done)
    others.set()
    move(slice(1, SIZE))
    letting_go.join()
    assert 0 in early
    assert len(early) < 6  # a helper holds a block
    assert sorted(done) == [0, 256, 512, 768, 1024, 1280]


@pytest.mark.usefixtures("three_threads")
def test_an_error_of_any_thread_is_the_callers_and_nobody_writes_after_it() -> None:
    others = threading.Event()
    ended: list[int] = []

    def work(part: slice) -> None:
        if part.start == 0:
            assert others.wait(LIMIT_S)
            raise FloatingPointError("divide by zero")
        others.set()
        until = time.monotonic() + LIMIT_S
        while move._error is None and time.monotonic() < until:  # type: ignore[attr-defined]
            time.sleep(0.001)
        ended.append(part.start)

    move = on_threads(work, SIZE)
    with pytest.raises(FloatingPointError, match="divide by zero"):
        move(slice(0, SIZE))
    before = list(ended)
    with pytest.raises(FloatingPointError):
        move(slice(0, SIZE))
    assert ended == before
    assert 1 <= len(ended) <= 2  # those that were being computed


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("how", ["raise", "ignore"])
def test_numpy_handles_errors_as_in_the_callers_thread(how: Any) -> None:
    zeros = np.zeros(SIZE, np.float32)
    together = threading.Barrier(3)

    def work(part: slice) -> None:
        if part.start < 3 * BLOCK:
            together.wait(LIMIT_S)
        np.divide(zeros[part], zeros[part], out=zeros[part])

    with np.errstate(invalid=how):
        if how == "raise":
            with pytest.raises(FloatingPointError):
                work_through(work, SIZE)
            assert np.count_nonzero(np.isnan(zeros)) <= 3 * BLOCK
        else:
            work_through(work, SIZE)  # a warning would be an error
            assert np.isnan(zeros).all()


def test_threads_are_as_many_as_the_rank_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(part: slice) -> None:
        pass

    for threads, size, more in ((1, 1 << 24, False), (4, (1 << 20) - 1, False), (4, 1 << 20, True)):
        monkeypatch.setattr(_block_threads, "usable_threads", lambda given=threads: given)
        assert (on_threads(work, size) is not work) == more


def test_each_thread_has_memory_of_its_own() -> None:
    scratch = Scratch(5)
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(scratch.rows))
    thread.start()
    thread.join()
    assert scratch.rows is scratch.rows
    assert scratch.rows.shape == found[0].shape == (2, 5)
    assert not np.may_share_memory(scratch.rows, found[0])
    assert not np.may_share_memory(copy.deepcopy(scratch).rows, scratch.rows)


#: A commit with three threads.
START = """
import atexit, os, threading, numpy as np
from nnlo_common.base import _block_threads
_block_threads.usable_threads = lambda: 3
x = np.zeros(2_000_000, np.float32)
def add(part): x[part] += 1
def commit(): _block_threads.work_through(add, x.size)
commit()
"""


@pytest.mark.parametrize(
    "rest",
    [
        """
child = os.fork()
commit()
assert (x == 2).all()
if not child:
    os._exit(7 if threading.active_count() > 1 else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
        """
def last():
    commit()
    os._exit(0 if (x == 2).all() else 1)
atexit.register(last)
""",
    ],
    ids=["in a forked copy", "while Python ends"],
)
def test_commits_go_on_where_the_threads_have_ended(rest: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", START + rest]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


#: Each way to commit, and each wire.
TRAININGS: dict[str, tuple[Algorithm, Callable[[], VectorOptimizer] | None]] = {
    "Downpour": (Downpour(), lambda: SGD(0.1, momentum=0.9, nesterov=True)),
    "Downpour, Adam": (Downpour(), lambda: Adam(0.01)),
    "DynSGD": (DynSGD(), lambda: SGD(0.1, weight_decay=0.1)),
    "AGN": (AGN(every=2, local_learning_rate=0.1), lambda: SGD(0.1)),
    "Steady": (Steady(), lambda: SGD(0.1, momentum=0.9)),
    "Steady, Adam": (Steady(), lambda: Adam(0.01)),
    "Steady, synchronous": (Steady(synchronous=True), lambda: Adam(0.01)),
    "Synchronous": (Synchronous(), lambda: SGD(0.1)),
    "EASGD": (EASGD(every=2), None),
    "EASGD, synchronous": (EASGD(every=2, synchronous=True), None),
    "LocalSGD": (LocalSGD(every=2), None),
    "DiLoCo": (DiLoCo(every=2), lambda: SGD(0.7, momentum=0.9, nesterov=True)),
    **{
        f"Downpour, {wire}": (Downpour(wire=wire), lambda: SGD(0.1, momentum=0.9))
        for wire in ("bfloat16", "float16", "int8", "topk")
    },
}


def trained(name: str) -> Any:
    algorithm, optimizer = TRAININGS[name]
    random = np.random.default_rng(3)
    run = train_virtually(
        algorithm,
        lambda x, rank: np.float32(0.3 + 0.1 * rank) * x + random.standard_normal(x.size, np.float32),
        random.standard_normal(SIZE).astype("f4"),
        workers=3,
        steps=9,
        optimizer=None if optimizer is None else optimizer(),
        local=None if optimizer is not None and "DiLoCo" not in name else SGD(0.05),
        schedule=RandomOrder(11),
    )
    return run.center


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_bits_of_one_thread(name: str, request: pytest.FixtureRequest) -> None:
    alone = trained(name)
    request.getfixturevalue("three_threads")
    counted = []
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    ahead = _block_threads._Ahead

    def noted(work: PartWork, size: int, threads: int) -> PartWork:
        counted.append(size)
        return ahead(work, size, threads)

    monkeypatch.setattr(_block_threads, "_Ahead", noted)
    assert np.array_equal(trained(name), alone)
    assert set(counted) == {SIZE}
    assert np.abs(alone).max() < 10
