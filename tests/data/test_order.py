"""The order of an epoch and its fixed shares: equal on all ranks, each position once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError
from nnlo_common.data import epoch_order, share

SMALL = st.integers(0, 50)


def test_an_order_is_what_it_has_always_been() -> None:
    """A training that resumes under a newer NumPy must find the same samples."""
    assert epoch_order(10, seed=0, epoch=0, shuffle=True) == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert epoch_order(10, seed=7, epoch=3, shuffle=True) == [3, 5, 4, 7, 8, 0, 9, 2, 1, 6]
    assert epoch_order(4, seed=7, epoch=3, shuffle=False) == [0, 1, 2, 3]


@settings(max_examples=50)
@given(SMALL, SMALL, SMALL)
def test_an_order_has_each_sample_once_and_depends_on_seed_and_epoch_only(
    size: int, seed: int, epoch: int
) -> None:
    order = epoch_order(size, seed=seed, epoch=epoch, shuffle=True)
    np.random.default_rng().random()  # whatever else draws random numbers
    assert order == epoch_order(size, seed=seed, epoch=epoch, shuffle=True)
    assert sorted(order) == epoch_order(size, seed=seed, epoch=epoch, shuffle=False) == list(range(size))
    assert all(type(index) is int for index in order)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [epoch_order(30, seed=s, epoch=e, shuffle=True) for s in range(4) for e in range(4)]
    assert len(set(map(tuple, orders))) == 16


@settings(max_examples=100)
@given(SMALL, st.integers(1, 9))
def test_shares_have_each_position_once_and_differ_by_one_at_most(size: int, workers: int) -> None:
    shares = [share(size, worker, workers) for worker in range(workers)]
    assert sorted(position for part in shares for position in part) == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    order = epoch_order(size, seed=1, epoch=0, shuffle=True)
    for worker, part in enumerate(shares):
        assert [order[position] for position in part] == order[worker::workers]


@settings(max_examples=100)
@given(SMALL, st.integers(1, 5), SMALL)
def test_a_share_goes_on_where_it_was_left(size: int, workers: int, done: int) -> None:
    for worker in range(workers):
        assert list(share(size, worker, workers, done=done)) == list(share(size, worker, workers))[done:]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"worker": 3}, "worker=3 was asked for, but of 3 workers the last is 2; pass its index"),
        ({"worker": -1}, "worker=-1: must be a whole number of at least 0"),
        ({"workers": 0}, "workers=0: must be a whole number of at least 1"),
        ({"size": -1}, "size=-1: must be a whole number of at least 0"),
        ({"done": -1}, "done=-1: must be"),
        ({"done": 1.0}, r"done=1\.0: must be"),
    ],
)
def test_a_share_that_there_is_not_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        share(**{"size": 9, "worker": 0, "workers": 3, **arguments})


@pytest.mark.parametrize("name", ["size", "seed", "epoch"])
@pytest.mark.parametrize("value", [-1, 0.5, None, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_order_of_no_whole_numbers_is_refused(name: str, value: object, shuffle: bool) -> None:
    arguments: dict[str, Any] = {"size": 3, "seed": 0, "epoch": 0, name: value}
    with pytest.raises(ConfigurationError, match=f"{name}={value}: must be a whole number of at least 0"):
        epoch_order(**arguments, shuffle=shuffle)
