"""Which modules hold an optimizer's parameters, found among all of the process without disturbing it."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from nnlo_torch._flat_model import modules_of  # noqa: E402


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)])


def test_the_outermost_module_is_found() -> None:
    pair = Pair()
    assert modules_of(pair.parameters()) == [pair]
    assert modules_of([pair.parts[1].weight]) == [pair]


def test_modules_come_in_the_order_of_the_parameters() -> None:
    first, second = Pair(), Pair()
    assert modules_of([*second.parameters(), *first.parameters()]) == [second, first]


def test_each_module_that_shares_a_parameter_is_found() -> None:
    encoder, decoder = torch.nn.Linear(2, 2), Pair()
    decoder.parts[0].weight = encoder.weight
    assert set(modules_of([encoder.weight])) == {encoder, decoder}


def test_a_copy_and_a_module_that_is_only_half_made_are_no_obstacle() -> None:
    pair = copy.deepcopy(Pair())
    unfinished = Pair.__new__(Pair)
    assert modules_of(pair.parameters()) == [pair]
    assert not vars(unfinished)


def test_no_other_thread_is_disturbed() -> None:
    # Whoever takes hold of a tuple that is just being filled makes the thread that fills it fail.
    def fill() -> None:
        tuple(number for number in range(300))

    pair = Pair()
    with busy(fill, fill):
        found = [modules_of(pair.parameters()) for _ in range(20)]
    assert found == [[pair]] * 20


@pytest.mark.extended
def test_modules_that_another_thread_is_making_are_no_obstacle() -> None:
    growing, part = torch.nn.Module(), torch.nn.ReLU()

    def grow() -> None:
        for number in range(2000):
            growing.add_module(f"part {number}", part)
        growing._modules.clear()

    pair = Pair()
    with busy(grow):
        found = [modules_of(pair.parameters()) for _ in range(50)]
    assert found == [[pair]] * 50


@contextmanager
def busy(*works: Callable[[], object]) -> Iterator[None]:
    """Do something again and again in threads that take turns as often as they can; none may fail."""
    errors: list[BaseException] = []
    over = threading.Event()

    def repeat(work: Callable[[], object]) -> None:
        try:
            while not over.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not errors
