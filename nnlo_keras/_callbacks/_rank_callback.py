"""Base of nnlo's callbacks: each knows this rank's role, at any place in the list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeGuard

import keras
import numpy as np

from nnlo_common import ConfigurationError, TrainingReport
from nnlo_common.plugin import Session, has_center, launched, serves, speaks
from nnlo_keras._compat import callbacks_of_fit, samples_counted
from nnlo_keras._sequence_feed import SequenceFeed

__all__ = ["Driver", "RankCallback", "is_driver", "numbers"]

# -- driver: interface of `Distribute` for nnlo's other callbacks --------------------------------------


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


class RankCallback(keras.callbacks.Callback):
    """A callback that works together with `nnlo_keras.Distribute`, before or after it in the list.

    Attributes:
        meets: all ranks wait for each other in it, so all must have it.
        meets_at_start: they wait before the first batch.
        team: this rank's session in a training of several ranks; None outside of one.
        role: "alone", "server 0", "worker 0", ...
    """

    meets: ClassVar[bool] = False
    meets_at_start: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.distribute: Driver | None = None
        self.team: Session | None = None
        self.role = "alone"

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Begin, unless a `Distribute` does it."""
        container = callbacks_of_fit()
        if container is not None and any(map(is_driver, container.callbacks)):
            return
        if launched() is not None:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} is used in a training of several ranks, but no callback exchanges; add "
                "nnlo_keras.Distribute() to the callbacks of fit()"
            )
        self.before_start("alone")
        self.after_start(None)

    # -- what Distribute calls ------------------------------------------------------------------------

    def before_start(self, role: str) -> None:
        """Prepare before this rank's model becomes part of the training."""
        self.role, self.distribute, self.team = role, None, None

    def before_part(self, distribute: Driver) -> None:
        """Prepare after the session is made and before this rank joins."""

    def after_start(self, distribute: Driver | None) -> None:
        """Prepare before the first batch, after all ranks have joined."""
        self.distribute = distribute
        self.team = None if distribute is None else distribute.team

    def before_end(self) -> None:
        """Finish while other ranks can still answer queries."""

    def after_serving(self) -> None:
        """Act on a server after it has served an epoch."""

    def begin_to_serve(self) -> None:
        """Act on a worker that takes the place of a dead server, within any hook of `fit`."""

    def before_empty_epoch(self, epoch: int) -> None:
        """Act for an epoch after this rank has stopped early; other ranks may still train in it."""

    def after_epochs(self) -> None:
        """Act after the last epoch of all ranks, early stopped ones included."""

    def after_leaving(self) -> None:
        """Act after this rank has left the training."""

    # -- helpers for callbacks ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.team is None else self.team.rank

    @property
    def has_center(self) -> bool:
        """Whether all ranks will get this rank's model at the end."""
        return speaks(self.role)

    @property
    def follows_center(self) -> bool:
        """Whether this rank's model is the centre: of that rank, and of one that may take its place."""
        return has_center(self.role)

    @property
    def trains(self) -> bool:
        """Whether this rank gets batches."""
        return not serves(self.role)

    @property
    def samples_in_epoch(self) -> int:
        """Number of samples in this epoch's metrics; 0 if Keras does not count them."""
        return samples_counted(self.model)

    def end_exchanges(self, epoch: int, logs: Any) -> None:
        """Make the last exchange of this epoch now, even if `Distribute` comes later in the list."""
        if self.distribute is not None:
            self.distribute.end_exchanges(epoch, logs)


def numbers(logs: Any) -> dict[str, float]:
    """Return the metrics that are scalars."""
    return {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
