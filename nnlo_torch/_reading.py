"""Batches of any loader, with the time that they take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from nnlo_common.plugin import span

__all__ = ["read"]

_Batch = TypeVar("_Batch")


def read(batches: Iterable[_Batch]) -> Iterator[_Batch]:
    """Yield the batches; the time to get each is that of reading."""
    source = iter(batches)
    while True:
        with span("read", "batch"):
            try:
                batch = next(source)
            except StopIteration:
                return
        yield batch
