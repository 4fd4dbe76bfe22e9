"""Work on a long vector by several threads: as many as this rank may compute with, or has been lent.

NumPy computes without Python's lock, so threads that each take blocks of their own need a part of the time.
Each number is computed from those at its own place alone, so no bit depends on which thread did it.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from nnlo_common.base._cores import usable_threads
from nnlo_common.base._flat_vector import PartWork, blocks, zeroed

__all__ = [
    "InOrder",
    "Scratch",
    "cached_blocks",
    "longest_block",
    "on_threads",
    "with_threads",
    "work_through",
    "worth_threads",
]

#: Numbers that one thread takes at a time; a whole number of any format's rows.
BLOCK = 1 << 18
#: Numbers that are worth a thread: less is computed before it has woken up.
WORTH = 1 << 19
# With more the memory is the limit.
_MOST = 4
# Whether threads share the work. Each call of NumPy ends in a wait for Python's lock, which another may have.
_together: contextvars.ContextVar[bool] = contextvars.ContextVar("together", default=False)
_lent: contextvars.ContextVar[int] = contextvars.ContextVar("lent", default=0)


class Scratch(threading.local):
    """Memory for intermediate values, of each thread that computes.

    Attributes:
        rows: two vectors.

    Args:
        length: of each.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.rows = zeroed(8 * length).view(np.float32).reshape(2, length)

    def __reduce__(self) -> tuple[type[Scratch], tuple[int]]:  # a copy has memory of its own, too
        return Scratch, (self._length,)


class InOrder:
    """Work that only its caller's thread may do, from the first part to the last: that of a framework.

    Args:
        work: on a part of a vector.

    Example:
        >>> work = InOrder(print)
        >>> on_threads(work, size=100_000_000) is work
        True
    """

    def __init__(self, work: PartWork) -> None:
        self._work = work

    def __call__(self, part: slice) -> None:
        """Do it on a part."""
        self._work(part)


def worth_threads(size: int) -> bool:
    """Return whether a vector of `size` numbers is long enough for several threads."""
    return size // WORTH > 1


@contextlib.contextmanager
def with_threads(threads: int) -> Iterator[None]:
    """Let work that begins in here have so many threads, if they are more than this rank's.

    Example:
        >>> with with_threads(2):
        ...     on_threads(print, size=100_000_000) is print
        False
    """
    before = _lent.set(threads)
    try:
        yield
    finally:
        _lent.reset(before)


def on_threads(work: PartWork, size: int) -> PartWork:
    """Return what does the same on a vector of `size` numbers, with the threads that it is worth.

    It is called for parts of the vector, from the first on. Threads may be ahead of these; all work is done
    when the last call returns.

    Args:
        work: on a part of the vector. It is called from several threads, each part once, and computes each
            number from those at its own place.
        size: of the vector.

    Example:
        >>> x = np.ones(1_000_000, np.float32)
        >>> def add_one(part):
        ...     x[part] += 1
        >>> on_threads(add_one, x.size)(slice(0, x.size))
        >>> float(x.min()), float(x.max())
        (2.0, 2.0)
    """
    if isinstance(work, InOrder):
        return work
    # Most vectors are shorter, and then nothing else is looked at.
    count = min(_MOST, size // WORTH, max(usable_threads(), _lent.get())) if worth_threads(size) else 1
    return work if count < 2 else _Ahead(work, size, count)


def cached_blocks(part: slice, length: int) -> Iterator[slice]:
    """Cut a part into blocks whose operands fit into the cache; longer ones where threads share the work.

    Args:
        part: of the vector.
        length: of a block that is worked on by one thread.

    Example:
        >>> [(one.start, one.stop) for one in cached_blocks(slice(3, 8), 2)]
        [(3, 5), (5, 7), (7, 8)]
    """
    return blocks(part, max(length, BLOCK) if _together.get() else length)


def longest_block(size: int, length: int) -> int:
    """Return the length of the longest of the `cached_blocks` of a vector of `size` numbers."""
    return min(size, max(length, BLOCK) if worth_threads(size) else length)


def work_through(work: PartWork, size: int) -> None:
    """Do the work on a whole vector of `size` numbers; see `on_threads`."""
    on_threads(work, size)(slice(0, size))


class _Ahead:
    """Work on the blocks of a vector in order, by the caller and by helpers that may be ahead of it."""

    def __init__(self, work: PartWork, size: int, threads: int) -> None:
        self._work, self._helpers = work, threads - 1
        self._waiting = deque(blocks(slice(0, size), BLOCK))
        self._turn = threading.Condition()
        self._under_way: set[int] = set()  # the starts of blocks
        self._error: BaseException | None = None

    def __call__(self, part: slice) -> None:
        """Return when all blocks that a part touches are done."""
        before = _together.set(True)
        try:
            self._work_until(part.stop)
        finally:
            _together.reset(before)

    def _work_until(self, stop: int) -> None:
        with contextlib.suppress(RuntimeError):  # Python ends, or there are no more threads: go on alone
            for _ in range(self._helpers):
                # In the caller's context: NumPy's handling of errors is a part of it.
                _pool(os.getpid()).submit(contextvars.copy_context().run, self._help)
        self._helpers = 0
        while (block := self._next(before=stop)) is not None:
            self._do(block)
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        while (block := self._next()) is not None:
            self._do(block)

    def _next(self, before: int | None = None) -> slice | None:
        """Take a block; None: there is none, or with `before` all before that place are done."""
        with self._turn:
            while self._error is None:
                if before is not None and not self._unfinished(before):
                    return None
                if self._waiting:
                    block = self._waiting.popleft()
                    self._under_way.add(block.start)
                    return block
                if before is None:
                    return None
                self._turn.wait()
            if before is not None:
                self._turn.wait_for(lambda: not self._under_way)  # nobody writes any more
        return None

    def _unfinished(self, before: int) -> bool:
        waits = bool(self._waiting) and self._waiting[0].start < before
        return waits or any(start < before for start in self._under_way)

    def _do(self, block: slice) -> None:
        error: BaseException | None = None
        try:
            self._work(block)
        except BaseException as raised:  # the caller raises it
            error = raised
        with self._turn:
            self._under_way.discard(block.start)
            self._error = self._error or error
            self._turn.notify_all()


@cache
def _pool(process: int) -> ThreadPoolExecutor:  # noqa: ARG001 - a forked process starts its own
    """Return the threads of a process, which all vectors share."""
    return ThreadPoolExecutor(_MOST - 1, thread_name_prefix="nnlo-blocks")
