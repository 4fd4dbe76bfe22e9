"""A DataLoader sampler that gives each worker its share, and makes a server rank serve."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_torch._wrapper import Wrapper, current

__all__ = ["ShardSampler"]


class ShardSampler(torch.utils.data.Sampler[int]):
    """Every sample exactly once per epoch over all workers, whatever the sizes.

    No sample is repeated to fill a share and none is dropped: shares differ by at most one. The order is
    a permutation of the whole data set that depends on the seed and the epoch only, so it is the same
    for any number of workers; worker w of p takes every p-th sample of it, beginning with the w-th.

    On a server rank iterating serves the epoch and yields nothing.

    Args:
        data_source: the data set.
        shuffle: permute it anew in each epoch.
        seed: of the permutations; equal on all ranks.
        optimizer: the wrapper whose training this belongs to; None: the one made last.

    Example:
        >>> sampler = ShardSampler(range(5), shuffle=False)
        >>> list(sampler), len(sampler)
        ([0, 1, 2, 3, 4], 5)
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        optimizer: Wrapper | None = None,
    ) -> None:
        self._size, self._shuffle, self._seed = len(data_source), shuffle, seed
        self._optimizer = optimizer
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch; it counts up by itself."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        training = self._training()
        order = self._order()
        self.epoch += 1
        if training is None:
            for index in order:
                yield index
            return
        training.begin_epoch()
        worker, workers = training.share
        for index in order[worker::workers] if worker >= 0 else ():
            if training.stopped:
                break
            training.take(1)
            yield index

    def __len__(self) -> int:
        training = self._training()
        worker, workers = (0, 1) if training is None else training.share
        return 0 if worker < 0 else len(range(worker, self._size, workers))

    def _training(self) -> Wrapper | None:
        training = self._optimizer or current()
        if training is None:
            from nnlo_common._joining import launched

            if launched() is not None:
                raise ConfigurationError(
                    "a ShardSampler was used before its training is known: wrap the optimizer first "
                    "(nnlo_torch.Downpour(...)), or pass optimizer="
                )
        return training

    def _order(self) -> list[int]:
        if not self._shuffle:
            return list(range(self._size))
        # A list: tensors would be turned into integers one by one while the model waits.
        order: list[int] = np.random.default_rng([self._seed, self.epoch]).permutation(self._size).tolist()
        return order
