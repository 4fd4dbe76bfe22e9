"""Sharding of training data: this rank's share."""

from __future__ import annotations

import math
import sys
from typing import Any

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import RankWorld, assigned, explain, launched
from nnlo_keras._given_data import VALIDATE
from nnlo_keras._hdf5 import H5Sequence

__all__ = ["shard"]


def shard(*data: Any, servers: int = 1, world: RankWorld | None = None) -> Any:
    """Return this rank's share of the training data; every sample goes to exactly one worker.

    Worker w of p gets every p-th item, beginning with the w-th. Items are

    * the samples of arrays and tensors, without a copy where the framework can, and of lists, tuples and
      dictionaries of them;
    * the elements of a `tf.data.Dataset`: shard it before you shuffle and batch it;
    * the samples of a torch `Dataset`: make the `DataLoader` from the returned subset;
    * the batches of a `PyDataset`.

    A server gets only the first item, from which its `fit` learns shapes and types. In a process alone the
    data is returned unchanged.

    Args:
        data: arrays of equal length, lists or dictionaries of them, or one data set.
        servers: as in the wrapper.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.

    Example:
        >>> shard([1, 2, 3])
        [1, 2, 3]
    """
    world = world or launched()
    if world is not None and world.size > 1:
        assignment = assigned(world, servers)
        worker = -1 if assignment.worker is None else assignment.worker
        if worker < 0:  # Keras cannot split its one sample, and says so before it calls any callback
            explain("validation_split", f"a server has one sample of shard(), to show its shape; {VALIDATE}")
        _check_lengths(data)
        data = tuple(_part(one, worker, world.size - servers) for one in data)
    return data[0] if len(data) == 1 else data


def _check_lengths(data: tuple[Any, ...]) -> None:
    leaves = [
        leaf for one in data if _is_array(one) or _is_structure(one) for leaf in keras.tree.flatten(one)
    ]
    lengths = [_length(leaf) for leaf in leaves if _is_array(leaf)]
    if len(set(lengths)) > 1:
        raise ConfigurationError(f"shard() got arrays of {lengths} samples; give arrays of equal length")


def _is_array(data: Any) -> bool:
    return bool(getattr(data, "shape", ()))


def _is_structure(data: Any) -> bool:
    """Return whether this is a structure of arrays, not a list of samples."""
    return isinstance(data, dict | list | tuple) and any(map(_is_array, keras.tree.flatten(data)))


def _length(data: Any) -> int:
    return int(data.shape[0]) if _is_array(data) else len(data)  # sparse matrices have no len()


def _check_enough(count: int, workers: int, what: str) -> None:
    if count < workers:
        idle = f"worker {count}" if count == workers - 1 else f"workers {count} to {workers - 1}"
        error = ConfigurationError(
            f"shard() cannot divide {count} {what} among {workers} workers: {idle} would get none, and "
            "Keras cannot fit without data; start fewer workers"
        )
        error.collective = True  # all ranks are given the same data
        raise error


def _part(data: Any, worker: int, workers: int) -> Any:
    if data is None:  # no targets, or no weights
        return None
    if _is_structure(data):
        return keras.tree.map_structure(lambda leaf: _part(leaf, worker, workers), data)
    if isinstance(data, H5Sequence):
        raise ConfigurationError(
            "shard() cannot divide an H5Sequence, which already holds only this rank's share; pass it to "
            "fit() directly"
        )
    if isinstance(data, keras.utils.PyDataset):
        if data.num_batches is not None:
            _check_enough(data.num_batches, workers, "batches")
        return _EveryNth(data, max(worker, 0), workers, served=worker < 0)
    if type(data).__module__.startswith("tensorflow.") and hasattr(data, "shard"):
        return data.take(1) if worker < 0 else data.shard(workers, worker)
    if _is_torch(data, "DataLoader"):
        raise ConfigurationError(
            "shard() cannot divide a DataLoader, whose sampler is fixed; divide the data set that it loads: "
            "DataLoader(nnlo_keras.shard(dataset), ...)"
        )
    if _is_torch(data, "Dataset") and hasattr(data, "__len__"):
        from torch.utils.data import Subset

        _check_enough(len(data), workers, "samples")
        return Subset(data, range(1) if worker < 0 else range(worker, len(data), workers))
    if hasattr(data, "__getitem__") and (_is_array(data) or hasattr(data, "__len__")):
        _check_enough(_length(data), workers, "samples")
        return data[:1] if worker < 0 else data[worker::workers]
    raise ConfigurationError(
        f"shard() cannot divide a {type(data).__name__}; pass arrays, a tf.data.Dataset, a PyDataset or a "
        "torch Dataset with a length, or give each rank its own share yourself"
    )


def _is_torch(data: Any, name: str) -> bool:
    """Return whether an object is of this class of torch.utils.data; torch need not be installed."""
    module = sys.modules.get("torch.utils.data")
    return module is not None and isinstance(data, getattr(module, name))


class _EveryNth(keras.utils.PyDataset):
    """Every p-th batch of another PyDataset."""

    def __init__(self, data: Any, worker: int, workers: int, *, served: bool) -> None:
        super().__init__(
            workers=data.workers,
            use_multiprocessing=data.use_multiprocessing,
            max_queue_size=data.max_queue_size,
        )
        # The name `_workers` is taken: Keras keeps its number of loading threads there.
        self._data, self._first, self._every, self._served = data, worker, workers, served

    def __len__(self) -> int:
        total = self._data.num_batches
        if total is None:
            raise ConfigurationError(
                "shard() got a PyDataset without a length; define its num_batches or __len__"
            )
        return min(1, total) if self._served else math.ceil((total - self._first) / self._every)

    def __getitem__(self, index: int) -> Any:
        return self._data[self._first + index * self._every]

    def on_epoch_begin(self) -> None:
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._data.on_epoch_end()
