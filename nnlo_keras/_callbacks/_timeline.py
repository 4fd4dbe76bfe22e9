"""Timeline: a trace of the time spent by each rank."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nnlo_common.plugin import Trace
from nnlo_keras._callbacks._driver import Driver
from nnlo_keras._callbacks._rank_callback import RankCallback

__all__ = ["Timeline"]


class Timeline(RankCallback):
    """Writes a trace of epochs, batches, exchanges and validation, in a file of each rank's own.

    `Timeline("run/timeline.json")` writes run/timeline.rank0.json and so on, to be opened with
    https://ui.perfetto.dev or chrome://tracing; several at once lie side by side, a process for each rank. A
    "batch" is what Keras computes; an "exchange" and whatever else is done with other ranks says how many
    milliseconds of it were spent waiting. On a server, "serve" is the workers' epoch, which it waits through
    but for their exchanges. The file grows by about 100 bytes for each of these, is written about once a
    second, and is valid JSON at any time, also when the training is killed.

    Args:
        path: the file; the rank is added to its name, and an old one is replaced.

    Example:
        >>> import json, tempfile
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((64, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fitted = model.fit(x, x, callbacks=[Timeline(folder + "/timeline.json")], verbose=0)
        ...     events = json.loads(Path(folder, "timeline.rank0.json").read_text())
        >>> [event["name"] for event in events]
        ['process_name', 'batch', 'batch', 'epoch 0']
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)
        self._trace: Trace | None = None

    def after_start(self, distribute: Driver | None) -> None:
        """Open the file, and have exchanges told."""
        super().after_start(distribute)
        self._trace = Trace.of_rank(self.path, self.rank, self.role)
        self._batch_s: float | None = None
        self._ended = False
        if self.team is not None:
            self.team.observe(self._see)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Note when."""
        self._epoch_s = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Note when."""
        self._batch_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Add the batch, if the exchange behind it has not done so."""
        self._end_batch(time.perf_counter())

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Note when."""
        self._test_s = time.perf_counter()

    def on_test_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Add the validation."""
        self._add("validation", self._test_s, time.perf_counter())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Add the epoch."""
        self._add(f"epoch {epoch}", self._epoch_s, time.perf_counter())
        if self._trace is not None:
            self._trace.flush()

    def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Write what is left; others may still have something to say."""
        self._ended = True
        if self._trace is not None:
            self._trace.flush()

    def _see(self, what: str, begin_s: float, end_s: float, waited_s: float) -> None:
        """Take an exchange, or what else is done with other ranks."""
        self._end_batch(begin_s)
        if what == "end epoch" and not self.trains:
            what = "serve"
        self._add(what, begin_s, end_s, waited_ms=round(1e3 * waited_s, 3))

    def _end_batch(self, now_s: float) -> None:
        if self._batch_s is not None and self.trains:
            self._add("batch", self._batch_s, now_s)
        self._batch_s = None

    def _add(self, name: str, begin_s: float, end_s: float, **facts: object) -> None:
        if self._trace is not None:
            self._trace.add(name, begin_s, end_s, **facts)
            if self._ended:
                self._trace.flush()
