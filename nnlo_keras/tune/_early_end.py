"""Early end of a search without blocks: at a signal, or when no time is left."""

from __future__ import annotations

import time
from typing import Any

import keras

from nnlo_common.plugin import EXIT_CODE, Interrupts, TimeLeft

__all__ = ["EarlyEnd", "OutOfTimeError"]


class OutOfTimeError(BaseException):
    """The search is to end here; no fault of a trial, which keras-tuner would take an `Exception` for."""


class EarlyEnd(keras.callbacks.Callback):
    """Leaves a trial; the directory has all that the same command needs to go on.

    Args:
        interrupts: the signals.
        time_left: how long there is.
    """

    def __init__(self, interrupts: Interrupts, time_left: TimeLeft) -> None:
        super().__init__()
        self._interrupts, self._time_left = interrupts, time_left

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' signature
        """Leave, if it is time to; a `Checkpoint` has been asked before, and has saved."""
        if self._interrupts.came:
            raise SystemExit(EXIT_CODE)
        if self._time_left.over(time.time()):
            raise OutOfTimeError
