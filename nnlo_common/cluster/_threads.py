"""Thread limits: each rank computes with its share of the host's cores.

Every numerical library starts one thread per core of the machine. Four ranks on a host then run four times
too many, the commonest reason why a distributed run is slower than a plain one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from nnlo_common.base._errors import ConfigurationError

__all__ = ["THREAD_VARIABLES", "limit_threads", "threads_chosen", "threads_per_rank"]

# Each library reads its variable once, at load time.
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_LOG = logging.getLogger(__name__)


def limit_threads(local_size: int, cores: int, *, env: MutableMapping[str, str] | None = None) -> int:
    """Limit this rank to its share of the host's cores, unless the user has set a number of threads.

    Limits the libraries loaded so far, and through the variables those loaded later and child processes. Pass
    the returned number to frameworks with a setting of their own (torch, TensorFlow).

    Args:
        local_size: how many ranks share the host.
        cores: how many different cores these ranks may use together, `Place.host_cores`: the sum where the
            launcher has bound each rank to its own cores.
        env: the variables to read and to set; None means those of the process.

    Returns:
        The number of threads for this rank.

    Raises:
        ConfigurationError: an argument is below 1.
    """
    env = os.environ if env is None else env
    chosen = threads_chosen(env)
    if chosen is not None:
        _LOG.info("keeping %s=%d from the environment", *chosen)
        return chosen[1]
    threads = threads_per_rank(local_size, cores, _own_cores())
    import threadpoolctl

    env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    threadpoolctl.threadpool_limits(limits=threads)
    _LOG.info("%d ranks share %d cores of this host: %d threads each", local_size, cores, threads)
    return threads


def threads_chosen(env: MutableMapping[str, str]) -> tuple[str, int] | None:
    """Find the variable by which the user set a number of threads, and that number.

    A list such as `OMP_NUM_THREADS=4,2` is for nested regions; its first entry counts.
    """
    for name in THREAD_VARIABLES:
        first = env.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return name, int(first)
    return None


def threads_per_rank(local_size: int, cores: int, own_cores: int) -> int:
    """Divide the cores of a host; never return more than this rank may use.

    Example:
        >>> threads_per_rank(4, 32, 32), threads_per_rank(4, 32, 2), threads_per_rank(5, 2, 2)
        (8, 2, 1)
    """
    for name, value in (("local_size", local_size), ("cores", cores)):
        if value < 1:
            raise ConfigurationError(f"{name}={value!r}; it must be at least 1")
    return max(1, min(own_cores, cores // local_size))


def _own_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1
