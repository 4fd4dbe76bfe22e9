"""A worker's part of a data set that can only be looped over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

from nnlo_common import ConfigurationError
from nnlo_torch._sampler import training_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["ShardIterable"]

_Item = TypeVar("_Item")


class ShardIterable(torch.utils.data.IterableDataset[_Item]):
    """For data sets that can only be looped over: every p-th item, for each of p workers another one.

    Every worker runs through the whole of the data set and takes its part, also with `num_workers` processes
    of a DataLoader, each of which takes a part of its own. The data set has to give the same items in the
    same order to all.

    With `num_workers` > 0 let the loop go over `optimizer.epoch(loader)`, so that a server can serve.

    Args:
        dataset: anything that can be looped over, again in each epoch.
        optimizer: the wrapper whose training this belongs to; None: the one made last.

    Example:
        >>> list(ShardIterable(range(3)))
        [0, 1, 2]
    """

    def __init__(self, dataset: Iterable[_Item], *, optimizer: Wrapper | None = None) -> None:
        self._dataset, self._optimizer = dataset, optimizer
        self._share: tuple[int, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # On the way into a process of a DataLoader, where no training is.
        training = self._training()
        share = (0, 1) if training is None else training.share
        return {"_dataset": self._dataset, "_optimizer": None, "_share": share}

    def __iter__(self) -> Iterator[_Item]:
        loader = torch.utils.data.get_worker_info()
        training = self._training() if self._share is None else None
        worker, workers = self._share or ((0, 1) if training is None else training.share)
        if loader is not None:
            if worker < 0:
                raise ConfigurationError(
                    "on a rank that serves, a loader with processes of its own has begun an epoch, which "
                    "only the rank itself can serve; let the loop go over optimizer.epoch(loader)"
                )
            worker, workers = worker * loader.num_workers + loader.id, workers * loader.num_workers
        elif training is not None:
            training.begin_epoch()
        if worker < 0:
            return
        if training is None or loader is not None:
            yield from islice(self._dataset, worker, None, workers)
            return
        with training.draws() as draws:
            for item in islice(self._dataset, worker, None, workers):
                if training.stopped:
                    return
                training.take(1, draws)
                yield item

    def _training(self) -> Wrapper | None:
        return training_of(self._optimizer, "a ShardIterable")
