"""Batches of a source: blocks in the order of an epoch, mixed in memory, read ahead."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from nnlo_common._numbers import whole_number
from nnlo_common.data._blocks import Blocks
from nnlo_common.data._prefetch import Prefetch
from nnlo_common.data._ranges import Range, Ranges
from nnlo_common.data._source import Array, Source

__all__ = ["Batches"]

# A slice of this size is read about as fast as a longer one.
_BLOCK_BYTES = 2**18
# How many blocks come together in a window; a batch then has samples of about as many places in the files.
_MIXED = 64
_WINDOW_BYTES = 2**26


class Batches:
    """The batches of a range of positions of each epoch, every sample once.

    Blocks of samples are read as they lie in the files, in the order of `Blocks`. With `shuffle` the samples
    of a *window*, some whole batches in a row, are permuted in memory. While the batches of one window are
    used, a thread reads and assembles those of the next; so about three windows are in memory at most,
    however large the data are.

    Args:
        source: of the samples.
        batch_size: how many samples a batch has; the last one may have fewer.
        shuffle: let blocks change places, and mix windows; otherwise all stays as it lies.
        seed: of the permutations.
        block: how many samples are read in a row; None: about 256 KB, in whole chunks of the files.
        window: how many batches are mixed; None: so many that 64 blocks come together, up to 64 MB.
        part: the positions; None: all.

    Example:
        >>> from nnlo_common.data import Arrays
        >>> batches = Batches(Arrays(np.arange(5)), batch_size=2, shuffle=True, block=1)
        >>> [batch[0].tolist() for batch in batches.epoch(0)]
        [[2, 4], [3, 0], [1]]
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        block: int | None = None,
        window: int | None = None,
        part: Range | None = None,
    ) -> None:
        self.source, self.batch_size = source, whole_number("batch_size", batch_size, 1)
        row_bytes = max(sum(field.row_bytes for field in source.fields), 1)
        self.block = _good_block(source, row_bytes) if block is None else whole_number("block", block, 1)
        if window is None:
            most = max(_WINDOW_BYTES // (self.batch_size * row_bytes), 1)
            window = min(math.ceil(_MIXED * self.block / self.batch_size), most)
        self.window = whole_number("window", window, 1)
        self._order = Blocks(source.lengths, block=self.block, shuffle=shuffle, seed=seed)
        self._part = part or (0, self._order.size)
        self._ahead: Prefetch[tuple[int, int], list[Any]] = Prefetch(self._read)

    def take_part(self, part: Range) -> None:
        """Take other positions from now on."""
        if part != self._part:
            self._ahead.close()
            self._part = part

    def __len__(self) -> int:
        """How many batches an epoch has."""
        start, stop = self._part
        return math.ceil((stop - start) / self.batch_size)

    def size_of(self, index: int) -> int:
        """Return how many samples a batch has."""
        start, stop = self._part
        return min(self.batch_size, stop - start - index * self.batch_size)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return the batches of an epoch, in order."""
        return (self.get(epoch, index) for index in range(len(self)))

    def get(self, epoch: int, index: int) -> Any:
        """Return one batch; fast for those who ask for one after another.

        Raises:
            IndexError: there is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        window, place = divmod(index, self.window)
        more = (window + 1) * self.window < len(self)
        return self._ahead.get((epoch, window), then=(epoch, window + 1) if more else None)[place]

    def close(self) -> None:
        """Forget what was read, when nothing is read any more."""
        self._ahead.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_ahead"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._ahead = Prefetch(self._read)

    def _read(self, key: tuple[int, int]) -> list[Any]:
        """Read a window, and make batches of it."""
        epoch, window = key
        start, stop = self._part
        start += window * self.window * self.batch_size
        size = min(self.window * self.batch_size, stop - start)
        ranges = self._order.ranges(epoch, start, start + size)
        arrays = [np.empty((size, *field.shape), field.dtype) for field in self.source.fields]
        at = 0
        # Mixed they are afterwards: till then as they lie, so that the files are gone through once.
        for first, last in Ranges(ranges):
            self.source.read(first, last, [array[at : at + last - first] for array in arrays])
            at += last - first
        rows: Array | None = None
        if self._order.shuffle:
            rows = np.random.default_rng([self._order.seed, epoch, start]).permutation(size)
        return [self._batch(arrays, rows, at) for at in range(0, size, self.batch_size)]

    def _batch(self, arrays: list[Array], rows: Array | None, at: int) -> Any:
        some: slice | Array = slice(at, at + self.batch_size)
        if rows is not None:
            some = rows[some]
        return self.source.assemble([array[some] for array in arrays])


def _good_block(source: Source, row_bytes: int) -> int:
    """Return a size of blocks that reads fast, but lets a small data set have many."""
    rows = max(min(_BLOCK_BYTES // row_bytes, sum(source.lengths) // _MIXED), 1)
    if source.grain * row_bytes > _WINDOW_BYTES // 4:  # chunks as large as that are cut, or nothing would mix
        return rows
    return math.ceil(rows / source.grain) * source.grain
