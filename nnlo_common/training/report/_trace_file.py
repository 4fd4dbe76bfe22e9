"""Trace file of a rank, for https://ui.perfetto.dev; `nnlo trace` merges those of a run."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from nnlo_common.base._file_access import new_file, of_rank, reopened_file, usable
from nnlo_common.base._spans import Finished

__all__ = ["OLDER", "Trace", "trace_path"]

_Item = TypeVar("_Item")

_LOG = logging.getLogger(__name__)
_READINGS = 20
_END = b"\n]\n"
#: Is in the name of the earlier half of a trace that has reached its limit.
OLDER = "older"


def trace_path(folder: str | Path, rank: int) -> Path:
    """Return the file of a rank's trace in the folder of a run."""
    return of_rank(folder, "timeline.json", rank)


class Trace:
    """A trace of one process, written as it grows: between any two writes the file is valid JSON.

    Times are those of `time.perf_counter`; in the file they are whole microseconds of the first rank's clock.
    Rounded down, they keep their order, so that what lies within a span still does.

    When the file has half of `limit_mb`, it becomes the older half in place of the one before, and a new one
    begins: a long training keeps its latest events. Where it cannot be written, as on a full disk, it ends.

    Args:
        path: the file; an old one is replaced.
        process: a number for this process: its rank.
        name: the name of the process in the viewer.
        ahead_s: how far this host's clock is ahead of the first rank's.
        limit_mb: the most that both files take.
        asked: the option that named the file, for the error message.

    Raises:
        ConfigurationError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trace = Trace(Path(folder, "timeline.rank0.json"), 0, "worker 0")
        ...     trace.add(Finished("main", "read", "reads ahead", 1.0, 1.5, {}))
        ...     trace.flush()
        ...     events = json.loads(Path(folder, "timeline.rank0.json").read_text())
        >>> [(event["name"], event["ph"]) for event in events]
        [('process_name', 'M'), ('thread_name', 'M'), ('reads ahead', 'X')]
    """

    def __init__(
        self,
        path: Path,
        process: int,
        name: str,
        *,
        ahead_s: float = 0.0,
        limit_mb: float = 100.0,
        asked: str = "timeline",
    ) -> None:
        self._path, self._process, self._name = usable(asked, path), process, name
        self._offset_us = 1e6 * (_wall_over_counter() - ahead_s)
        self._half_bytes = int(limit_mb * 1e6 / 2)
        self._spans: deque[Finished] = deque()
        self._counters: deque[tuple[str, float, float]] = deque()
        self._writing, self._broken = threading.Lock(), False
        self._older.unlink(missing_ok=True)
        self._attempt(self._begin)

    def add(self, span: Finished) -> None:
        """Add a span; it is written by the next `flush`."""
        self._spans.append(span)

    def count(self, name: str, value: float) -> None:
        """Add the value that a counter has now."""
        self._counters.append((name, time.perf_counter(), value))

    def flush(self) -> None:
        """Write all pending events; any thread may call it."""
        with self._writing:
            events = [event for one in _taken(self._spans) for event in self._events(one)]
            events += [
                {"name": name, "ph": "C", "ts": self._micros(at_s), "tid": 0, "args": {"value": value}}
                for name, at_s, value in _taken(self._counters)
            ]
            if not self._broken:
                self._attempt(lambda: self._append(events))

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (OSError, MemoryError) as error:
            self._broken = True
            _LOG.warning(
                "%s cannot be written (%s): it ends here, and the training goes on", self._path, error
            )

    def _append(self, events: list[dict[str, Any]]) -> None:
        self._write(events)
        if self._ends_at > self._half_bytes:
            self._path.replace(self._older)
            self._begin()

    @property
    def _older(self) -> Path:
        return self._path.with_name(f"{self._path.stem}.{OLDER}{self._path.suffix}")

    def _begin(self) -> None:
        """Begin a file with the names of this process and of its threads."""
        with new_file(self._path) as file:
            self._ends_at = file.write(b"[")
        self._tracks: dict[str, int] = {}
        self._write([{"name": "process_name", "ph": "M", "tid": 0, "args": {"name": self._name}}])

    def _events(self, span: Finished) -> list[dict[str, Any]]:
        """Return the events of a span: itself, and the end of an arrow of a message."""
        found: list[dict[str, Any]] = []
        if span.track not in self._tracks:
            number = self._tracks[span.track] = len(self._tracks)
            found.append({"name": "thread_name", "ph": "M", "tid": number, "args": {"name": span.track}})
        begin = self._micros(span.begin_s)
        place = {"ts": begin, "tid": self._tracks[span.track]}
        dur = self._micros(span.end_s) - begin
        found.append({"name": span.name, "cat": span.kind, "ph": "X", **place, "dur": dur})
        for what, phase in (("sends", {"ph": "s"}), ("takes", {"ph": "f", "bp": "e"})):
            if what in span.facts:
                peer, shard, message, sequence = span.facts[what]
                ends = (self._process, peer) if what == "sends" else (peer, self._process)
                number = _number(*ends, shard, message, sequence)
                found.append({"name": message, "cat": "message", "id": number, **phase, **place})
        return found

    def _micros(self, at_s: float) -> int:
        return int(1e6 * at_s + self._offset_us)

    def _write(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        before = b"\n" if self._ends_at == 1 else b",\n"
        text = ",\n".join(
            json.dumps(event | {"pid": self._process}, separators=(",", ":")) for event in events
        ).encode()
        # One write over the old end, so that a killed process has written all of it or nothing.
        with open(reopened_file(self._path), "r+b", buffering=0) as file:  # noqa: PTH123 - a descriptor
            file.seek(self._ends_at)
            data = before + text + _END
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._ends_at += len(before) + len(text)


def _wall_over_counter() -> float:
    """Return how far the wall clock is ahead of the counter: of several readings the quickest."""
    readings = []
    for _ in range(_READINGS):
        before_s, wall_s, after_s = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after_s - before_s, wall_s - (before_s + after_s) / 2))
    return min(readings)[1]


def _taken(pending: deque[_Item]) -> Iterator[_Item]:
    """Take all that is pending; the thread that trains may add more meanwhile."""
    for _ in range(len(pending)):
        yield pending.popleft()


def _number(*names: object) -> int:
    """Return the number of an arrow, the same at both ends, below 2 ** 53 as JavaScript needs it."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=6).digest())
