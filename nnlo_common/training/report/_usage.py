"""Usage of this process: memory, processor time, bytes read and written, and its GPUs."""

from __future__ import annotations

import importlib
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Usage", "gpus_here"]

_STATUS, _IO, _TASKS = Path("/proc/self/status"), Path("/proc/self/io"), Path("/proc/self/task")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resource usage of this process.

    Attributes:
        memory_mb: resident memory; its peak if the system does not report the current value.
        peak_memory_mb: the most that it ever was, as the system has noted it: also between two looks.
        cpu_s: processor time of all threads since the process started.
        read_mb: what it has read by system calls, from files and sockets; None: unknown.
        written_mb: the same for writing.
        core_wait_s: for how long its threads could have run and had no core; None: unknown.
        shared_mb: the part of the resident memory that it shares with other processes.

    Example:
        >>> Usage.now().memory_mb > 1
        True
    """

    memory_mb: float
    peak_memory_mb: float
    cpu_s: float
    read_mb: float | None = None
    written_mb: float | None = None
    core_wait_s: float | None = None
    shared_mb: float = 0.0

    @classmethod
    def now(cls) -> Usage:
        """Return the current usage."""
        now, peak, shared = _memory_mb()
        return cls(now, peak, time.process_time(), *_transferred(), _core_wait_s(), shared_mb=shared)

    def core_wait_since(self, before: Usage) -> float | None:
        """Return how long threads have waited for a core since then; those that have ended are left out.

        Args:
            before: the usage then.
        """
        if self.core_wait_s is None or before.core_wait_s is None:
            return None
        return round(max(0.0, self.core_wait_s - before.core_wait_s), 3)


def _memory_mb() -> tuple[float, float, float]:
    try:
        told = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines())
        names = ("VmRSS", "VmHWM", "RssShmem")
        now, peak, shared = (int(told[name].removesuffix("kB")) * 1024 / 1e6 for name in names)
    except (OSError, KeyError, ValueError, MemoryError):  # no Linux, or no descriptor is left
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        now = peak = most * (1 if sys.platform == "darwin" else 1024) / 1e6
        shared = 0.0
    return now, peak, shared


def _transferred() -> tuple[float | None, float | None]:
    try:
        told = dict(line.split(": ") for line in _IO.read_text().splitlines())
        return int(told["rchar"]) / 1e6, int(told["wchar"]) / 1e6
    except (OSError, KeyError, ValueError, MemoryError):  # no Linux, or not allowed
        return None, None


def _core_wait_s() -> float | None:
    found = None
    with suppress(OSError, MemoryError):  # no descriptor is left
        for path in _TASKS.glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
                found = (found or 0.0) + int(path.read_text().split()[1]) / 1e9
    return found


def gpus_here() -> Callable[[], list[dict[str, float]]]:
    """Return a function that reads the load of this host's GPUs; it returns nothing without nvidia-ml-py."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # not installed, or no driver: a training goes on without
        return list

    def read() -> list[dict[str, float]]:
        found = []
        for index, handle in enumerate(handles):
            try:
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6
            except nvml.NVMLError:  # e.g. not supported by this GPU
                continue
            found.append({"index": index, "busy": busy, "memory_mb": round(memory, 1)})
        return found

    return read
