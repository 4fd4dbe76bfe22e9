"""Cores that this process may use, and the number of threads that the user has set."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nnlo_common.base._arguments import whole_in

__all__ = ["THREAD_VARIABLES", "threads_chosen", "usable_cores", "usable_threads"]

# Each library reads its variable once, at load time.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def threads_chosen(env: Mapping[str, str]) -> tuple[str, int] | None:
    """Find the variable by which the user set a number of threads, and that number.

    A list such as `OMP_NUM_THREADS=4,2` is for nested regions; its first entry counts.
    """
    for name in THREAD_VARIABLES:
        first = whole_in(env.get(name, "").split(",")[0].strip())
        if first:
            return name, first
    return None


def usable_cores() -> int:
    """Return how many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def usable_threads(env: Mapping[str, str] | None = None) -> int:
    """Return how many threads of this process may compute: as is set in the environment, else its cores.

    Example:
        >>> usable_threads({"OMP_NUM_THREADS": "1"})
        1
    """
    chosen = threads_chosen(os.environ if env is None else env)
    return min(usable_cores(), chosen[1]) if chosen else usable_cores()
