"""Memory of this process on its host: its peak over a stretch of time, and what is free."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["ProcessMemory", "free_memory"]

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_HOST, _GROUPS = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


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
        return free_memory()[0] if _HOST.exists() else None


def free_memory() -> tuple[int, int]:
    """Return the bytes that are free on this host, for this process, and all that it may use.

    Example:
        >>> free, total = free_memory()
        >>> 0 <= free <= total
        True
    """
    free = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, KeyError, ValueError):
        free = _kilobytes(_HOST, "MemAvailable") * 1024
    for limit, used in _limits():
        if limit < total:
            free, total = min(free, max(limit - used, 0)), limit
    return free, total


def _limits() -> list[tuple[int, int]]:
    """Return the limits of memory of this process and its control groups, and what of them is used."""
    found: list[tuple[int, int]] = []
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)  # ulimit -v
    if addresses != resource.RLIM_INFINITY:
        with suppress(OSError, ValueError):
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            found.append((addresses, used))
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", 2)
            if number == "0":
                folder, cached = _GROUPS, "inactive_file"
                names = ("memory.max", "memory.current")
            elif "memory" in kinds.split(","):
                folder, cached = _GROUPS / "memory", "total_inactive_file"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            for base in (folder / path.lstrip("/"), folder):  # in a container only the latter is there
                with suppress(OSError, ValueError):  # "max": there is no limit
                    limit, used = (int((base / name).read_text()) for name in names)
                    stat = dict(line.split() for line in (base / "memory.stat").read_text().splitlines())
                    found.append((limit, used - int(stat.get(cached, 0))))  # what it counts of the page cache
    return found


def _kilobytes(path: Path, name: str) -> int:
    told = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(told[name].removesuffix("kB"))
