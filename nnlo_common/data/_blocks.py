"""The order of an epoch of data that is read in contiguous slices, and fixed shares of it."""

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
    """Which samples are at which positions of an epoch, where whole blocks of samples change places.

    A block is a slice of one part of the data, e.g. of one file, so that it can be read at once. The order
    depends on nothing but the arguments: it is the same on every rank, for any number of workers, and after a
    restart. Workers take ranges of *positions*: fixed ones (`portion`), or leases of them.

    Args:
        lengths: how many samples each part of the data has.
        block: how many samples a block has; the last one of a part may have fewer.
        shuffle: let the blocks change places, anew in each epoch.
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
        self._stops: _Indices = np.append(self._starts, self.size)[1:]  # each block ends where one begins
        self._last: tuple[int, _Indices, _Indices] | None = None  # epoch, order, ends: one for all threads

    def ranges(self, epoch: int, start: int, stop: int) -> list[Range]:
        """Return the samples at the positions [start, stop) of an epoch, as ranges in their order."""
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
        """The order of the blocks in an epoch, and the position behind each."""
        if self._last is None or self._last[0] != epoch:
            order = np.asarray(epoch_order(len(self._starts), seed=self.seed, epoch=epoch, shuffle=True))
            self._last = epoch, order, np.cumsum((self._stops - self._starts)[order])
        return self._last[1:]


def portion(size: int, worker: int, workers: int) -> Range:
    """Return the positions of an epoch that a worker takes where all take as many, in a row.

    Their portions differ by at most one.

    Example:
        >>> [portion(10, worker, 3) for worker in range(3)]
        [(0, 3), (3, 6), (6, 10)]
    """
    return worker * size // workers, (worker + 1) * size // workers
