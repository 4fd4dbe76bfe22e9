"""Monitor: a line of JSON for each epoch of each rank, with its work and its usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras

from nnlo_common.plugin import EpochLog
from nnlo_keras._callbacks._driver import Driver
from nnlo_keras._callbacks._rank_callback import RankCallback, numbers

__all__ = ["Monitor"]


class Monitor(RankCallback):
    """Appends a line of JSON for each epoch to one file per rank.

    `Monitor("run/monitor.jsonl")` writes run/monitor.rank0.jsonl and so on. A line holds: epoch, rank, role;
    time (seconds since 1970) and the seconds that the epoch took, validation included; its batches and
    batches per second (on a server the sum over all workers, as far as it knows); samples and samples per
    second (on a worker); memory_mb and cpu_s of the process (cpu_s within the epoch); exchanges and
    mean_staleness since the training's start (on a server); learning_rate; this rank's metrics. Numbers that
    are not finite are written as null.

    Args:
        path: the file; the rank is added to its name.

    Example:
        >>> import json, tempfile
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x = np.ones((40, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fitted = model.fit(x, x, callbacks=[Monitor(folder + "/monitor.jsonl")], verbose=0)
        ...     (line,) = Path(folder, "monitor.rank0.jsonl").read_text().splitlines()
        >>> [json.loads(line)[name] for name in ("role", "batches", "samples")]
        ['alone', 2, 40]
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = Path(path)

    def after_start(self, distribute: Driver | None) -> None:
        """Open the file, or refuse one that cannot be written."""
        super().after_start(distribute)
        self._log = EpochLog(self.path, self.rank, self.role)
        self._batches_before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Start measuring the epoch."""
        self._log.begin()
        self._batches = 0
        self._samples: int | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count the batches."""
        self._batches = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the samples now: the validation resets Keras's count."""
        self._samples = self.samples_in_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the line."""
        counts, served = {"batches": self._batches}, None
        if self.trains:
            counts["samples"] = self.samples_in_epoch if self._samples is None else self._samples
        elif self.distribute is not None:
            counts["batches"], served = self._batches_served(), self.distribute.report
        rate = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self._log.end(epoch, counts, rate, numbers(logs), served)

    def _batches_served(self) -> int:
        assert self.distribute is not None  # only servers call this
        total = self.distribute.report.samples  # Distribute reports batches as samples
        batches, self._batches_before = total - self._batches_before, total
        return batches
