"""How a search without blocks ends at a signal."""

from __future__ import annotations

from typing import Any

import keras

from nnlo_common._interrupts import EXIT_CODE, Interrupts

__all__ = ["Leaving"]


class Leaving(keras.callbacks.Callback):
    """Leaves a trial at a signal; the directory has all that the same command needs to go on.

    Args:
        interrupts: the signals.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        super().__init__()
        self._interrupts = interrupts

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras' signature
        """Leave, if it is time to; a `Checkpoint` has been asked before, and has saved."""
        if self._interrupts.came:
            raise SystemExit(EXIT_CODE)
