"""Arrays of batches that nobody uses any more, to be filled again."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from nnlo_common.data._source import Array

__all__ = ["SpareArrays"]


def _uses(arrays: deque[Array], place: int) -> int:
    return sys.getrefcount(arrays[place])


# Views, tensors of PyTorch and arrays of JAX on the same memory each count as a use. Counted here, because
# the versions of Python differ by one.
_UNUSED = _uses(deque([np.empty(0)]), 0)
# Without Python's one lock for all threads a count may be too low while another thread uses the array.
_COUNTS_ARE_EXACT = sys.implementation.name == "cpython" and "t" not in sys.abiflags


_Make: TypeAlias = Callable[[tuple[int, ...], np.dtype[Any]], Array]


class SpareArrays:
    """Gives an array that it gave before, if nobody uses that any more.

    A new one costs three times as much as to fill it, because the system zeroes each of its pages.

    Args:
        most: how many arrays it remembers; each is kept in memory for its next use.
        make: returns a new one.

    Example:
        >>> spare = SpareArrays(most=2)
        >>> first, second = spare.get((3,), np.dtype("f4")), spare.get((3,), np.dtype("f4"))
        >>> first is second
        False
        >>> kept = id(second)
        >>> del second
        >>> id(spare.get((3,), np.dtype("f4"))) == kept
        True
    """

    def __init__(self, most: int, make: _Make = np.empty) -> None:
        self._arrays: deque[Array] = deque(maxlen=most)
        self._new = make

    def get(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """Return an array, its numbers undefined."""
        arrays = self._arrays
        # The latest is still in the cache if its batch was copied at once; else the oldest is free first.
        for place in (-1, 0) if _COUNTS_ARE_EXACT else ():
            if arrays and arrays[place].shape == shape and _uses(arrays, place) == _UNUSED:
                found = arrays[place]
                if place == 0:
                    arrays.rotate(-1)
                return found
        found = self._new(shape, dtype)
        if arrays and arrays[0].shape[0] < shape[0]:  # a short one came first
            arrays.clear()
        if not arrays or arrays[0].shape == shape:  # a shorter last one is not kept
            arrays.append(found)
        return found
