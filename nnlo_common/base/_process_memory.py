"""Memory of this process on its host: its peak over a stretch of time, and what is left."""

from __future__ import annotations

import resource
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["ProcessMemory"]

_STATUS, _RESET, _HOST = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class ProcessMemory:
    """The most resident memory since the last `begin`, where Linux can forget the peak before.

    Attributes:
        exact: whether it can; else the peak is that of the whole process so far.

    Example:
        >>> peak = ProcessMemory()
        >>> peak.begin()
        >>> peak.bytes > 1_000_000
        True
    """

    def __init__(self) -> None:
        self.exact = False

    def begin(self) -> None:
        """Forget the peak before."""
        try:
            _RESET.write_text("5")
            self.exact = True
        except OSError:  # no Linux, or not allowed
            self.exact = False

    @property
    def bytes(self) -> int:
        """The peak since then."""
        try:
            return _kilobytes(_STATUS, "VmHWM") * 1024
        except (OSError, KeyError, ValueError):
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return most * (1 if sys.platform == "darwin" else 1024)

    @property
    def now(self) -> int:
        """The resident memory at this moment."""
        try:
            return _kilobytes(_STATUS, "VmRSS") * 1024
        except (OSError, KeyError, ValueError):
            return self.bytes

    @property
    def left(self) -> int | None:
        """How many bytes the processes of this job may still take on this host; None: unknown."""
        return _left()


def _left() -> int | None:
    left = []
    with suppress(OSError, KeyError, ValueError):
        left.append(_kilobytes(_HOST, "MemAvailable") * 1024)
    for most, used in _LIMITS:
        try:
            left.append(int(most.read_text()) - int(used.read_text()))
        except (OSError, ValueError):  # no limit: "max"
            continue
    return max(min(left), 0) if left else None


def _kilobytes(path: Path, name: str) -> int:
    told = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(told[name].removesuffix("kB"))
