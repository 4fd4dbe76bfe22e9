"""Driver: the callback that takes part in a training of several ranks, as our other callbacks see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from nnlo_common import TrainingReport
from nnlo_common.plugin import Session
from nnlo_keras._sequence_feed import SequenceFeed

__all__ = ["Driver", "is_driver"]


class Driver(Protocol):
    """Drives one rank's part; `nnlo_keras.Distribute` does.

    Attributes:
        drives_training: tells it from other callbacks.
    """

    drives_training: bool

    @property
    def team(self) -> Session | None:
        """This rank's place among several, while there are any."""

    @property
    def report(self) -> TrainingReport:
        """What this rank has seen of the last training."""

    @property
    def feed(self) -> SequenceFeed | None:
        """What `fit` trains on, where that is an H5Sequence."""

    @property
    def batches_in_epoch(self) -> int:
        """How many batches this worker has trained on in this epoch."""

    def state(self) -> dict[str, Any] | None:
        """Return where this worker is in its epoch."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume where `state` was returned."""

    def settle(self) -> None:
        """On a server whose training is over: let the centre be what the model was then."""

    def leave(self) -> None:
        """Leave the training in good order, wherever in an epoch this rank is."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """End the epoch."""


def is_driver(callback: object) -> TypeGuard[Driver]:
    """Say whether a callback drives this rank's part."""
    return getattr(callback, "drives_training", False) is True
