"""Batches of files for one rank; the data sets of the framework packages return them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, Unpack

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._batches import Batches
from nnlo_common.data._blocks import portion
from nnlo_common.data._file_source import FileSource, Reading
from nnlo_common.data._listing import Files

__all__ = ["BatchOptions", "FileBatches", "check_assignment", "check_position"]


class BatchOptions(Reading, total=False):
    """Options of `FileBatches`, besides `features`, `labels` and the others of `FileSource`.

    Attributes:
        batch_size: samples in a batch (32); the last one of an epoch may have fewer.
        shuffle: use another order in each epoch (True). False: keep the order of the files.
        seed: of the orders (0); equal on all ranks.
        block: samples read in a row; None: about 256 KB.
        window: batches shuffled together in memory; None: enough for 64 blocks, up to 64 MB.
        assignment: "static": workers' parts differ by at most one sample. "dynamic": workers lease windows
            from the server as they need them, so that a slow worker gets less, all end at about the same
            time, and the leases of a dead worker go to others. Blocks and windows are smaller then.
        bucket: make batches of rows of like length (of columns with `pad`), each filled up to its own longest
            row only (False).
    """

    batch_size: int
    shuffle: bool
    seed: int
    block: int | None
    window: int | None
    assignment: Literal["static", "dynamic"]
    bucket: bool


class FileBatches(Batches):
    """One rank's batches of files: a fixed share of each epoch, or leases.

    Each epoch distributes all samples again, each to one worker, in an order that depends on the seed and
    the epoch only. A thread reads the files ahead of the training, also across the end of an epoch, in slices
    and never sample by sample; only a few blocks are in memory.

    Args:
        files: paths, a pattern or a list file; see `list_files`. Or columns in memory.
        kind: the user's name for these batches, for errors.
        source: reads them.
        trained_on: whether the training uses them; otherwise they cannot be leased.
        assignment: see `BatchOptions`, also for the other options.
    """

    def __init__(
        self,
        files: Files | Mapping[str, Any],
        kind: str,
        *,
        source: type[FileSource] = FileSource,
        trained_on: bool,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        block: int | None = None,
        window: int | None = None,
        assignment: Literal["static", "dynamic"] = "static",
        bucket: bool = False,
        **reading: Unpack[Reading],
    ) -> None:
        check_assignment(assignment, trained_on=trained_on)
        self._files = source(files, **reading)
        if bucket and not self._files.ragged:
            self._files.close()
            raise ConfigurationError(
                "bucket=True is for rows of unequal length, but there are no such columns; leave it out, or "
                "name a column of lists and give pad="
            )
        self._kind, self.dynamic = kind, assignment == "dynamic"
        super().__init__(
            self._files,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            block=block,
            window=window,
            leased=self.dynamic,
            bucket=bucket,
        )

    def take_share(self, worker: int, workers: int, group_size: int = 1) -> None:
        """Use the fixed share of this worker from now on; a negative index means the first worker.

        All ranks of a group get equally many batches; one that may repeat a sample has the size 0.
        """
        worker = max(worker, 0)
        first = portion(self.size, worker % (workers // group_size), workers, group_size)
        batches = math.ceil((first[1] - first[0]) / self.batch_size)
        self.take_part(portion(self.size, worker, workers, group_size), batches)

    def like(self) -> Any:
        """Return a batch of one sample, to show shapes and types."""
        return self._files.take(0, 1)

    def described(self) -> dict[str, Any]:
        """Return what a checkpoint compares of a data set, on any number of workers."""
        columns = [f"{one.name} {one.dtype}{list(one.shape)}" for one in self._files.fields]
        return {"samples": self.size, "columns": columns}

    def position(self, **facts: Any) -> dict[str, Any]:
        """Return all that determines the sample at a position: these `facts`, the size and the options."""
        assignment = "dynamic" if self.dynamic else "static"
        own = {"size": self.size, "order": self.order, "batch_size": self.batch_size}
        return {**own, "assignment": assignment, **facts}

    def check(self, state: Mapping[str, Any], **facts: Any) -> None:
        """Refuse a saved state with a different `position`."""
        check_position(state, self.position(**facts), self._kind)

    def close(self) -> None:
        """Close the files, and release staged copies."""
        super().close()
        self._files.close()


def check_assignment(assignment: str, *, trained_on: bool) -> None:
    """Refuse an unknown assignment, or "dynamic" for data that is not trained on."""
    if assignment not in ("static", "dynamic") or (assignment == "dynamic" and not trained_on):
        raise ConfigurationError(
            f"assignment={assignment!r} is not possible: it must be 'static', or 'dynamic' for training data"
        )


def check_position(state: Mapping[str, Any], here: Mapping[str, Any], kind: str) -> None:
    """Refuse a saved state of other data, options or workers than the present ones."""
    if (found := {name: state.get(name) for name in here}) != here:
        raise ConfigurationError(
            f"the saved state is for {found}, but this {kind} has {here}; resume with the same data set, "
            "options and number of workers"
        )
