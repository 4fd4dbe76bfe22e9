"""The order of an epoch, equal on all ranks without communication, and each worker's fixed share of it."""

from __future__ import annotations

import numpy as np

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError

__all__ = ["MOST_PASSES", "epoch_order", "lacks_one", "share"]

#: An epoch that takes several passes numbers the orders of its passes from its own number times this on.
MOST_PASSES = 1 << 20


def epoch_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the index of the sample at each position of an epoch.

    The order depends on the arguments only: it is the same on every rank, for any number of workers, and
    after a restart in mid-epoch.

    Args:
        size: of the data set.
        seed: of the permutations; equal on all ranks.
        epoch: its number, from 0.
        shuffle: permute the samples, differently in each epoch; otherwise keep their order.

    Raises:
        ConfigurationError: a size, seed or epoch that is not a whole number of at least 0.

    Example:
        >>> epoch_order(5, seed=0, epoch=1, shuffle=True), epoch_order(3, seed=0, epoch=1, shuffle=False)
        ([1, 4, 3, 0, 2], [0, 1, 2])
    """
    size = whole_number("size", size, 0)
    key = [whole_number("seed", seed, 0), whole_number("epoch", epoch, 0)]
    if not shuffle:
        return list(range(size))
    # A list, because indexing an array converts each number to an integer while the model waits.
    order: list[int] = np.random.default_rng(key).permutation(size).tolist()
    return order


def share(
    size: int, worker: int, workers: int, *, done: int = 0, group_size: int = 1, even: bool = False
) -> range:
    """Return the positions of an epoch that a worker takes under static assignment.

    Worker w of p takes every p-th position, beginning with the w-th: together they take each position
    once, and their shares differ by at most one.

    The first ranks of a group may get one position more than the others, which then lack a batch for a step
    of the group; see `lacks_one`.

    Args:
        size: the number of positions in the epoch.
        worker: its index among the workers, from 0; not its rank.
        workers: the number of workers.
        done: the number of positions of its share already taken, to resume in mid-epoch.
        group_size: the number of ranks of each group; then `worker` and `workers` count single ranks.
        even: the ranks of a group get equally many positions; fewer than `group_size` of each group's are
            left out.

    Raises:
        ConfigurationError: no such worker, or a number that is not whole.

    Example:
        >>> list(share(10, 1, 3)), list(share(10, 1, 3, done=2))
        ([1, 4, 7], [7])
        >>> list(share(5, 0, 2, group_size=2)), list(share(5, 1, 2, group_size=2, even=True))
        ([0, 2, 4], [1, 3])
    """
    workers = whole_number("workers", workers, 1)
    if whole_number("worker", worker, 0) >= workers:
        raise ConfigurationError(
            f"the share of worker={worker!r} was asked for, but of {workers} workers the last is "
            f"{workers - 1}; pass its index among the workers, not its rank"
        )
    positions = range(worker, whole_number("size", size, 0), workers)
    if whole_number("group_size", group_size, 1) > 1 and even:
        groups = workers // group_size
        positions = positions[: len(range(worker % groups, size, groups)) // group_size]
    return positions[whole_number("done", done, 0) :]


def lacks_one(size: int, worker: int, workers: int, group_size: int) -> bool:
    """Return whether the share of a rank of a group is shorter than that of the group's first rank.

    Example:
        >>> [lacks_one(5, worker, 2, group_size=2) for worker in range(2)]
        [False, True]
    """
    mine, first = share(size, worker, workers), share(size, worker % (workers // group_size), workers)
    return len(mine) < len(first)
