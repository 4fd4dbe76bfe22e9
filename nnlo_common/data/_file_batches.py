"""Batches of HDF5 files for one rank, as each framework's data set hands them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.data._batches import Batches
from nnlo_common.data._blocks import portion
from nnlo_common.data._listing import Files
from nnlo_common.data.hdf5._samples import HDF5Source, Reading

__all__ = ["BatchOptions", "FileBatches", "check_assignment", "check_position"]


class BatchOptions(Reading, total=False):
    """Options of `FileBatches`, besides `features`, `labels` and the others of `HDF5Source`.

    Attributes:
        batch_size: how many samples a batch has (32); the last one of an epoch may have fewer.
        shuffle: in another order in each epoch (True). False: as they lie in the files.
        seed: of the orders (0); equal on all ranks.
        block: how many samples are read in a row; None: about 256 KB.
        window: how many batches are mixed in memory; None: 64 blocks, up to 64 MB.
        assignment: "static": workers' parts differ by at most one sample. "dynamic": workers lease windows
            from the server as they need them, so that a slow worker gets less, all end at about the same
            time, and what a dead worker had is given out again. Blocks and windows are smaller then.
    """

    batch_size: int
    shuffle: bool
    seed: int
    block: int | None
    window: int | None
    assignment: Literal["static", "dynamic"]


class FileBatches(Batches):
    """The batches of HDF5 files that are one rank's: a fixed share of each epoch, or what it leases.

    Each epoch deals out all samples anew, each to one worker, in an order that depends on the seed and the
    epoch only. The files are read in slices, never sample by sample, by a thread that is ahead of the
    training, into the next epoch, too; only a few of their blocks are in memory.

    Args:
        files: paths, a pattern or a list file; see `list_files`.
        kind: what the user calls these batches, for errors.
        trained_on: whether they are; else they cannot be leased.
        assignment: see `BatchOptions`, which has the other options, too.
    """

    def __init__(
        self,
        files: Files,
        kind: str,
        *,
        trained_on: bool,
        batch_size: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        block: int | None = None,
        window: int | None = None,
        assignment: Literal["static", "dynamic"] = "static",
        **reading: Unpack[Reading],
    ) -> None:
        check_assignment(assignment, trained_on=trained_on)
        self._files = HDF5Source(files, **reading)
        self._kind, self.dynamic = kind, assignment == "dynamic"
        super().__init__(
            self._files,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            block=block,
            window=window,
            leased=self.dynamic,
        )

    def take_share(self, worker: int, workers: int) -> None:
        """Take the fixed share of one of several from now on; of the first, where that is negative."""
        self.take_part(portion(self.size, max(worker, 0), workers))

    def like(self) -> Any:
        """Return a batch of one sample, to see what they are like."""
        return self._files.take(0, 1)

    def position(self, **facts: Any) -> dict[str, Any]:
        """Return what has to be equal, besides these facts, or a saved position would mean another sample."""
        assignment = "dynamic" if self.dynamic else "static"
        own = {"size": self.size, "order": self.order, "batch_size": self.batch_size}
        return {**own, "assignment": assignment, **facts}

    def check(self, state: Mapping[str, Any], **facts: Any) -> None:
        """Refuse a saved state whose `position` is another."""
        check_position(state, self.position(**facts), self._kind)

    def close(self) -> None:
        """Close the files, and take leave of what was copied."""
        super().close()
        self._files.close()


def check_assignment(assignment: str, *, trained_on: bool) -> None:
    """Refuse what is no way to deal samples out."""
    if assignment not in ("static", "dynamic") or (assignment == "dynamic" and not trained_on):
        raise ConfigurationError(
            f"assignment={assignment!r} is not possible: it must be 'static', or 'dynamic' for what is "
            "trained on"
        )


def check_position(state: Mapping[str, Any], here: Mapping[str, Any], kind: str) -> None:
    """Refuse a saved state that was not of the data, options and workers that are here now."""
    if (found := {name: state.get(name) for name in here}) != here:
        raise ConfigurationError(
            f"a state of {found} was saved, but this {kind} is of {here}; resume with the same data set, "
            "options and number of workers"
        )
