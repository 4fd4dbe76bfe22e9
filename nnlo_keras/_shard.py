"""This rank's part of the training data."""

from __future__ import annotations

import math
from typing import Any

import keras

from nnlo_common import Arrangement, ConfigurationError, Topology
from nnlo_common._joining import launched
from nnlo_common.transport._endpoint import RankWorld

__all__ = ["shard"]


def shard(*data: Any, servers: int = 1, world: RankWorld | None = None) -> Any:
    """Return this rank's part of the training data; every sample is in the part of one worker.

    Of arrays worker w of p gets every p-th sample, beginning with the w-th; of a `tf.data.Dataset` every p-th
    element, so shard it before you shuffle and batch it; of a `PyDataset` every p-th batch. A server gets the
    first sample only, for its `fit` to see what it is like. Alone everything is returned as it came.

    Args:
        data: arrays of equal length, or one data set.
        servers: as in the wrapper.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Example:
        >>> shard([1, 2, 3])
        [1, 2, 3]
    """
    world = world or launched()
    if world is not None and world.size > 1:
        assignment = Topology.plan(world.size, Arrangement(servers=servers)).assignment(world.rank)
        worker = -1 if assignment.worker is None else assignment.worker
        _check_lengths(data)
        data = tuple(_part(one, worker, world.size - servers) for one in data)
    return data[0] if len(data) == 1 else data


def _check_lengths(data: tuple[Any, ...]) -> None:
    lengths = [len(one) for one in data if hasattr(one, "shape")]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"shard() got arrays of {lengths} samples; give arrays of equal length")


def _check_enough(count: int, workers: int, what: str) -> None:
    if count < workers:
        idle = f"worker {count}" if count == workers - 1 else f"workers {count} to {workers - 1}"
        error = ConfigurationError(
            f"shard() cannot divide {count} {what} among {workers} workers: {idle} would have none, and "
            "Keras cannot fit without data; start fewer workers"
        )
        error.collective = True  # all ranks are given the same
        raise error


def _part(data: Any, worker: int, workers: int) -> Any:
    if isinstance(data, keras.utils.PyDataset):
        if data.num_batches is not None:
            _check_enough(data.num_batches, workers, "batches")
        return _Batches(data, max(worker, 0), workers, served=worker < 0)
    if type(data).__module__.startswith("tensorflow.") and hasattr(data, "shard"):
        return data.take(1) if worker < 0 else data.shard(workers, worker)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        _check_enough(len(data), workers, "samples")
        return data[:1] if worker < 0 else data[worker::workers]
    raise ConfigurationError(
        f"shard() does not know how to divide a {type(data).__name__}; give arrays, a tf.data.Dataset or a "
        "PyDataset, or give each rank its own part"
    )


class _Batches(keras.utils.PyDataset):
    """Every p-th batch of another PyDataset."""

    def __init__(self, data: Any, worker: int, workers: int, *, served: bool) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        self._data, self._worker, self._workers, self._served = data, worker, workers, served

    @property
    def num_batches(self) -> int | None:
        total = self._data.num_batches
        if total is None:
            raise ConfigurationError("shard() divides a PyDataset that knows its length only")
        return min(1, total) if self._served else math.ceil((total - self._worker) / self._workers)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._worker + index * self._workers]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()
