"""Memory in large pages, for the numbers that travel.

A message between two ranks of a host is one copy out of the sender's memory, for which the system looks up
each page of both sides. With its usual pages of 4 KiB that takes as long as the copy itself; Linux has pages
of 2 MiB for whoever asks for them. Several pieces of memory share such a page, so that each costs what it
needs.
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
_rest: Bytes = np.empty(0, np.uint8)  # what nobody has yet of a page that others have pieces of


def zeroed(count: int) -> Bytes:
    """Return so many bytes that are 0; they are given back when nobody refers to them.

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
    """Return so many bytes in pages of their own."""
    large = max(1, round(count / PAGE)) * PAGE  # what is over stays in small pages, else half of it were idle
    room = max(large, count)
    try:
        # A page more than needed: a large one begins where its size divides the address.
        memory = mmap.mmap(-1, room + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # there is none, which numpy says better
        return np.zeros(count, np.uint8)
    everything = np.frombuffer(memory, np.uint8)
    start = -everything.ctypes.data % PAGE
    with contextlib.suppress(OSError):  # a system without large pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, large)
    return everything[start : start + count]
