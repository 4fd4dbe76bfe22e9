"""This rank's part of a list of HDF5 files, for `fit`."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, Unpack

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    BatchOptions,
    FileBatches,
    Files,
    LeasedBatches,
    LedgerClient,
    RankWorld,
    SampledData,
    Session,
    assigned,
    launched,
    portion,
)

__all__ = ["H5Sequence"]

# How often Keras may look at what the data are like before it trains.
_LOOKS = 4


class H5Sequence(keras.utils.PyDataset):
    """Batches of the samples in HDF5 files: this worker's part of them; alone, all.

    `nnlo_common.data.FileBatches` says how they are dealt out and read. It shuffles by itself: the `shuffle`
    of `fit` changes nothing, as batches come in the order in which Keras asks. A server gets one sample, for
    its `fit` to see what the data are like. `assignment="dynamic"` needs `Distribute` in the `fit`.

    Args:
        files: paths, a pattern or a list file; see `nnlo_common.data.list_files`.
        shard: False: all samples on each rank, for validation_data.
        servers: as in the wrapper.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: `batch_size`, `shuffle`, `seed`, `block`, `window` and `assignment`: see
            `nnlo_common.data.BatchOptions`; `features`, `labels` and the others of
            `nnlo_common.data.HDF5Source`.

    Attributes:
        epoch: the number of the next epoch, from 0. It counts up by itself, and `Distribute` lets it never be
            behind the epoch of `fit`, which may have been resumed.

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
        shard: bool = True,
        servers: int = 1,
        world: RankWorld | None = None,
        **options: Unpack[BatchOptions],
    ) -> None:
        super().__init__()
        batches = self._batches = FileBatches(files, "H5Sequence", trained_on=shard, **options)
        world, self.dynamic, self.leased = world or launched(), batches.dynamic, False
        self._part = [0, batches.size]
        if shard and world is not None and world.size > 1:
            worker = assigned(world, servers).worker
            self._part = list(_part(batches.size, worker, world.size - servers, leased=self.dynamic))
            self.leased = self.dynamic and worker is not None
            batches.take_part((self._part[0], self._part[1]))
        self._shard, self._like = shard, None if not self.leased else batches.like()
        self.epoch = 0
        self._begun = self._looked = False  # whether Keras has begun an epoch, and has looked at the data
        self._begin()

    def __len__(self) -> int:
        """How many batches an epoch has on this rank; more than enough, where they are leased."""
        if not self.leased:
            return len(self._batches) - self._taken
        return 2 * (_LOOKS + math.ceil(self._batches.size / self._batches.batch_size))

    @property
    def epoch(self) -> int:
        """The number of the next epoch."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = self._following = epoch
        self._taken = 0

    def state(self, taken: int) -> dict[str, Any]:
        """Return where an epoch is of which so many batches were used."""
        return {
            **self._batches.position(part=self._part),
            "epoch": self.epoch,
            "taken": 0 if self.leased else taken,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was returned; the epoch has the batches only that are left."""
        self._batches.check(state, part=self._part)
        self.epoch, self._taken = state["epoch"], state["taken"]

    def turn_to(self, epoch: int) -> None:
        """Turn to this epoch, or to the one after the last, whichever is later; `Distribute` does it."""
        # Keras may have looked at more of the data than one batch to build the model.
        self._epoch = max(self._following, epoch)
        self._following = self._epoch + 1

    def __getitem__(self, index: int) -> Any:
        """Return a batch: of those that are left of this epoch the next one, whichever was asked for.

        Asked for the same index again, it is the same one.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if self.leased:
            self._looks += 1
            if self._looks > _LOOKS and not self.fed:
                raise ConfigurationError(
                    "an H5Sequence with assignment='dynamic' was used without Distribute(), which asks the "
                    "server for leases; give it to fit() itself, with callbacks=[nnlo_keras.Distribute()], "
                    "and use shard=False to validate, or assignment='static'"
                )
            return self._like  # what is trained on is leased; see `_sequence_feed`
        with self._lock:
            place = self._taken + self._given.setdefault(index, len(self._given))
            return self._batches.get(self._epoch, place, then=self._epoch + 1 if self._shard else None)

    def lease_from(self, team: Session) -> LeasedBatches:
        """Return what leases batches in a training; `fed` says that they are trained on."""
        self.fed = True
        return LeasedBatches(self._batches, self.ledger(team))

    def ledger(self, team: Session) -> LedgerClient:
        """Return what asks the server's ledger of leases."""
        batches = self._batches
        return LedgerClient(
            team.ask, SampledData("H5Sequence", batches.size, batches.window_size, batches.order)
        )

    def on_epoch_begin(self) -> None:
        """Begin an epoch: what was looked at before has not been trained on."""
        self._looks, self._begun = 0, True
        self._given.clear()

    def on_epoch_end(self) -> None:
        """Turn to the next epoch."""
        # Before it trains Keras ends epochs that it has not begun, and one after a batch, to build the model.
        look = not self._begun or (not self._looked and len(self._given) == 1 < len(self))
        self._begun, self._looked = False, True
        self._given.clear()
        if not look:
            self._epoch += 1
            self._taken = 0

    def close(self) -> None:
        """Close the files, and take leave of what was copied."""
        self._batches.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_given", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        # Keras asks from threads of its own, and shuffles the indices; blocks are read in their own order.
        self._lock = threading.Lock()
        self._given: dict[int, int] = {}
        self._looks, self.fed = 0, False


def _part(size: int, worker: int | None, workers: int, *, leased: bool) -> tuple[int, int]:
    """The positions of each epoch that are for a worker; a server, for which worker is None, has one."""
    if size < workers and not leased:
        raise ConfigurationError(
            f"H5Sequence cannot divide {size} samples among {workers} workers: some would have none, and "
            "Keras cannot fit without data; start fewer workers, name more files, or use "
            "assignment='dynamic'"
        )
    return (0, 1) if worker is None else portion(size, worker, workers)
