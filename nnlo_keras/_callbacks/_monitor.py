"""What each rank does and uses, epoch by epoch."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from nnlo_common._files import of_rank, usable
from nnlo_common._usage import Usage
from nnlo_keras._callbacks._companion import Companion, numbers

if TYPE_CHECKING:
    from nnlo_keras._distribute import Distribute

__all__ = ["Monitor"]


class Monitor(Companion):
    """Appends a line of JSON for each epoch to a file of each rank's own.

    `Monitor("run/monitor.jsonl")` writes run/monitor.rank0.jsonl and so on. A line holds: epoch, rank, role;
    time (seconds since 1970) and the seconds that the epoch took, with validation; batches in it and batches
    per second (on a server those of all workers, as it knows them); samples and samples per second (on a
    worker); memory_mb and cpu_s of the process (cpu_s within the epoch); exchanges and mean_staleness since
    the training's start (on a server); learning_rate; metrics as this rank sees them. What is not a finite
    number is null.

    Args:
        path: the file; the rank is added to its name.

    Example:
        >>> import tempfile
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

    def after_start(self, distribute: Distribute | None) -> None:
        """See whether the file can be written."""
        super().after_start(distribute)
        self._file = usable(f"Monitor({str(self.path)!r})", of_rank(self.path, self.rank))
        self._batches_before = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Note when and with what the epoch begins."""
        self._began_s, self._before, self._batches = time.perf_counter(), Usage.now(), 0
        self._samples: int | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count."""
        self._batches = batch + 1

    def on_test_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Count samples now: the validation begins to count anew."""
        self._samples = self.samples_in_epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Write the line."""
        seconds, now = time.perf_counter() - self._began_s, Usage.now()
        batches = self._batches if self.trains else self._batches_served()
        line: dict[str, Any] = {
            "epoch": epoch,
            "rank": self.rank,
            "role": self.role,
            "time": round(time.time(), 3),
            "seconds": round(seconds, 6),
            "batches": batches,
            "batches_per_second": round(batches / seconds, 3),
            "memory_mb": round(now.memory_mb, 3),
            "cpu_s": round(now.cpu_s - self._before.cpu_s, 3),
            "learning_rate": float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)),
        }
        if self.trains:
            samples = self.samples_in_epoch if self._samples is None else self._samples
            line |= {"samples": samples, "samples_per_second": round(samples / seconds, 3)}
        elif self.distribute is not None:
            report = self.distribute.report
            line |= {"exchanges": report.exchanges, "mean_staleness": report.mean_staleness}
        line["metrics"] = {
            name: value if math.isfinite(value) else None for name, value in numbers(logs).items()
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _batches_served(self) -> int:
        assert self.distribute is not None  # a server has one
        total = self.distribute.report.samples  # which Distribute counts in batches
        batches, self._batches_before = total - self._batches_before, total
        return batches
