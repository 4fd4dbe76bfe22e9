"""Early end of a search without blocks: at a signal, or when no time is left."""

from __future__ import annotations

import time
from typing import Any

import keras

from nnlo_common.plugin import EXIT_CODE, Interrupts, TimeLeft

__all__ = ["EarlyEnd", "OutOfTimeError"]


class OutOfTimeError(BaseException):
    """Ends the search; a `BaseException`, because keras-tuner takes an `Exception` for a trial's failure."""


class EarlyEnd(keras.callbacks.Callback):
    """Callback that leaves a trial; a rerun of the same command resumes from the directory.

    Args:
        interrupts: the signals.
        time_left: the time limit.
    """

    def __init__(self, interrupts: Interrupts, time_left: TimeLeft) -> None:
        super().__init__()
        self._interrupts, self._time_left = interrupts, time_left

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' signature
        """Leave after a signal or at the time limit; a `Checkpoint` runs first and has saved."""
        if self._interrupts.came:
            raise SystemExit(EXIT_CODE)
        if self._time_left.over(time.time()):
            raise OutOfTimeError
