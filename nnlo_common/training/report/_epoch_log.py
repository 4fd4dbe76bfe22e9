"""Epoch log: a line of JSON for each epoch of a rank, with its counts, resources and metrics."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnlo_common.base._file_access import append_file
from nnlo_common.base._whole_files import of_rank, usable
from nnlo_common.training._rank_parts import TrainingReport

__all__ = ["EpochLog", "Usage"]

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of this process.

    Attributes:
        memory_mb: resident memory; its peak if the system does not report the current value.
        cpu_s: processor time of all threads since the process started.

    Example:
        >>> Usage.now().memory_mb > 1
        True
    """

    memory_mb: float
    cpu_s: float

    @classmethod
    def now(cls) -> Usage:
        """Return the current usage."""
        if _STATM.exists():
            memory = int(_STATM.read_text().split()[1]) * resource.getpagesize()
        else:
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            memory = most * (1 if sys.platform == "darwin" else 1024)
        return cls(memory / 1e6, time.process_time())


class EpochLog:
    """Appends to this rank's own file; call `begin` at the start of each epoch.

    Args:
        path: the file; the rank is added to its name.
        rank: this rank's number.
        role: "alone", "server 0", "worker 0", ...

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     log = EpochLog(Path(folder, "monitor.jsonl"), 1, "worker 0")
        ...     log.end(0, {"samples": 40}, 0.1, {"loss": float("nan")})
        ...     line = json.loads(Path(folder, "monitor.rank1.jsonl").read_text())
        >>> line["role"], line["samples"], line["metrics"]
        ('worker 0', 40, {'loss': None})
    """

    def __init__(self, path: str | Path, rank: int, role: str) -> None:
        self._file = usable(f"Monitor({str(path)!r})", of_rank(path, rank))
        self._rank, self._role = rank, role
        self.begin()

    def begin(self) -> None:
        """Record the time and usage at the start of an epoch."""
        self._began_s, self._before = time.perf_counter(), Usage.now()

    def end(
        self,
        epoch: int,
        counts: Mapping[str, int],
        learning_rate: float,
        metrics: Mapping[str, float],
        served: TrainingReport | None = None,
    ) -> None:
        """Write the line of an epoch.

        Args:
            epoch: its number, from 0.
            counts: the epoch's counts by name, e.g. samples; a rate is added for each.
            learning_rate: of the optimizer.
            metrics: this rank's metrics; values that are not finite are written as null.
            served: on a server, its report since the start of the training.
        """
        seconds, now = time.perf_counter() - self._began_s, Usage.now()
        line: dict[str, Any] = {
            "epoch": epoch,
            "rank": self._rank,
            "role": self._role,
            "time": round(time.time(), 3),
            "seconds": round(seconds, 6),
        }
        for name, count in counts.items():
            line |= {name: count, f"{name}_per_second": round(count / seconds, 3)}
        line |= {
            "memory_mb": round(now.memory_mb, 3),
            "cpu_s": round(now.cpu_s - self._before.cpu_s, 3),
            "learning_rate": learning_rate,
        }
        if served is not None:
            line |= {"exchanges": served.exchanges, "mean_staleness": served.mean_staleness}
        line["metrics"] = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        with append_file(self._file) as file:
            file.write(f"{json.dumps(line)}\n".encode())
