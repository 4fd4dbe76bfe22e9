"""Which modules hold an optimizer's parameters, found among all of the process without disturbing it."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from nnlo_torch._modules import modules_of  # noqa: E402


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
    pair, errors, looked = Pair(), [], threading.Event()

    def fill() -> None:
        try:
            while not looked.is_set():
                tuple(number for number in range(300))
        except SystemError as error:
            errors.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    with hurried_threads():
        for thread in threads:
            thread.start()
        try:
            found = [modules_of(pair.parameters()) for _ in range(20)]
        finally:
            looked.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert found == [[pair]] * 20


@contextmanager
def hurried_threads() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
