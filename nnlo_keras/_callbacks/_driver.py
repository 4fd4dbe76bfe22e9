"""Driver: interface of `Distribute` for nnlo's other callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from nnlo_common import TrainingReport
from nnlo_common.plugin import Session
from nnlo_keras._sequence_feed import SequenceFeed

__all__ = ["Driver", "is_driver"]


class Driver(Protocol):
    """Drives one rank's part in a training; implemented by `nnlo_keras.Distribute`.

    Attributes:
        drives_training: True; marks the driver among the callbacks.
    """

    drives_training: bool

    @property
    def team(self) -> Session | None:
        """This rank's session in a training of several ranks; None outside of one."""

    @property
    def report(self) -> TrainingReport:
        """This rank's counts of the last training."""

    @property
    def feed(self) -> SequenceFeed | None:
        """The Batches that `fit` trains on, if it does."""

    @property
    def batches_in_epoch(self) -> int:
        """Number of batches that this worker has trained on in this epoch."""

    @property
    def epoch_made(self) -> float | None:
        """The share of this epoch's progress that is made; None: progress does not end epochs."""

    def state(self) -> dict[str, Any] | None:
        """Return this worker's position in its epoch."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned."""

    def settle(self) -> None:
        """On a server whose training has ended: set the centre to the model as it was at the end."""

    def leave(self) -> None:
        """Leave the training, at any point in an epoch."""

    def end_exchanges(self, epoch: int, logs: Any) -> None:
        """Make the last exchange of this epoch, if it was not made yet."""


def is_driver(callback: object) -> TypeGuard[Driver]:
    """Return whether a callback drives this rank's part."""
    return getattr(callback, "drives_training", False) is True
