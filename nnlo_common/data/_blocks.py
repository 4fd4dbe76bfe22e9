"""The order of an epoch for data read in contiguous slices, and each worker's fixed part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from nnlo_common.base._arguments import whole_number
from nnlo_common.data._order import epoch_order
from nnlo_common.data.leasing._ranges import Range

__all__ = ["Blocks", "portion"]

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
