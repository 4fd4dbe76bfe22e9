"""Server bar: Keras' own progress bar on a server, which counts the batches of all workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras

from nnlo_common.plugin import Session

__all__ = ["ServerBar"]

_EVERY_S = 0.5


class ServerBar:
    """Moves the bar of a server's `fit`, whose own batches are none.

    In the first epoch the number of batches is unknown, and Keras shows "Unknown"; later epochs have the mean
    of those before. A worker that is ahead by some batches has them counted in the epoch before theirs.

    Args:
        bar: Keras' callback.
        team: this rank's session.
    """

    def __init__(self, bar: keras.callbacks.ProgbarLogger, team: Session) -> None:
        self._bar, self._team = bar, team
        self._target: int | None = None
        self._before = self._epochs = 0

    @classmethod
    def of(cls, container: Any, team: Session) -> ServerBar | None:
        """Return it for the bar among the callbacks of `fit`; None if there is none."""
        for one in container.callbacks:
            if isinstance(one, keras.callbacks.ProgbarLogger) and one.verbose:
                return cls(one, team)
        return None

    def take_over(self) -> list[Callable[[], object]]:
        """Let the bar count what all workers train on; return functions that undo it."""
        bar: Any = self._bar
        bar.on_train_batch_end = lambda *_, **__: None  # a batch of a server has no data
        self._team.watch(self._move, _EVERY_S)

        def count_own_batches() -> None:
            del bar.on_train_batch_end

        return [count_own_batches]

    def begin_epoch(self) -> None:
        """Tell Keras how many batches there are; call it after Keras' own callback has begun the epoch."""
        self._bar.target = self._target
        if self._bar.progbar is not None:
            self._bar.progbar.target = self._target

    def end_epoch(self) -> None:
        """End an epoch, before Keras' callback does."""
        self._before = self._team.report().samples  # of a Keras training: batches
        self._epochs += 1
        self._target = self._bar.seen = math.ceil(self._before / self._epochs)
        self.begin_epoch()

    def _move(self) -> None:
        done = self._team.report().samples - self._before
        if self._bar.verbose == 1 and self._bar.progbar is not None and done:
            most = done if self._target is None else min(done, self._target)
            self._bar.progbar.update(most, finalize=False)
