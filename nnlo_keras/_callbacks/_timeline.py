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
    """Writes a trace of epochs, batches, exchanges and validation, one file per rank.

    `Timeline("run/timeline.json")` writes run/timeline.rank0.json and so on. Open them with
    https://ui.perfetto.dev or chrome://tracing; several files opened together show one process per rank. A
    "batch" is Keras's computation; an "exchange" and any other event with other ranks has the milliseconds
    spent waiting. On a server, "serve" is the workers' epoch: it waits except for their exchanges. Each event
    takes about 100 bytes. The file is written about once a second and is valid JSON at any time, even after
    the training is killed.

    Args:
        path: the file; the rank is added to its name, and an old file is replaced.

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
        """Open the file, and observe the exchanges."""
        super().after_start(distribute)
        self._trace = Trace.of_rank(self.path, self.rank, self.role)
        self._batch_s: float | None = None
        self._ended = False
        if self.team is not None:
            self.team.observe(self._see)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the time."""
        self._epoch_s = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the time."""
        self._batch_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Add the batch, unless the exchange after it already has."""
        self._end_batch(time.perf_counter())

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the time."""
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
        """Write the remaining events; later ones are written one by one."""
        self._ended = True
        if self._trace is not None:
            self._trace.flush()

    def _see(self, what: str, begin_s: float, end_s: float, waited_s: float) -> None:
        """Add an exchange or another operation with other ranks."""
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
