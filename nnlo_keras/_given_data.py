"""Data that a script gives to `fit`: warnings if all workers have the same, or every rank splits it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import keras
import numpy as np

from nnlo_common.plugin import Session, speaks, warn
from nnlo_keras._compat import arguments_of_fit, parts_of_dataset
from nnlo_keras._hdf5 import H5Sequence

__all__ = ["VALIDATE", "warn_of_data"]

#: The lines to write instead of `validation_split=`.
VALIDATE = (
    "set samples apart before you share the others out: "
    "fit(*nnlo_keras.shard(x[:n], y[:n]), validation_data=(x[n:], y[n:]), ...)"
)
_ROWS = 8  # compared at each end of an array
_DEPTH, _PARTS = 6, 1000  # how far to look into a data set
# 22 bits: in float64 the sum of all workers' squares is exact.
_BITS = 22


def warn_of_data(team: Session) -> None:
    """Warn, once and on one rank, of data that all workers have, and of a split on each rank (collective).

    Args:
        team: this rank's session; it has joined and not started.
    """
    given = arguments_of_fit()
    mark = 0 if team.serves else _mark(given.get("x"), given.get("y"))
    # If all marks are equal, the mean of their squares is the square of their mean.
    seen = team.agree({"data": mark, "squared": mark**2}, weight=0.0 if team.serves else 1.0)
    if not speaks(team.member.role):
        return
    workers = team.member.workers
    if workers > 1 and seen["data"] and seen["data"] ** 2 == seen["squared"]:
        warn(
            f"fit() was given the same data on all {workers} workers, so each trains on all samples, and an "
            f"epoch has each {workers} times; give each worker its share: fit(*nnlo_keras.shard(x, y), ...)"
        )
    if split := given.get("validation_split"):
        warn(
            f"validation_split={split}: every rank sets its own samples apart, but only a server validates, "
            f"with its own; {VALIDATE}"
        )


def _mark(*data: Any) -> int:
    """Return a number that is the same for the same data; 0: its contents cannot be seen."""
    if any(isinstance(one, H5Sequence) for one in data):
        return 0  # it shares itself out
    found = list(islice(_contents(data, _DEPTH, set()), _PARTS))
    if not any(is_data for is_data, _ in found):
        return 0
    total = 0
    for _, content in found:
        total = zlib.crc32(content, total)
    return total % (2**_BITS - 1) + 1


def _contents(part: Any, depth: int, seen: set[int]) -> Iterator[tuple[bool, bytes]]:
    """Yield what data consist of, each with whether it is samples; unknown objects are left out."""
    if part is None or (callable(part) and not hasattr(part, "__getitem__")):
        return
    if isinstance(part, str | bytes | bool | int | float):
        yield False, repr(part).encode()
    elif getattr(part, "shape", ()) and hasattr(part, "__getitem__"):
        yield from _of_array(part)
    elif depth and id(part) not in seen:
        seen.add(id(part))
        yield False, type(part).__name__.encode()
        for one in _parts(part):
            yield from _contents(one, depth - 1, seen)


def _of_array(array: Any) -> Iterator[tuple[bool, bytes]]:
    yield False, f"{tuple(array.shape)} {array.dtype if hasattr(array, 'dtype') else ''}".encode()
    # Some, such as an array of pointers or on another device, cannot be read here.
    with suppress(TypeError, ValueError, RuntimeError, OSError, KeyError, IndexError):
        for rows in (array[:_ROWS], array[-_ROWS:]):
            plain = rows if isinstance(rows, np.ndarray) else np.asarray(_on_host(rows))
            if plain.dtype != object:
                yield True, plain.tobytes()


def _on_host(rows: Any) -> Any:
    return keras.ops.convert_to_numpy(rows) if keras.ops.is_tensor(rows) else rows


def _parts(whole: Any) -> list[Any]:
    """Return the parts of a structure, or the attributes of a data set."""
    if isinstance(whole, Mapping):
        return [*whole.values()]
    if isinstance(whole, list | tuple | range):
        return [len(whole), *whole[:_ROWS], *whole[-_ROWS:]]
    return parts_of_dataset(whole)
