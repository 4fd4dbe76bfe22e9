"""Base of our callbacks: each knows this rank's part, wherever it stands in the list."""

from __future__ import annotations

from typing import Any, ClassVar

import keras
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_common.plugin import Session, launched, speaks
from nnlo_keras._callbacks._driver import Driver, is_driver
from nnlo_keras._compat import callbacks_of_fit, samples_counted

__all__ = ["RankCallback", "numbers"]


class RankCallback(keras.callbacks.Callback):
    """A callback that goes along with `nnlo_keras.Distribute`, before or behind it in the list.

    Attributes:
        meets: all ranks wait for each other in it, so all of them have to have it.
        meets_at_start: they do so before the first batch.
        team: this rank's place among several, while there are any.
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
        """Begin, unless there is a `Distribute` that says when."""
        container = callbacks_of_fit()
        if container is not None and any(map(is_driver, container.callbacks)):
            return
        if launched() is not None:
            name = type(self).__name__
            raise ConfigurationError(
                f"{name} is used by one of several ranks without the callback that exchanges; add "
                "nnlo_keras.Distribute() to the callbacks of fit()"
            )
        self.before_start("alone")
        self.after_start(None)

    # -- what Distribute calls ------------------------------------------------------------------------

    def before_start(self, role: str) -> None:
        """Do what has to be done before the centre is what this rank's model is."""
        self.role, self.distribute, self.team = role, None, None

    def before_part(self, distribute: Driver) -> None:
        """Do what has to be done when this rank has its place, and before it takes up its part."""

    def after_start(self, distribute: Driver | None) -> None:
        """Do what has to be done before the first batch, when all ranks are there."""
        self.distribute = distribute
        self.team = None if distribute is None else distribute.team

    def before_end(self) -> None:
        """Do what has to be done while the others can still be asked."""

    def after_serving(self) -> None:
        """On a server: an epoch was served."""

    def before_empty_epoch(self, epoch: int) -> None:
        """The training was stopped here, and others may still have this epoch before them."""

    def after_epochs(self) -> None:
        """All ranks have had all epochs, those that were stopped before them, too."""

    # -- what several of them need --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's number."""
        return 0 if self.team is None else self.team.rank

    @property
    def has_center(self) -> bool:
        """Whether this rank's model is what all ranks will have at the end."""
        return speaks(self.role)

    @property
    def trains(self) -> bool:
        """Whether this rank gets batches."""
        return not self.role.startswith("server")

    @property
    def samples_in_epoch(self) -> int:
        """How many samples the metrics of this epoch have seen; 0 where Keras does not count them."""
        return samples_counted(self.model)

    def end_exchanges(self, epoch: int, logs: Any) -> None:
        """See to it that the last exchange of this epoch has been made, also before `Distribute` does."""
        if self.distribute is not None:
            self.distribute.on_epoch_end(epoch, logs)


def numbers(logs: Any) -> dict[str, float]:
    """Return the metrics that are single numbers."""
    return {name: float(value) for name, value in (logs or {}).items() if np.ndim(value) == 0}
