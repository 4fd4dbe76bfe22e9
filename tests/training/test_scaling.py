"""Learning rate and epochs for several ranks."""

from __future__ import annotations

import math

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster
from nnlo_common.training._scaling import epochs_per_rank, scale_lr


def on(ranks, call):
    """The result of a call, the same on all ranks."""
    with MemoryCluster(ranks) as cluster:
        found = cluster.run(call)
    assert len(set(found)) == 1
    return found[0]


@pytest.mark.parametrize(
    ("ranks", "layout", "together", "of_group"),
    [
        (4, {"servers": 0}, 4, 4),
        (4, {}, 3, 1),
        (7, {"group_size": 2}, 6, 2),
        (7, {"servers": 2}, 5, 1),
        (11, {"servers": 2, "group_size": 3}, 9, 3),
        (8, {"sub_servers": 2}, 5, 1),
        (7, {"sub_servers": "host"}, 5, 1),
        (1, {}, 1, 1),
    ],
)
def test_the_ranks_that_train_count(ranks, layout, together, of_group):
    assert on(ranks, lambda world: scale_lr(0.5, world=world, **layout)) == 0.5 * together
    root = on(ranks, lambda world: scale_lr(0.5, rule="square_root", world=world, **layout))
    assert root == 0.5 * math.sqrt(together)
    assert on(ranks, lambda world: scale_lr(0.5, rule="none", world=world, **layout)) == 0.5
    alone = on(ranks, lambda world: scale_lr(0.5, asynchronous=True, world=world, **layout))
    assert alone == 0.5 * of_group
    for epochs in (1, 10, 13):
        each = on(ranks, lambda world, epochs=epochs: epochs_per_rank(epochs, world=world, **layout))
        assert (each - 1) * together < epochs <= each * together  # the least number that is enough


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: scale_lr("0.1"), "rate='0.1' is not possible: use a number above 0"),
        (lambda: scale_lr(0), "rate=0 is not possible"),
        (
            lambda: scale_lr(0.1, rule="cubic"),
            "rule='cubic' is not possible: use 'linear', 'square_root' or 'none'",
        ),
        (lambda: epochs_per_rank(2.5), "epochs=2.5: must be a whole number of at least 1"),
    ],
)
def test_bad_arguments_are_refused_in_one_process_too(call, message):
    with pytest.raises(ConfigurationError, match=message):
        call()


def test_ranks_that_cannot_be_arranged_are_refused_with_the_arithmetic():
    with (
        MemoryCluster(4) as cluster,
        pytest.raises(ConfigurationError, match="not a multiple of group_size=2"),
    ):
        cluster.run(lambda world: scale_lr(0.1, group_size=2, world=world))
