"""Terminal: lines that may change, and a table of results."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

__all__ = ["Screen", "is_live", "table"]


class Screen:
    """Lines on a terminal; the last one may still change.

    Args:
        stream: the output; None: standard output.
        live: lines may change; otherwise only final lines are written.
    """

    def __init__(self, stream: TextIO | None = None, *, live: bool) -> None:
        self._stream, self._live, self._shown = stream, live, 0

    def show(self, line: str) -> None:
        """Write a line that the next one replaces."""
        if self._live:
            self._write(line, "")

    def settle(self, line: str) -> None:
        """Write a line that stays."""
        self._write(line, "\n")

    def _write(self, line: str, end: str) -> None:
        stream = sys.stdout if self._stream is None else self._stream
        padded = f"\r{line.ljust(self._shown)}" if self._shown else line
        self._shown = len(line) if not end else 0
        stream.write(padded + end)
        stream.flush()


def is_live(env: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> bool:
    """Return whether output goes to an interactive terminal, not to a batch job or test run.

    Open MPI gives its ranks a terminal even if the output goes to a file, so check other signs, too.
    """
    if "OMPI_COMM_WORLD_RANK" in env and not _launcher_shows():
        return False
    stream = sys.stdout if stream is None else stream
    batch = ("CI", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
    return stream.isatty() and env.get("TERM", "dumb") != "dumb" and not any(map(env.get, batch))


def _launcher_shows() -> bool:
    """Return whether the launcher, which forwards the output, writes to a terminal; True if unknown."""
    try:
        return str(Path(f"/proc/{os.getppid()}/fd/1").readlink()).startswith(("/dev/pts", "/dev/tty"))
    except OSError:  # another user's, or no Linux
        return True


def table(rows: Mapping[str, str]) -> str:
    """Return names and values in two columns.

    Example:
        >>> print(table({"time": "2.1 s", "samples": "16 000"}))
        time      2.1 s
        samples  16 000
    """
    names, values = max(map(len, rows), default=0), max(map(len, rows.values()), default=0)
    return "\n".join(f"{name.ljust(names)}  {value.rjust(values)}" for name, value in rows.items())
