"""Marks of data: numbers by which workers find that all of them have the same samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

__all__ = ["all_same", "as_values", "mark_of"]

_ROWS = 8  # compared at each end of an array
_DEPTH, _PARTS = 6, 1000  # how far to look into a data set
# 22 bits: in float64 the sum of all workers' squares is exact.
_BITS = 22


def mark_of(
    *data: Any, parts: Callable[[Any], list[Any]], on_host: Callable[[Any], Any] = lambda rows: rows
) -> int:
    """Return a number that is the same for the same data; 0: its samples cannot be seen.

    It looks at both ends of each array, and asks no data set for a sample.

    Args:
        data: arrays, structures of them, or data sets.
        parts: returns what a data set consists of.
        on_host: returns rows that NumPy can read.

    Example:
        >>> x = np.arange(6.0)
        >>> one, same, other = (mark_of([part], parts=list) for part in (x, x.copy(), x[::2]))
        >>> one == same, one == other, mark_of("a file", parts=list)
        (True, False, 0)
    """
    found = list(islice(_contents(data, _DEPTH, set(), parts, on_host), _PARTS))
    if not any(is_data for is_data, _ in found):
        return 0
    total = 0
    for _, content in found:
        total = zlib.crc32(content, total)
    mark: int = total % (2**_BITS - 1) + 1
    return mark


def as_values(mark: int) -> dict[str, float]:
    """Return a worker's values, of which all workers' means show whether their marks are equal."""
    return {"data": mark, "squared": mark**2}


def all_same(means: Mapping[str, float]) -> bool:
    """Return whether all workers have seen the same samples.

    If all marks are equal, the mean of their squares is the square of their mean.
    """
    return bool(means["data"]) and means["data"] ** 2 == means["squared"]


def _contents(
    part: Any,
    depth: int,
    seen: set[int],
    parts: Callable[[Any], list[Any]],
    on_host: Callable[[Any], Any],
) -> Iterator[tuple[bool, bytes]]:
    """Yield what data consist of, each with whether it is samples; unknown objects are left out."""
    if part is None or (callable(part) and not hasattr(part, "__getitem__")):
        return
    if isinstance(part, str | bytes | bool | int | float):
        yield False, repr(part).encode()
    elif (rank := _rank(part)) is not None and hasattr(part, "__getitem__"):
        yield from _of_array(part, on_host) if rank else _of_number(part, on_host)
    elif depth and id(part) not in seen:
        seen.add(id(part))
        yield False, type(part).__name__.encode()
        for one in _parts(part, parts):
            yield from _contents(one, depth - 1, seen, parts, on_host)


def _rank(part: Any) -> int | None:
    """Return the number of dimensions of an array; None if it is not an array, or nobody knows."""
    try:
        return len(part.shape)  # a shape of TensorFlow's is true also without dimensions
    except (AttributeError, TypeError, ValueError):
        return None


def _of_number(number: Any, on_host: Callable[[Any], Any]) -> Iterator[tuple[bool, bytes]]:
    """Yield an array without dimensions, which is no samples: the number of a part, perhaps."""
    with suppress(TypeError, ValueError, RuntimeError):
        yield False, repr(np.asarray(on_host(number)).tolist()).encode()


def _of_array(array: Any, on_host: Callable[[Any], Any]) -> Iterator[tuple[bool, bytes]]:
    yield False, f"{tuple(array.shape)} {array.dtype if hasattr(array, 'dtype') else ''}".encode()
    # Some, such as an array of pointers or on another device, cannot be read here.
    with suppress(TypeError, ValueError, RuntimeError, OSError, KeyError, IndexError):
        for rows in (array[:_ROWS], array[-_ROWS:]):
            plain = rows if isinstance(rows, np.ndarray) else np.asarray(on_host(rows))
            if plain.dtype != object:
                yield True, plain.tobytes()


def _parts(whole: Any, parts: Callable[[Any], list[Any]]) -> list[Any]:
    """Return the parts of a structure or of a data set."""
    if isinstance(whole, Mapping):
        return [*whole.values()]
    if isinstance(whole, list | tuple | range):
        return [len(whole), *whole[:_ROWS], *whole[-_ROWS:]]
    return parts(whole)
