"""Batches of a source: read ahead in blocks, and shuffled in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from nnlo_common.base._arguments import whole_number
from nnlo_common.base._spans import span, stage
from nnlo_common.data._blocks import Blocks
from nnlo_common.data._ledger import Lease, Range, Ranges
from nnlo_common.data._prefetch import Prefetch
from nnlo_common.data._source import Array, Field, RaggedSource, Source
from nnlo_common.data._spare_arrays import SpareArrays

__all__ = ["Batches"]

# Reading longer slices is hardly faster.
_BLOCK_BYTES = 2**18
# Blocks in a window; a batch then has samples from about as many places in the files.
_MIXED = 64
_WINDOW_BYTES = 2**26
# Read windows ahead for so long, because a file system may answer late; but at most so many, and so large.
_AHEAD_S, _MOST_AHEAD, _AHEAD_BYTES = 2.0, 16, 2**26
# Batches that are parts of the same arrays: few calls for small ones, and what a kept one keeps in memory.
_MIXED_BYTES = 2**20
# Batches up to this size are mixed when they are asked for, and few at a time: a processor has them in its
# cache then. Larger ones are mixed by the thread, which has the time for it.
_SMALL_BYTES = 2**18
# Least number of windows in a leased epoch, if it has as many batches. More than the workers, so that all
# end together; the same for any number of workers, because the order depends on it.
_LEASED, _LEASED_LARGE = 16, 256

# What is in memory of a process, and not of a copy of it.
_IN_MEMORY = ("_ahead", "_spare", "_buffers", "_at", "_used")

# Epoch, the positions of a window, and the positions of it to return batches of.
_Window: TypeAlias = tuple[int, Range, Range]


class _BatchesOnDemand(Sequence[Any]):
    """Batches that are made when they are asked for, some in a row; only those are remembered.

    Args:
        count: how many there are.
        at_once: how many are made together.
        make: returns those that begin with this one.
    """

    def __init__(self, count: int, at_once: int, make: Callable[[int], list[Any]]) -> None:
        self._count, self._at_once, self._make = count, at_once, make
        self._first, self._made = 0, list[Any]()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        place = index - self._first
        if not 0 <= place < len(self._made):
            if not 0 <= index < self._count:
                raise IndexError(f"batch {index} of {self._count}")
            self._made = []  # their arrays may be filled again
            place = index % self._at_once
            self._first = index - place
            with span("read", "mixes"):
                self._made = self._make(self._first)
        return self._made[place]


class Batches:
    """The batches of a range of positions of each epoch, every sample once.

    Blocks of samples are read in contiguous slices, in the order of `Blocks`. With `shuffle` the samples of
    a *window*, some whole batches in a row, are permuted in memory. While the training uses the batches of
    one window, a thread reads the next, or, up to 64 MB, as many as last for two seconds. So at most about
    three windows are in memory, however large the data are. A batch is a part of up to a megabyte, which it
    keeps in memory; without `shuffle`, of its window: copy what is kept for long.

    Args:
        source: of the samples.
        batch_size: samples in a batch; the last one may have fewer.
        shuffle: permute the blocks, and the samples in each window; otherwise keep the order of the source.
        seed: of the permutations.
        block: samples read in a row; None: about 256 KB, in whole chunks of the files.
        window: batches in a window; None: enough for 64 blocks, up to 64 MB.
        part: the positions; None: all.
        leased: choose smaller blocks and windows, because workers lease whole windows.
        bucket: make batches of a window of rows of like length, and cut their filling to the longest; the
            source must know the lengths.

    Example:
        >>> from nnlo_common.data import Arrays
        >>> batches = Batches(Arrays(np.arange(5)), batch_size=2, shuffle=True, block=1)
        >>> [batch[0].tolist() for batch in batches.epoch(0)]
        [[2, 4], [3, 0], [1]]
    """

    # The batches of the window that `get` returned one of, and what it was asked for: epoch, window and next
    # epoch. Most batches are of the same window as the last.
    _at: tuple[int, int, int | None] | None
    _used: Sequence[Any]

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
        leased: bool = False,
        bucket: bool = False,
    ) -> None:
        self.bucket = bucket
        self.source, self.batch_size = source, whole_number("batch_size", batch_size, 1)
        row_bytes = max(sum(field.row_bytes for field in source.fields), 1)
        parts = _LEASED_LARGE * _MIXED if leased else _MIXED
        self.block = (
            _good_block(source, row_bytes, parts) if block is None else whole_number("block", block, 1)
        )
        if window is None:
            most = _WINDOW_BYTES // row_bytes
            if leased:
                most = min(most, sum(source.lengths) // _LEASED)
            window = min(math.ceil(_MIXED * self.block / self.batch_size), max(most // self.batch_size, 1))
        self.window = whole_number("window", window, 1)
        self._order = Blocks(source.lengths, block=self.block, shuffle=shuffle, seed=seed)
        self._part, self._batches = part or (0, self._order.size), 0
        self._member, self._group_size = 0, 1
        batch_bytes = row_bytes * self.batch_size
        self._small = shuffle and batch_bytes <= _SMALL_BYTES
        # Samples mixed at once, in whole batches.
        mixed_bytes = _SMALL_BYTES if self._small else _MIXED_BYTES
        self._mixed = max(mixed_bytes // batch_bytes, 1) * self.batch_size
        self._begin()

    def take_part(self, part: Range, batches: int = 0) -> None:
        """Return batches of these positions from now on.

        Args:
            part: the positions.
            batches: an epoch has at least so many; those beyond the positions repeat a sample, and their size
                is 0. A rank of a group needs such a batch where the others have one more than it has.
        """
        self._batches = batches
        if part != self._part:
            self._forget()
            self._ahead.close()
            self._part = part

    @property
    def part(self) -> Range:
        """The positions."""
        return self._part

    def take_member(self, member: int, group_size: int) -> None:
        """Return, of each lease, the batches of this rank of a group; the group leases together.

        A position of a lease then stands for one sample of each rank: `leasable` are the positions of an
        epoch. Fewer samples of an epoch than the group has ranks are left over; see `rest`.
        """
        if (member, group_size) != (self._member, self._group_size):
            self._forget()
            self._ahead.close()
            self._member, self._group_size = member, group_size

    @property
    def leasable(self) -> int:
        """The number of positions of an epoch that are leased: of samples, or of one for each of a group."""
        return self.size // self._group_size

    @property
    def order(self) -> str:
        """The options that determine the order of an epoch, besides the files."""
        shuffle, seed = self._order.shuffle, self._order.seed
        windows = f"windows of {self.window_size}"
        if self._group_size > 1:
            windows += f" for each of {self._group_size}"
        bucketed = ", like lengths together" if self.bucket else ""
        return f"seed {seed}, shuffled {shuffle}, blocks of {self.block}, {windows}{bucketed}"

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self._order.shuffle

    @property
    def size(self) -> int:
        """The number of samples."""
        return self._order.size

    @property
    def window_size(self) -> int:
        """The number of samples in a whole window."""
        return self.window * self.batch_size

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return max(self._own, self._batches)

    @property
    def _own(self) -> int:
        """The number of batches in an epoch that repeat nothing."""
        start, stop = self._part
        return math.ceil((stop - start) / self.batch_size)

    def size_of(self, index: int) -> int:
        """Return the number of samples in a batch; 0: it repeats one."""
        start, stop = self._part
        return max(min(self.batch_size, stop - start - index * self.batch_size), 0)

    @property
    def left_over(self) -> int:
        """The number of samples that no lease has, fewer than the ranks of the group that leases."""
        return self.size % self._group_size

    def rest(self, epoch: int) -> tuple[Any, int]:
        """Return this rank's batch of the samples that are left over, and its size.

        The size is 1, or 0 if there is none for this rank, whose batch repeats one.
        """
        at, mine = self.size - self.left_over, self._member < self.left_over
        position = at + (self._member if mine else 0)
        return self._read((epoch, (position, position + 1), (position, position + 1)))[0], int(mine)

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return the batches of an epoch, in order."""
        return (self.get(epoch, index) for index in range(len(self)))

    def get(self, epoch: int, index: int, *, then: int | None = None) -> Any:
        """Return one batch; fast if batches are requested in order.

        Args:
            epoch: its number.
            index: of the batch.
            then: the next epoch; its first window is read ahead during the last window of this one.

        Raises:
            IndexError: the epoch has no such batch.
        """
        number, place = divmod(index, self.window)
        if self._at == (epoch, number, then) and place < len(self._used):
            return self._used[place]
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if index >= self._own:
            last = self._part[1] - 1, self._part[1]
            return self._read((epoch, last, last))[0]
        self._forget()
        self._used = self._ahead.get(self._window(epoch, number), then=self._following(epoch, number, then))
        self._at = epoch, number, then
        return self._used[place]

    def _following(self, epoch: int, number: int, then: int | None) -> Iterator[_Window]:
        """Return the windows after one of an epoch, to its end and to that of the next epoch."""
        windows = math.ceil(self._own / self.window)
        yield from (self._window(epoch, one) for one in range(number + 1, windows))
        if then is not None:
            yield from (self._window(then, one) for one in range(windows))

    def leased(self, lease: Lease, then: Iterable[Lease] = ()) -> Sequence[Any]:
        """Return the batches of a lease that lies in one window; read those of the leases `then` ahead.

        The rest of a window has exactly the samples that earlier batches of it did not have.
        """
        self._forget()
        return self._ahead.get(self._around(lease), then=map(self._around, then))

    def close(self) -> None:
        """Wait until the reading thread has ended, and drop the windows in memory."""
        self._forget()
        self._ahead.close()
        self._begin()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _IN_MEMORY}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def _begin(self) -> None:
        """Begin with nothing in memory."""
        window_bytes = self.window_size * sum(field.row_bytes for field in self.source.fields)
        ahead = max(min(_AHEAD_BYTES // max(window_bytes, 1), _MOST_AHEAD), 1)
        self._ahead: Prefetch[_Window, Sequence[Any]] = Prefetch(self._read, ahead_s=_AHEAD_S, most=ahead)
        # Of the window that is used, those read ahead, and one of which a batch is still in use.
        most = 3 if self._on_demand else (2 + ahead) * math.ceil(self.window_size / self._mixed)
        self._spare = [SpareArrays(most) for _ in self.source.fields]
        buffers = 1 + ahead if self._on_demand else 1
        self._buffers = [SpareArrays(buffers, partial(_empty, field)) for field in self.source.fields]
        self._forget()

    @property
    def _on_demand(self) -> bool:
        """Whether batches are made when they are asked for; what else must be done is for the thread."""
        return self._small and not self.bucket and getattr(self.source, "as_read", False)

    def _forget(self) -> None:
        """Forget the window in use: its arrays may be filled again."""
        self._at, self._used = None, []

    def _window(self, epoch: int, number: int) -> _Window:
        start, stop = self._part
        start += number * self.window_size
        positions = start, min(start + self.window_size, stop)
        return epoch, positions, positions

    def _around(self, lease: Lease) -> _Window:
        """Return this rank's window of a lease; the ranks of a group have windows side by side."""
        before = lease.start - lease.start % self.window_size
        length = min(self.window_size, self.leasable - before)
        start = before * self._group_size + self._member * length
        first = start + lease.start - before
        return lease.epoch, (start, start + length), (first, first + lease.size)

    def _read(self, window: _Window) -> Sequence[Any]:
        """Read a window, and return its batches."""
        epoch, (start, stop), (first, last) = window
        # Read in the order of the files, so that each file is read once; the permutation comes after.
        ranges = list(Ranges(self._order.ranges(epoch, start, stop)))
        rows: Array | None = None
        if self._order.shuffle:
            rows = np.random.default_rng([self._order.seed, epoch, start]).permutation(stop - start)
        resident = getattr(self.source, "resident", _nowhere)(ranges)
        if resident is None:
            arrays = self._window_arrays(stop - start, kept=rows is None)
            at = 0
            for begin, end in ranges:
                self.source.read(begin, end, [array[at : at + end - begin] for array in arrays])
                at += end - begin
        else:  # batches are made of the numbers in memory, without a copy of the window
            arrays, numbers = resident
            rows = numbers if rows is None else numbers[rows]
        if self.bucket:
            rows = self._by_length(arrays, rows, stop - start, [self._order.seed, epoch, start, 1])

        def mixed(batch: int) -> list[Any]:
            """Return the batches from this one on that are mixed at once: parts of the same arrays."""
            begin = first - start + batch * self.batch_size
            end = min(begin + self._mixed, last - start)
            some: slice | Array = slice(begin, end) if rows is None else rows[begin:end]
            with stage("mix"):
                if resident is not None:
                    self.source.check_mapped()  # type: ignore[attr-defined]  # who has `resident` has it
                chosen = [self._rows(*one, some) for one in zip(arrays, self._spare, strict=True)]
            return [self._batch(chosen, at) for at in range(0, end - begin, self.batch_size)]

        count, at_once = math.ceil((last - first) / self.batch_size), self._mixed // self.batch_size
        if self._on_demand:
            return _BatchesOnDemand(count, at_once, mixed)
        return [batch for begin in range(0, count, at_once) for batch in mixed(begin)]

    def _window_arrays(self, rows: int, *, kept: bool) -> Sequence[Array]:
        """Return arrays to read a window into; some used before, unless batches `kept` are parts of them.

        New ones would cost as much as reading: the system zeroes each page of them.
        """
        if kept:
            return [field.empty(rows) for field in self.source.fields]
        whole = min(self.window_size, self.size)
        return [
            spare.get((whole, *field.shape), field.dtype)[:rows]
            for field, spare in zip(self.source.fields, self._buffers, strict=True)
        ]

    def _batch(self, arrays: Sequence[Array], at: int) -> Any:
        chosen = [array[at : at + self.batch_size] for array in arrays]
        if self.bucket:
            chosen = self._ragged.without_filling(chosen)
        return self.source.assemble(chosen)

    @property
    def _ragged(self) -> RaggedSource:
        """The source, of which buckets ask more."""
        return cast("RaggedSource", self.source)

    @staticmethod
    def _rows(array: Array, spare: SpareArrays, some: slice | Array) -> Array:
        straight = array.flags.c_contiguous and array.flags.aligned
        if isinstance(some, slice) or not straight:  # `take` would copy another one whole
            return array[some]
        out = spare.get((len(some), *array.shape[1:]), array.dtype)
        return np.take(array, some, axis=0, out=out, mode="clip")  # into the array itself only if it clips

    def _by_length(
        self, arrays: Sequence[Array], rows: Array | None, count: int, seed: Sequence[int]
    ) -> Array:
        """Return the rows of a window so that each batch has rows of like length.

        The batches come in a random order if the samples do. A last batch with fewer rows has any lengths:
        the shortest or the longest would otherwise be seen in fewer steps.
        """
        rows = np.arange(count) if rows is None else rows
        whole = count - count % self.batch_size
        lengths = self._ragged.row_lengths(arrays)[rows]
        order = np.argsort(lengths[:whole], kind="stable")
        if self._order.shuffle:
            places = np.random.default_rng(seed).permutation(whole // self.batch_size)
            order = order.reshape(-1, self.batch_size)[places].ravel()
        return np.concatenate([rows[:whole][order], rows[whole:]])


def _empty(field: Field, shape: tuple[int, ...], _: np.dtype[Any]) -> Array:
    return field.empty(shape[0])


def _nowhere(_: Sequence[Range]) -> None:
    """Of a source that keeps nothing in memory."""


def _good_block(source: Source, row_bytes: int, parts: int) -> int:
    """Return a block size that reads fast, but cuts a small data set into about `parts` blocks."""
    rows = max(min(_BLOCK_BYTES // row_bytes, sum(source.lengths) // parts), 1)
    if source.grain * row_bytes > _WINDOW_BYTES // 4:  # cut chunks this large: a window needs several blocks
        return rows
    return math.ceil(rows / source.grain) * source.grain
