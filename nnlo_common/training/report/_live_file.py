"""Live file: what a rank does now, in a small file of the run's folder, for `nnlo top`."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nnlo_common.base._file_access import new_file
from nnlo_common.base._whole_files import of_rank, usable
from nnlo_common.training._rank_parts import TrainingReport
from nnlo_common.training.report._course import Moment

__all__ = ["LIVE", "LiveFile"]

LIVE = "live.json"
_LOG = logging.getLogger(__name__)
_MOST_LOST = 20
_FEWEST_S = 0.5  # a shorter time says little about a share of it


class LiveFile:
    """Replaces this rank's file at an interval; a training neither waits for it nor ends because it cannot.

    The rank notes where it is, and a thread writes: so a rank that waits for others still shows a sign of
    life, and a slow disk holds up nobody.

    Args:
        folder: of the run.
        rank: this rank's number.
        role: "alone", "server 0", "worker 0", ...
        host: the machine.
        every_s: the interval.
        clock: returns the time, for intervals.
        wall: returns the seconds since 1970.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     live = LiveFile(folder, 1, "worker 0", "a")
        ...     live.note(Moment(epoch=1), TrainingReport(samples=40), {"loss": 0.5})
        ...     live.write()
        ...     found = json.loads(Path(folder, "live.rank1.json").read_text())
        ...     live.end()
        >>> found["role"], found["samples"], found["scores"]
        ('worker 0', 40, {'loss': 0.5})
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        role: str,
        host: str,
        *,
        every_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = usable(f"run={str(folder)!r}", of_rank(Path(folder) / LIVE, rank))
        self._fixed = {"rank": rank, "role": role, "host": host, "process": os.getpid(), "every_s": every_s}
        self._every_s, self._clock, self._wall = every_s, clock, wall
        self._noted: dict[str, Any] = {"epoch": 1, "samples": 0, "scores": {}}
        self._first_loss: float | None = None
        self._moved_s, self._moved, self._longest_s = clock(), wall(), 0.0
        self._last_s, self._samples, self._cpu_s = clock(), 0, time.process_time()
        self._broken, self._over = False, threading.Event()
        # One file is written at a time, by the thread or by what ends it.
        self._writing = threading.Lock()
        atexit.register(self.end)

    def start(self) -> None:
        """Write at the interval from now on, in a thread."""
        threading.Thread(target=self._repeat, name="nnlo live file", daemon=True).start()

    def note(self, moment: Moment, report: TrainingReport, scores: Mapping[str, float]) -> None:
        """Keep where this rank is, for the next write.

        Args:
            moment: where the training is.
            report: this rank's counts.
            scores: its loss and other metrics of late, by name.
        """
        known = {name: value if math.isfinite(value) else None for name, value in scores.items()}
        if self._first_loss is None:
            self._first_loss = known.get("loss")
        place, before = (moment.epoch, report.samples, report.exchanges), self._noted
        if place != (before["epoch"], before["samples"], before.get("exchanges", 0)):
            now_s = self._clock()
            self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._moved_s, self._moved = now_s, self._wall()
        self._noted = {
            "epoch": moment.epoch,
            "epochs": moment.epochs,
            "share": moment.share,
            "samples": report.samples,
            "exchanges": report.exchanges,
            "staleness": moment.staleness,
            "left_s": moment.left_s,
            "scores": known,
            "first_loss": self._first_loss,
            "lost": list(report.lost[:_MOST_LOST]),
        }

    def write(self) -> None:
        """Write what was noted last, unless this rank has ended."""
        with self._writing:
            if not self._over.is_set():
                self._put({**self._paced(), "state": "training"})

    def end(self) -> None:
        """Write that this rank has ended."""
        atexit.unregister(self.end)
        with self._writing:
            if not self._over.is_set():
                self._over.set()
                self._put({**self._noted, "state": "ended"})

    def _paced(self) -> dict[str, Any]:
        noted, now_s, cpu_s = self._noted, self._clock(), time.process_time()
        seconds = now_s - self._last_s
        pace: dict[str, float] = {}
        if seconds > _FEWEST_S:
            pace["samples_per_second"] = round((noted["samples"] - self._samples) / seconds, 3)
            pace["cpu_share"] = round((cpu_s - self._cpu_s) / seconds, 3)
            self._last_s, self._samples, self._cpu_s = now_s, noted["samples"], cpu_s
        return {**noted, **pace}

    def _repeat(self) -> None:
        while not self._broken and not self._over.wait(self._every_s):
            self.write()

    def _put(self, facts: Mapping[str, Any]) -> None:
        if self._broken:
            return
        times = {"time": self._wall(), "moved": self._moved, "longest_s": self._longest_s}
        fresh = self._path.with_suffix(".part")
        try:
            # Renamed, so that no reader sees half a file; not synchronised with the disk, which takes long.
            with new_file(fresh) as file:
                file.write(json.dumps({**self._fixed, **times, **facts}).encode())
            fresh.replace(self._path)
        except OSError as error:
            self._broken = True
            _LOG.warning("%s cannot be written (%s): `nnlo top` does not see this rank", self._path, error)
