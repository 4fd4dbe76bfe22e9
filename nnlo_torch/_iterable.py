"""ShardIterable: a worker's share of an iterable data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

import torch

from nnlo_common import ConfigurationError
from nnlo_torch._participation import Participation
from nnlo_torch._step_weights import Again
from nnlo_torch._training_of import training_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["ShardIterable"]

_Item = TypeVar("_Item")


class ShardIterable(torch.utils.data.IterableDataset[_Item]):
    """Shares an iterable data set among p workers: each takes every p-th item, at its own offset.

    Every worker iterates over the whole data set and skips the other workers' items. With `num_workers`
    processes of a DataLoader each process takes its own part of the share. The data set must yield the
    same items in the same order everywhere. Where ranks of a group have a batch less than the others, they
    get an item again, see `ShardSampler`; with `num_workers` processes, or without a `DataLoader`, up to
    k - 1 items of a group of k are left out at the end instead.

    Where progress ends an epoch (see `Steady`), the data set is iterated again until the epoch's progress is
    made; its length is counted in each pass.

    With `num_workers` > 0 loop over `optimizer.epoch(loader)`, so that a server can serve.

    Args:
        dataset: any iterable that can be iterated again in each epoch.
        optimizer: the wrapper of this training; None: the one made last.

    Example:
        >>> list(ShardIterable(range(3)))
        [0, 1, 2]
    """

    def __init__(self, dataset: Iterable[_Item], *, optimizer: Wrapper | None = None) -> None:
        self._dataset, self._optimizer = dataset, optimizer
        self._share: tuple[int, int] | None = None
        self._group_size = 1

    def __getstate__(self) -> dict[str, Any]:
        # Pickled for a DataLoader's worker process, which knows no training.
        training = self._training()
        share, group_size = training.share, training.group_size
        return {"_dataset": self._dataset, "_optimizer": None, "_share": share, "_group_size": group_size}

    def __iter__(self) -> Iterator[_Item]:
        loader = torch.utils.data.get_worker_info()
        training = self._training() if self._share is None else None
        if training is not None and loader is None:
            training.begin_epoch()  # in which this rank may take the place of a dead worker
        worker, workers = self._share or self._training().share
        groups = workers // (self._group_size if training is None else training.group_size)
        if loader is not None:
            if worker < 0:
                raise ConfigurationError(
                    "a DataLoader with worker processes began an epoch on a server rank, but only the rank "
                    "itself can serve it; loop over optimizer.epoch(loader)"
                )
            member, worker = divmod(worker, groups)
            workers, groups = workers * loader.num_workers, groups * loader.num_workers
            worker = member * groups + worker * loader.num_workers + loader.id
        if worker < 0:
            return
        if training is None or loader is not None:
            yield from _dealt(self._dataset, worker, workers, groups)
            return
        counted = _Counted(self._dataset)
        with training.draws() as draws:
            batch = None if training.looping else draws.batch_size(self)
            for _ in training.passes(0, lambda: counted.size):
                for item in _dealt(counted, worker, workers, groups, batch):
                    if isinstance(item, Again):
                        if not training.counts_progress:
                            training.take(0, draws)
                            yield item.element
                        continue
                    if training.ended or (counted.size and training.made(counted.size)):
                        return
                    training.take(1, draws)
                    yield item

    def _training(self) -> Participation:
        return training_of(self._optimizer, "a ShardIterable")


class _Counted(Iterable[_Item]):
    """Counts the items of an iterable.

    Attributes:
        size: their number, once they have been iterated over; before that 0.
    """

    def __init__(self, items: Iterable[_Item]) -> None:
        self._items, self.size = items, 0

    def __iter__(self) -> Iterator[_Item]:
        size = 0
        for item in self._items:
            size += 1
            yield item
        self.size = size


def _dealt(
    items: Iterable[_Item], worker: int, workers: int, groups: int, batch: int | None = None
) -> Iterator[Any]:
    """Yield every `workers`-th item from the `worker`-th.

    The ranks of group g have the numbers g, g + groups, g + 2 groups, ...: an item is only yielded once the
    last rank of the group has one, too, or at the end.

    Args:
        items: of all workers.
        worker: this rank's number.
        workers: the number of ranks that train.
        groups: the number of groups.
        batch: how many items make a batch. A rank that lacks one gets another rank's as `Again`. None: the
            ranks of a group get equally many items.
    """
    lead = worker % groups
    if workers == groups:
        yield from islice(items, worker, None, workers)
        return
    mine: list[_Item] = []
    last: list[_Item] = []  # of the group, since all its ranks have had one
    count = 0
    for position, item in enumerate(items):
        turn = position % workers
        if turn % groups == lead:
            last = [item]
        if turn == worker:
            mine = [item]
        if turn == workers - groups + lead:
            yield mine[0]
            mine, last, count = [], [], count + 1
    if batch is not None and mine:
        yield mine[0]
    elif batch is not None and last and count % batch == 0:
        yield Again(last[0])
