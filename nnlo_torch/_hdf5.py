"""Files as torch data: single samples for a sampler, or batches read in long slices."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar, Unpack

import numpy as np
import torch

from nnlo_common import ConfigurationError
from nnlo_common.plugin import (
    AnswerT,
    BatchOptions,
    FileBatches,
    Files,
    FileSource,
    HDF5Source,
    LeasedBatches,
    LedgerClient,
    Query,
    Reading,
    SampledData,
)
from nnlo_torch._participation import Participation
from nnlo_torch._training_of import can_lease, group_fact, member_of, training_of
from nnlo_torch._wrapper import Wrapper

__all__ = ["Batches", "H5Batches", "H5Dataset", "Samples", "nested", "tensors_of"]


class Samples(torch.utils.data.Dataset[Any]):
    """Samples of files with random access, for `ShardSampler` and every other sampler.

    A sample is `(features, label)`; several features or labels are a tuple in place of one tensor. Neighbours
    that a DataLoader requests together are read in one slice. A random order reads one sample at a time, so
    use `Batches` for files larger than memory.

    `num_workers` > 0 works with every start method: each process opens the files itself.

    Args:
        files: paths, a pattern or a list file; see `nnlo_common.data.list_files`. Or columns in memory, by
            name.
        reading: `features`, `labels` and the other options of `nnlo_common.data.FileSource`.

    Example:
        >>> data = Samples({"x": torch.ones(5, 2), "y": torch.arange(5)}, features="x", labels="y")
        >>> x, y = data[3]
        >>> x.tolist(), int(y), len(data)
        ([1.0, 1.0], 3, 5)
    """

    _source_of: ClassVar[type[FileSource]] = FileSource

    def __init__(self, files: Files | Mapping[str, Any], **reading: Unpack[Reading]) -> None:
        self._source = self._source_of(files, **reading)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples; a DataLoader requests a batch with one call."""
        rows = np.asarray(indices, np.int64)
        size = len(self)
        if len(rows) and not (-size <= rows.min() and rows.max() < size):
            raise IndexError(f"sample {indices} is out of range: the files have {size} samples")
        order, places = np.unique(rows % size, return_inverse=True)
        arrays = [field.empty(len(order)) for field in self._source.fields]
        breaks = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), len(order)]
        for at, end in pairwise(breaks):
            first = int(order[at]) if at < end else 0
            self._source.read(first, first + end - at, [array[at:end] for array in arrays])
        batch = tensors_of(self._source.assemble(arrays)) if len(order) else ()
        return [_changed(batch, itemgetter(place)) for place in places.tolist()]

    def close(self) -> None:
        """Close the files and release local copies."""
        self._source.close()


class H5Dataset(Samples):
    """Samples of HDF5 files, whatever their names; see `Samples`.

    Example:
        >>> import tempfile, h5py, numpy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(f"{folder}/a.h5", "w") as file:
        ...         file["x"], file["y"] = numpy.ones((5, 2)), numpy.arange(5)
        ...     data = H5Dataset(f"{folder}/a.h5", features="x", labels="y")
        ...     (x, y), size = data[3], len(data)
        ...     data.close()
        >>> x.tolist(), int(y), size
        ([1.0, 1.0], 3, 5)
    """

    _source_of = HDF5Source


class Batches(torch.utils.data.IterableDataset[Any]):
    """Batches of the samples in files: this worker's share, or all samples in a process alone.

    See `nnlo_common.data.FileBatches` for how samples are divided and read. Loop over it directly, or over
    `DataLoader(batches, batch_size=None)`. On a server rank the loop serves the epoch and yields nothing. It
    reads ahead in a thread, so `num_workers` must be 0.

    Args:
        files: paths, a pattern or a list file; see `nnlo_common.data.list_files`. The format follows from
            their names: HDF5, ROOT (``file.root:tree``), Parquet and those of the page on data. Or columns
            in memory, by name: objects with a length whose slices are arrays.
        evaluation: divide the samples among all ranks, servers included, for `optimizer.evaluate`; begins no
            epoch and shuffles nothing.
        optimizer: the wrapper of this training; None: the one made last.
        options: `batch_size`, `shuffle`, `seed`, `block`, `window` and `assignment`: see
            `nnlo_common.data.BatchOptions`; `features`, `labels` and the others of
            `nnlo_common.data.FileSource`.

    Attributes:
        epoch: the number of the next epoch, from 0; each loop increments it.

    Example:
        >>> batches = Batches({"x": torch.arange(5)}, features="x", batch_size=2, shuffle=False)
        >>> [x.tolist() for (x,) in batches]
        [[0, 1], [2, 3], [4]]
    """

    _kind: ClassVar[str] = "Batches"
    _beside: ClassVar[str] = "Samples"
    _source_of: ClassVar[type[FileSource]] = FileSource

    def __init__(
        self,
        files: Files | Mapping[str, Any],
        *,
        evaluation: bool = False,
        optimizer: Wrapper | None = None,
        **options: Unpack[BatchOptions],
    ) -> None:
        if evaluation:
            options["shuffle"] = False
        self._batches = FileBatches(
            files, self._kind, source=self._source_of, trained_on=not evaluation, **options
        )
        self._evaluation, self._optimizer = evaluation, optimizer
        self._leased: LeasedBatches | None = None
        self._name = ""
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch = epoch
        self._taken = 0  # batches of the running epoch, or of the next one on resuming
        self._running = False
        self._again = 0  # passes of this epoch that are over
        self._left: Sequence[Sequence[int]] | None = None  # remainder of resumed leases

    @property
    def size(self) -> int:
        """The number of samples in the files, which all ranks share."""
        return self._batches.size

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch.

        A server has none and returns the first worker's number, for schedulers that are made from it. Where
        progress ends an epoch it is that of one process: schedules by batch follow progress then.
        """
        training = self._training()
        if training.counts_progress and not self._evaluation:
            return math.ceil(self.size / self._batches.batch_size)
        self._take_part(training)
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigurationError(
                f"{self._kind} was given to a DataLoader with worker processes, but reads ahead in its own "
                f"thread; use num_workers=0, or {self._beside} with a sampler"
            )
        training = self._training()
        self._take_part(training)
        if self._evaluation:
            yield from map(tensors_of, self._batches.epoch(0))
            return
        if self._running:
            self._taken = self._again = 0
        epoch, self.epoch, self._running = self.epoch, self.epoch + 1, True
        leased = self._leasing(training)
        training.begin_epoch()
        if training.serves:
            return
        self._take_part(training)  # that of a dead worker, whose place this rank takes with this epoch
        dealt = self._dealt(training, epoch) if leased is None else self._dealt_by(leased, training, epoch)
        for batch, size in dealt:
            if training.ended:
                return
            training.take(size)
            self._taken += 1
            yield tensors_of(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's position in its epoch, for `load_state_dict` on the same rank.

        Batches that the loop has received count as used.
        """
        training = self._training()
        self._take_part(training)
        begun = self._running and (training.counts_progress or self._taken < len(self._batches))
        state = self._batches.position(workers=training.share[1], **group_fact(training))
        state |= {"leases": [], "taken": 0, "epoch": self.epoch}
        if self._leasing(training) is not None:
            state["epoch"] -= self._running
            state["again"] = self._again
            if training.role == "server 0":
                state["ledger"] = self._ledger().state()
            elif self._leased is not None:
                state["leases"] = self._leased.left() if self._left is None else list(self._left)
        elif begun or not self._running:
            state.update(epoch=self.epoch - begun, taken=self._taken)
        return state

    def _described(self) -> dict[str, Any]:
        """Return what a checkpoint compares of the data set, on any number of workers."""
        return self._batches.described()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was called, in mid-epoch; call it on all ranks, before the next epoch."""
        training = self._training()
        self._take_part(training)
        self._batches.check(state, workers=training.share[1], **group_fact(training))
        self.set_epoch(state["epoch"])
        self._taken, self._again = state["taken"], state.get("again", 0)
        if self._leasing(training) is not None:
            self._left = state["leases"]
            if "ledger" in state:
                self._ledger().load(state["ledger"])

    def close(self) -> None:
        """Close the files and release local copies."""
        self._batches.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_optimizer": None, "_leased": None, "_name": ""}

    def _dealt(self, training: Participation, epoch: int) -> Iterator[tuple[Any, int]]:
        """Yield the batches of this rank's fixed share, with their sizes."""
        before, done = 0, self._taken
        if training.counts_progress:
            before, done = divmod(self._taken, max(len(self._batches), 1))
        for number in training.passes(epoch, lambda: self.size, before):
            for index in range(done, len(self._batches)):
                if training.made(self.size):
                    return
                yield self._batches.get(number, index, then=number + 1), self._batches.size_of(index)
            done = 0

    def _dealt_by(
        self, leased: LeasedBatches, training: Participation, epoch: int
    ) -> Iterator[tuple[Any, int]]:
        """Yield the batches that this rank leases, with their sizes."""
        training.before_epoch_ends(leased.give_back)
        left, self._left = self._left, None
        if left is not None:
            leased.resume(left)
        for number in training.passes(epoch, lambda: self.size, self._again, shared=True):
            while not training.ended and not training.made(self.size) and leased.more(number):
                yield leased.take(number)
            self._again += 1
        leased.give_back()

    def _leasing(self, training: Participation) -> LeasedBatches | None:
        """Return the source of leased batches; None: assignment is static, or there is one worker only."""
        if not self._batches.dynamic or not can_lease(training):
            return None
        if self._leased is None:
            self._name = f"sampler {training.number_sampler()}"
            rests = not training.counts_progress
            self._leased = LeasedBatches(self._batches, self._ledger(), rests=rests)
        return self._leased

    def _ledger(self) -> LedgerClient:
        batches = self._batches
        several = self._training().counts_progress
        data = SampledData(self._name, batches.leasable, batches.window_size, batches.order, several)
        return LedgerClient(self._ask, data)

    def _ask(self, query: Query[AnswerT]) -> AnswerT:
        return self._training().ask(query)

    def _take_part(self, training: Participation) -> None:
        """Set this rank's share, known once the training exists."""
        if self._evaluation:
            self._batches.take_share(training.rank, training.size)
        else:
            self._batches.take_share(*training.share, training.group_size)
            if self._batches.dynamic and can_lease(training):
                self._batches.take_member(*member_of(training))

    def _training(self) -> Participation:
        return training_of(self._optimizer, self._kind)


class H5Batches(Batches):
    """Batches of the samples in HDF5 files, whatever their names; see `Batches`.

    Example:
        >>> import tempfile, h5py, numpy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with h5py.File(f"{folder}/a.h5", "w") as file:
        ...         file["x"] = numpy.arange(5)
        ...     batches = H5Batches(f"{folder}/a.h5", features="x", batch_size=2, shuffle=False)
        ...     read = [x.tolist() for (x,) in batches]
        ...     batches.close()
        >>> read
        [[0, 1], [2, 3], [4]]
    """

    _kind, _beside, _source_of = "H5Batches", "H5Dataset", HDF5Source


def tensors_of(batch: Any) -> Any:
    """Convert the arrays of a batch to tensors, without a copy."""
    return _changed(batch, torch.as_tensor)


def _changed(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with each of its arrays changed."""
    if isinstance(batch, Mapping):
        return {name: _changed(one, change) for name, one in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_changed(one, change) for one in batch)
    return change(batch)


def nested(rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return rows of unequal length without their filling, as a nested tensor of layout `torch.jagged`.

    Linear layers, norms and `scaled_dot_product_attention` of PyTorch compute with it on the entries alone.

    Args:
        rows: filled up to one length, as `Batches` with `pad=` and `mask=True` gives them.
        mask: true where a row has an entry.

    Raises:
        ConfigurationError: the mask does not fit the rows.

    Example:
        >>> rows, mask = torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([[True, True], [True, False]])
        >>> [row.tolist() for row in nested(rows[..., None], mask).unbind()]
        [[[1.0], [2.0]], [[3.0]]]
    """
    if mask.dtype != torch.bool or mask.ndim != 2 or rows.shape[:2] != mask.shape:
        raise ConfigurationError(
            f"nested: the rows have the shape {list(rows.shape)}, and the mask {mask.dtype} "
            f"{list(mask.shape)}; give a mask of true and false for the first two axes of the rows"
        )
    ends = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0))
    make: Callable[..., torch.Tensor] = torch.nested.nested_tensor_from_jagged
    # Before 2.5 it looks for the longest row itself.
    known = "max_seqlen" in inspect.signature(make).parameters
    return make(rows[mask], ends, **({"max_seqlen": mask.shape[1]} if known else {}))
