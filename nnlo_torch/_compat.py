"""Parts of PyTorch that are not public, all in one place: the batch that a DataLoader is working on.

A loader with worker processes draws from its sampler ahead of the loop, and says nowhere how far ahead it is.
Where PyTorch has changed one of these parts `driving_loader` finds nothing, and samples count when they are
drawn. `tests/torch/test_compat.py` says which part it is.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch.utils.data import dataloader

__all__ = ["LoaderBatches", "driving_loader"]

_BASE: Any = getattr(dataloader, "_BaseDataLoaderIter", None)
_SINGLE: Any = getattr(dataloader, "_SingleProcessDataLoaderIter", None)
#: The functions of a loader's iterator below which samplers, and data sets that are looped over, run.
DRIVERS = {
    getattr(function, "__code__", None)
    for function in (getattr(_BASE, "_next_index", None), getattr(_SINGLE, "_next_data", None))
}


class LoaderBatches:
    """The batches of one loop over a DataLoader: their numbers, and which of them the loop has not got yet.

    The loader's iterator is held weakly, so that its processes end when the loop is left.

    Args:
        iterator: that of the DataLoader.
    """

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._processes = iterator._num_workers > 0
        # The batches between processes and loop, by their numbers. It outlives the iterator, which takes
        # another one when it is used again (persistent_workers).
        self._under_way: dict[int, Any] = iterator._task_info if self._processes else {}
        self._counts = "_send_idx" if self._processes else "_num_yielded"
        getattr(iterator, self._counts)  # an AttributeError comes now or never
        self.drops_last = bool(getattr(iterator._index_sampler, "drop_last", False))

    @property
    def drawing(self) -> int:
        """The number of the batch that is being drawn; -1 if the loader's iterator is gone."""
        return int(getattr(self._iterator(), self._counts, -1))

    @property
    def over(self) -> bool:
        """Whether the loop gets no more of these batches."""
        iterator = self._iterator()
        return iterator is None or (self._processes and iterator._task_info is not self._under_way)

    def is_under_way(self, number: int) -> bool:
        """Say whether the loop has not got this batch, though it was drawn."""
        return number in self._under_way


def driving_loader() -> LoaderBatches | None:
    """Return the batches of the DataLoader for which the calling sampler runs; None: there is none.

    A sampler knows nothing of its loader, so it is looked for among the functions that have called.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in DRIVERS:
            try:
                return LoaderBatches(frame.f_locals["self"])
            except (AttributeError, KeyError):
                return None
        frame = frame.f_back
    return None
