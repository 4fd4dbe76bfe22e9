"""The order of an epoch for data read in contiguous slices, and each worker's fixed part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._ledger import Range

__all__ = ["Blocks", "MOST_PASSES", "epoch_order", "lacks_one", "portion", "share"]

# -- the order of an epoch, equal on all ranks without communication, and each worker's fixed share of it.

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


_Indices = npt.NDArray[np.int64]


class Blocks:
    """The order of the samples in an epoch that permutes whole blocks of them.

    A block is a slice of one part of the data, e.g. of one file, so that one read returns it. The order
    depends on the arguments only: it is the same on every rank, for any number of workers, and after a
    restart. Workers take ranges of *positions*: fixed ones (`portion`), or leases.

    Args:
        lengths: the number of samples in each part of the data.
        block: samples in a block; the last one of a part may have fewer.
        shuffle: permute the blocks, differently in each epoch.
        seed: of the permutations.

    Example:
        >>> blocks = Blocks([5, 2], block=2, shuffle=True, seed=1)
        >>> blocks.ranges(0, 0, 7), blocks.ranges(1, 0, 7), blocks.ranges(1, 3, 6)
        ([(0, 2), (2, 4), (4, 5), (5, 7)], [(4, 5), (0, 2), (2, 4), (5, 7)], [(2, 4), (5, 6)])
    """

    def __init__(self, lengths: Sequence[int], *, block: int, shuffle: bool = False, seed: int = 0) -> None:
        block = whole_number("block", block, 1)
        ends = np.cumsum(np.asarray([0, *lengths], np.int64))
        self.size, self.shuffle = int(ends[-1]), shuffle
        self.seed = whole_number("seed", seed, 0)
        parts = [(start, stop) for start, stop in pairwise(ends.tolist()) if start < stop]
        cuts = [np.zeros(0, np.int64), *(np.arange(start, stop, block) for start, stop in parts)]
        self._starts: _Indices = np.concatenate(cuts)
        self._stops: _Indices = np.append(self._starts, self.size)[
            1:
        ]  # each block ends where the next begins
        self._last: tuple[int, _Indices, _Indices] | None = (
            None  # epoch, order, ends; replaced whole, for threads
        )

    def ranges(self, epoch: int, start: int, stop: int) -> list[Range]:
        """Return the samples at the positions [start, stop) of an epoch, as ranges in the epoch's order."""
        if start >= stop:
            return []
        if not self.shuffle:
            return [(start, stop)]
        order, ends = self._epoch(epoch)
        found: list[Range] = []
        at = int(np.searchsorted(ends, start, side="right"))
        while start < stop:
            last, end = int(self._stops[order[at]]), int(ends[at])
            found.append((last - (end - start), last - max(end - stop, 0)))
            start, at = end, at + 1
        return found

    def _epoch(self, epoch: int) -> tuple[_Indices, _Indices]:
        """Return the order of the blocks in an epoch, and the end position of each."""
        if self._last is None or self._last[0] != epoch:
            order = np.asarray(epoch_order(len(self._starts), seed=self.seed, epoch=epoch, shuffle=True))
            self._last = epoch, order, np.cumsum((self._stops - self._starts)[order])
        return self._last[1:]


def portion(size: int, worker: int, workers: int, group_size: int = 1) -> Range:
    """Return the range of positions that a worker takes of an epoch divided equally.

    The portions differ by at most one position. The ranks of a group, of which `worker` and `workers` count
    each, divide the group's portion; the first of them may take one more than the others.

    Example:
        >>> [portion(10, worker, 3) for worker in range(3)]
        [(0, 3), (3, 6), (6, 10)]
        >>> [portion(5, worker, 2, group_size=2) for worker in range(2)]
        [(0, 3), (3, 5)]
    """
    groups = workers // group_size
    member, worker = divmod(worker, groups)
    start, stop = worker * size // groups, (worker + 1) * size // groups
    each, more = divmod(stop - start, group_size)
    begin = start + member * each + min(member, more)
    return begin, begin + each + (member < more)
