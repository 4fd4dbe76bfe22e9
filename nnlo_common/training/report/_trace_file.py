"""Trace file for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from nnlo_common.base._file_access import new_file, reopened_file
from nnlo_common.base._whole_files import of_rank, usable
from nnlo_common.cluster._hosts import describe_here

__all__ = ["Trace"]

_END = b"\n]\n"
# Flush often, so that a training that dies loses no more than this.
_EVERY_S = 1.0
_MOST = 1000


class Trace:
    """A trace of one process, written as it grows: between any two writes the file is valid JSON.

    Times are those of `time.perf_counter`; in the file they are microseconds of the wall clock, so that the
    traces of several ranks line up.

    Args:
        path: the file; an old one is replaced.
        process: a number for this process, e.g. its rank.
        name: the name of the process in the viewer.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trace = Trace(Path(folder, "trace.json"), 0, "worker 0")
        ...     trace.add("batch", 1.0, 1.5)
        ...     trace.flush()
        ...     [event["name"] for event in json.loads(Path(folder, "trace.json").read_text())]
        ['process_name', 'batch']
    """

    def __init__(self, path: Path, process: int, name: str) -> None:
        self._process = process
        self._offset_s = time.time() - time.perf_counter()
        self._path = path
        with new_file(path) as file:
            self._ends_at = file.write(b"[")
        self._waiting: list[dict[str, Any]] = []
        self._next_s = 0.0
        self._add({"name": "process_name", "ph": "M", "args": {"name": name}})
        self.flush()

    @classmethod
    def of_rank(cls, path: str | Path, rank: int, role: str) -> Self:
        """Create the trace of a rank, for a `Timeline`.

        Args:
            path: the file; the rank is added to its name.
            rank: this rank's number.
            role: "alone", "server 0", "worker 0", ...

        Raises:
            ConfigurationError: the file cannot be written.
        """
        file = usable(f"Timeline({str(path)!r})", of_rank(path, rank))
        return cls(file, rank, f"{role} on {describe_here()['host']}")

    def add(self, name: str, begin_s: float, end_s: float, **facts: object) -> None:
        """Add an event from `begin_s` to `end_s`."""
        start = 1e6 * (begin_s + self._offset_s)
        event = {"name": name, "ph": "X", "ts": round(start, 1), "dur": round(1e6 * (end_s - begin_s), 1)}
        self._add({**event, "args": facts} if facts else event)
        if len(self._waiting) >= _MOST or time.perf_counter() >= self._next_s:
            self.flush()

    def flush(self) -> None:
        """Write all pending events."""
        if self._waiting:
            before = b"\n" if self._ends_at == 1 else b",\n"
            text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in self._waiting).encode()
            self._waiting.clear()
            # One write over the old end, so that a killed process has written all of it or nothing.
            with open(reopened_file(self._path), "r+b", buffering=0) as file:  # noqa: PTH123 - a descriptor
                file.seek(self._ends_at)
                file.write(before + text + _END)
            self._ends_at += len(before) + len(text)
        self._next_s = time.perf_counter() + _EVERY_S

    def _add(self, event: dict[str, Any]) -> None:
        self._waiting.append(event | {"pid": self._process, "tid": 0})
