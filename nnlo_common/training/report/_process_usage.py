"""Process usage: processor time and memory, as the standard library reports them."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Usage"]

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Usage:
    """What this process uses.

    Attributes:
        memory_mb: resident memory; where the system does not tell, the most there ever was.
        cpu_s: processor time since its start, of all its threads.

    Example:
        >>> Usage.now().memory_mb > 1
        True
    """

    memory_mb: float
    cpu_s: float

    @classmethod
    def now(cls) -> Usage:
        """Return it."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        if _STATM.exists():
            memory = int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        else:
            memory = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return cls(memory / 1e6, used.ru_utime + used.ru_stime)
