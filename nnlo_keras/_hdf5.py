"""This rank's part of a list of HDF5 files, for `fit`."""

from __future__ import annotations

import threading
from typing import Any, Unpack

import keras

from nnlo_common import ConfigurationError
from nnlo_common._joining import assigned, launched
from nnlo_common.data import Batches, Files, HDF5Source, Reading, portion
from nnlo_common.transport._endpoint import RankWorld

__all__ = ["H5Sequence"]


class H5Sequence(keras.utils.PyDataset):
    """Batches of the samples in HDF5 files: this worker's part of them; alone, all.

    Each epoch deals out all samples anew, each to one worker, in an order that depends on the seed and the
    epoch only; workers' parts differ by at most one sample. The files are read in slices, never sample by
    sample, by a thread that is ahead of the training, and only a few of their blocks are in memory.

    It shuffles by itself: the `shuffle` of `fit` changes nothing, as batches come in the order in which
    Keras asks. A server gets one sample, for its `fit` to see what the data are like.

    Args:
        files: paths, a pattern or a list file; see `nnlo_common.data.list_files`.
        batch_size: how many samples a batch has; the last one of an epoch may have fewer.
        shuffle: in another order in each epoch. False: as they lie in the files.
        seed: of the orders; equal on all ranks.
        block: how many samples are read in a row; None: about 256 KB.
        window: how many batches are mixed in memory; None: 64 blocks, up to 64 MB.
        shard: False: all samples on each rank, for validation_data.
        servers: as in the wrapper.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        reading: `features`, `labels` and the other options of `nnlo_common.data.HDF5Source`.

    Attributes:
        epoch: the number of the next epoch, from 0; it counts up by itself. Set it to go on with a training.

    Example:
        >>> import tempfile, h5py, numpy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(f"{folder}/a.h5", "w") as file:
        ...         file["x"], file["y"] = numpy.ones((5, 2)), numpy.arange(5)
        ...     data = H5Sequence(f"{folder}/*.h5", features="x", labels="y", batch_size=2, shuffle=False)
        ...     *_, last = data
        ...     data.close()
        >>> len(data), last
        (3, (array([[1., 1.]]), array([4])))
    """

    def __init__(
        self,
        files: Files,
        *,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        block: int | None = None,
        window: int | None = None,
        shard: bool = True,
        servers: int = 1,
        world: RankWorld | None = None,
        **reading: Unpack[Reading],
    ) -> None:
        super().__init__()
        self._source = HDF5Source(files, **reading)
        self._batches = Batches(
            self._source,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            block=block,
            window=window,
            part=_part(len(self._source), servers, world) if shard else None,
        )
        self.epoch = 0
        self._begin()

    def __len__(self) -> int:
        """How many batches an epoch has on this rank."""
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        """Return a batch: of those that are left of this epoch the next one, whichever was asked for.

        Asked for the same index again, it is the same one.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        with self._lock:
            return self._batches.get(self.epoch, self._given.setdefault(index, len(self._given)))

    def on_epoch_begin(self) -> None:
        """Begin an epoch: what was looked at before has not been trained on."""
        self._given.clear()

    def on_epoch_end(self) -> None:
        """Turn to the next epoch."""
        self.epoch += 1
        self._given.clear()

    def close(self) -> None:
        """Close the files, and take leave of what was copied."""
        self._batches.close()
        self._source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_given", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        # Keras asks from threads of its own, and shuffles the indices; blocks are read in their own order.
        self._lock = threading.Lock()
        self._given: dict[int, int] = {}


def _part(size: int, servers: int, world: RankWorld | None) -> tuple[int, int] | None:
    """The positions of each epoch that are for this rank; None: all."""
    world = world or launched()
    if world is None or world.size == 1:
        return None
    worker = assigned(world, servers).worker
    workers = world.size - servers
    if size < workers:
        raise ConfigurationError(
            f"H5Sequence cannot divide {size} samples among {workers} workers: some would have none, and "
            "Keras cannot fit without data; start fewer workers, or name more files"
        )
    return (0, 1) if worker is None else portion(size, worker, workers)
