"""Memory in large pages, for vectors that ranks send.

A message between two ranks of a host is one copy out of the sender's memory, for which the system looks up
each page of both sides. With the usual 4 KiB pages the lookups take as long as the copy itself; Linux grants
2 MiB pages on request. Several pieces of memory share such a page, so a small piece does not occupy 2 MiB.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np
import numpy.typing as npt

__all__ = ["PAGE", "zeroed"]

Bytes = npt.NDArray[np.uint8]

PAGE = 1 << 21
# Smaller pieces gain nothing.
_SMALL = 1 << 15
_ALIGNMENT = 64

_lock = threading.Lock()
_rest: Bytes = np.empty(0, np.uint8)  # the unused end of the page that small pieces share


def zeroed(count: int) -> Bytes:
    """Return `count` zeroed bytes; they are freed with the last reference to them.

    Example:
        >>> zeroed(100_000).any()
        np.False_
    """
    if count < _SMALL or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(count, np.uint8)
    if count > PAGE // 2:
        return _pages(count)
    global _rest  # noqa: PLW0603 - one process, one memory
    with _lock:
        if count > _rest.size:
            _rest = _pages(PAGE)
        piece, _rest = _rest[:count], _rest[-(-count // _ALIGNMENT) * _ALIGNMENT :]
    return piece


def _pages(count: int) -> Bytes:
    """Return `count` zeroed bytes in pages that nothing else uses."""
    # A short rest stays in small pages: it would waste a large one.
    large = max(1, round(count / PAGE)) * PAGE
    room = max(large, count)
    try:
        # One page more than needed, because large pages begin at multiples of their size.
        memory = mmap.mmap(-1, room + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # out of memory: numpy raises a better error
        return np.zeros(count, np.uint8)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % PAGE
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    return everything[start : start + count]
