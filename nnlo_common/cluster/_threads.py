"""Thread limits: as many compute threads for a rank as its share of the host's cores.

Every numerical library starts as many threads as the machine has cores. With four ranks on a host that is
four times too many, and the commonest reason why a distributed run is slower than a plain one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

from nnlo_common.base._errors import ConfigurationError

__all__ = ["THREAD_VARIABLES", "limit_threads", "threads_chosen", "threads_per_rank"]

# Each is read once, when its library is loaded.
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
    """Give this rank its fair share of the host's cores, unless the user has chosen already.

    Limits the libraries loaded by now, and by variables those loaded later and child processes. A framework
    that keeps a number of its own (torch, TensorFlow) is to be given the returned one.

    Args:
        local_size: how many ranks share the host.
        cores: how many different cores these ranks may use together, `Place.host_cores`. Where the
            launcher has bound each rank to cores of its own this is their sum, so nothing is divided twice.
        env: the variables to read and to set; None means those of the process.

    Returns:
        The threads that this rank is to use.

    Raises:
        ConfigurationError: an argument is below 1.
    """
    env = os.environ if env is None else env
    chosen = threads_chosen(env)
    if chosen is not None:
        _LOG.info("%s=%d was set by the user and is left as it is", *chosen)
        return chosen[1]
    threads = threads_per_rank(local_size, cores, _own_cores())
    import threadpoolctl

    env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    threadpoolctl.threadpool_limits(limits=threads)
    _LOG.info("%d ranks share %d cores of this host: %d threads each", local_size, cores, threads)
    return threads


def threads_chosen(env: MutableMapping[str, str]) -> tuple[str, int] | None:
    """Find the variable by which the user has chosen a number of threads, and that number.

    A list such as `OMP_NUM_THREADS=4,2` is for nested regions; its first entry counts.
    """
    for name in THREAD_VARIABLES:
        first = env.get(name, "").split(",")[0].strip()
        if first.isdecimal() and int(first) > 0:
            return name, int(first)
    return None


def threads_per_rank(local_size: int, cores: int, own_cores: int) -> int:
    """Divide the cores of a host, but never beyond those that this rank may use.

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
