"""Batches: this rank's share of a list of files, for `fit`."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import keras

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    BatchOptions,
    FileBatches,
    Files,
    FileSource,
    HDF5Source,
    LeasedBatches,
    LedgerClient,
    RankWorld,
    Roles,
    SampledData,
    Session,
    launched,
    planned,
    roles_taken_from,
)

__all__ = ["Batches", "H5Sequence"]

# Batches that Keras may request before training, to learn shapes and types.
_LOOKS = 4


class ShareOptions(BatchOptions, Roles, total=False):
    """What `Batches` can be told: of the batches, and of the ranks."""


class Batches(keras.utils.PyDataset):
    """Batches of the samples in files: this worker's share, or all samples in a process alone.

    See `nnlo_common.data.FileBatches` for how samples are divided and read. It shuffles itself: the `shuffle`
    of `fit` has no effect, as batches come in order whatever index Keras requests. A server gets one sample,
    from which its `fit` learns shapes and types. A rank of a group that has a batch less than the others gets
    one of another rank again, which has no weight. `assignment="dynamic"` needs `Distribute` in the `fit`;
    with servers=0 it is the same as "static".

    Args:
        files: paths, a pattern or a list file; see `nnlo_common.data.list_files`. The format follows from
            their names: HDF5, ROOT (``file.root:tree``), Parquet and those of the page on data. Or columns
            in memory, by name: objects with a length whose slices are arrays.
        shard: False: all samples on each rank, for validation_data.
        world: the ranks; None: MPI's if a launcher has started this process, else this process alone.
        options: those of the wrapper that decide which rank does what, as `servers`; `batch_size`,
            `shuffle`, `seed`, `block`, `window` and `assignment`: see `nnlo_common.data.BatchOptions`;
            `features`, `labels` and the others of `nnlo_common.data.FileSource`.

    Attributes:
        epoch: the number of the next epoch, from 0. It increments itself, and `Distribute` keeps it from
            falling behind the epoch of a resumed `fit`.

    Example:
        >>> import numpy
        >>> columns = {"x": numpy.ones((5, 2)), "y": numpy.arange(5)}
        >>> data = Batches(columns, features="x", labels="y", batch_size=2, shuffle=False)
        >>> len(data), data[0]
        (3, (array([[1., 1.],
               [1., 1.]]), array([0, 1])))
    """

    _kind: ClassVar[str] = "Batches"
    _source_of: ClassVar[type[FileSource]] = FileSource

    def __init__(
        self,
        files: Files | Mapping[str, Any],
        *,
        shard: bool = True,
        world: RankWorld | None = None,
        **options: Unpack[ShareOptions],
    ) -> None:
        super().__init__()
        reading: dict[str, Any] = {**options}
        roles = roles_taken_from(reading, self._kind)
        batches = self._batches = FileBatches(
            files, self._kind, source=self._source_of, trained_on=shard, **reading
        )
        world = world or launched()
        # A group without a server is one worker, to which nothing can be leased.
        self.dynamic, self.leased = batches.dynamic and roles["servers"] > 0, False
        self._part, self._group_size = [0, batches.size], 1
        if shard and world is not None and world.size > 1:
            topology = planned(world, roles)
            assignment = topology.assignment(world.rank)
            groups = topology.cells[0].groups
            ranks, size = sum(map(len, groups)), len(groups[0])
            self._group_size = size
            worker = assignment.worker
            index = None if worker is None else worker + ranks // size * (assignment.member or 0)
            _check_enough(self._kind, batches.size, ranks, leased=self.dynamic)
            self.leased = self.dynamic and worker is not None
            if self.dynamic:
                batches.take_member(assignment.member or 0, size)
            if index is None:  # a server: one sample, to show shapes
                batches.take_part((0, 1))
            else:
                batches.take_share(index, ranks, size)
            self._part = list(batches.part)
        self._shard, self._like = shard, None if not self.leased else batches.like()
        self.epoch = 0
        self._begun = self._looked = False  # whether Keras has begun an epoch, and has sampled the data
        self._begin()

    @property
    def size(self) -> int:
        """The number of samples in the files, which all ranks share."""
        return self._batches.size

    @property
    def batch_size(self) -> int:
        """The number of samples in a full batch."""
        return self._batches.batch_size

    @property
    def shuffles(self) -> bool:
        """Whether each epoch has an order of its own."""
        return self._batches.shuffles

    def __len__(self) -> int:
        """Return the number of batches in an epoch on this rank; with leases, more than enough."""
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

    def repeats(self, batch: int) -> bool:
        """Return whether a batch of an epoch, of several passes perhaps, has no weight of its own."""
        return not self._batches.size_of(batch % len(self._batches))

    def state(self, taken: int | None) -> dict[str, Any]:
        """Return the position after this many batches of an epoch; None: before the next `turn_to`."""
        return {
            **self._batches.position(part=self._part),
            # Before the first epoch Keras may have ended one, to build the model.
            "epoch": self._following if taken is None else self.epoch,
            "taken": 0 if self.leased or taken is None else taken,
        }

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint compares of the data set, on any number of workers."""
        return self._batches.described()

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned; the epoch has only the remaining batches."""
        self._batches.check(state, part=self._part)
        self.epoch, self._taken = state["epoch"], state["taken"]

    def turn_to(self, epoch: int) -> None:
        """Turn to this epoch, or to the one after the last, whichever is later; `Distribute` calls it."""
        # Keras may have requested more than one batch to build the model.
        self._epoch = max(self._following, epoch)
        self._following = self._epoch + 1

    def __getitem__(self, index: int) -> Any:
        """Return the epoch's next batch, whatever the index; the same index again gets the same batch."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} is out of range: the epoch has {len(self)} batches")
        if self.leased:
            self._looks += 1
            if self._looks > _LOOKS and not self.fed:
                raise ConfigurationError(
                    f"{self._kind} with assignment='dynamic' was used without Distribute(), which gets the "
                    "leases from the server; pass it to fit() directly with callbacks=[nnlo_keras."
                    "Distribute()], and use shard=False to validate, or use assignment='static'"
                )
            return self._like  # a sample only: leased batches come through `_sequence_feed`
        with self._lock:
            place = self._taken + self._given.setdefault(index, len(self._given))
            return self._batches.get(self._epoch, place, then=self._epoch + 1 if self._shard else None)

    def lease_from(self, team: Session) -> LeasedBatches:
        """Return the source of leased batches in a training; sets `fed`."""
        if self._group_size != team.member.group_size:
            raise ConfigurationError(
                f"{self._kind} with assignment='dynamic' has group_size={self._group_size}, but the wrapper "
                f"has group_size={team.member.group_size}; give both the same"
            )
        self.fed = True
        return LeasedBatches(self._batches, self.ledger(team), rests=not team.counts_progress)

    def ledger(self, team: Session) -> LedgerClient:
        """Return a client of the server's ledger of leases."""
        batches = self._batches
        return LedgerClient(
            team.ask,
            SampledData(
                self._kind, batches.leasable, batches.window_size, batches.order, team.counts_progress
            ),
        )

    def train(self, worker: int, workers: int) -> None:
        """Have a worker's share: this rank was a spare, and trains from now on."""
        self.leased = self.dynamic
        self._batches.take_share(worker, workers)
        self._part = list(self._batches.part)
        self._like = self._batches.like() if self.leased else None

    def serve(self) -> None:
        """Have one sample, as on a server: this rank was a worker, and serves from now on."""
        self.leased = self.fed = False
        self._batches.take_part((0, 1))
        self._part = list(self._batches.part)

    def on_epoch_begin(self) -> None:
        """Begin an epoch: forget the batches that Keras requested before training."""
        self._looks, self._begun = 0, True
        self._given.clear()

    def on_epoch_end(self) -> None:
        """Turn to the next epoch."""
        # To build the model, Keras ends epochs before training: some that it never began, one after a batch.
        look = not self._begun or (not self._looked and len(self._given) == 1 < len(self))
        self._begun, self._looked = False, True
        self._given.clear()
        if not look:
            self._epoch += 1
            self._taken = 0

    def close(self) -> None:
        """Close the files and release local copies."""
        self._batches.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_given", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def _begin(self) -> None:
        # Keras requests batches from its own threads with shuffled indices; blocks are read in order.
        self._lock = threading.Lock()
        self._given: dict[int, int] = {}
        self._looks, self.fed = 0, False


class H5Sequence(Batches):
    """Batches of the samples in HDF5 files, whatever their names; see `Batches`.

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

    _kind, _source_of = "H5Sequence", HDF5Source


def _check_enough(kind: str, size: int, workers: int, *, leased: bool) -> None:
    if size < workers and not leased:
        raise ConfigurationError(
            f"{kind} cannot divide {size} samples among {workers} workers: some would get none, and "
            "Keras cannot fit without data; start fewer workers, name more files, or use "
            "assignment='dynamic'"
        )
