"""Thread limits: each rank computes with its share of the host's cores.

Every numerical library starts one thread per core of the machine. Four ranks on a host then run four times
too many, the commonest reason why a distributed run is slower than a plain one.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, MutableMapping, Sequence
from pathlib import Path

from nnlo_common.base._cores import THREAD_VARIABLES, threads_chosen, usable_cores, usable_threads
from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster._hosts import Place

__all__ = [
    "BorrowedThreads",
    "advise_on_fork",
    "limit_threads",
    "threads_per_rank",
    "why_forking_is_unsafe",
]

# -- warning about forks of a rank, such as a data loader's: the copy shares memory and locks with MPI --

# Network cards with direct access to a process's memory (RDMA).
_CARDS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
_installed = False
_at_work: list[Callable[[], bool]] = []  # of the latest training


def why_forking_is_unsafe(*, threads: bool, cuda: bool, cards: tuple[Path, ...] = _CARDS) -> str | None:
    """Return why a forked copy of this process may fail; None if no reason is known.

    Args:
        threads: whether threads of nnlo run here; a lock that one holds stays locked in the copy.
        cuda: whether CUDA is initialised here; the copy cannot use it.
        cards: the directories that list such network cards.
    """
    if any(place.is_dir() and any(place.iterdir()) for place in cards):
        return "the network card of this host uses memory that the copy would share"
    if cuda:
        return "CUDA is initialised, and the copy cannot use it"
    return (
        "a thread that moves messages is running, and the copy would inherit its locks" if threads else None
    )


def advise_on_fork(threads: Callable[[], bool]) -> None:
    """Warn once, from now on, when this process is forked and the fork may be unsafe.

    Args:
        threads: whether threads of nnlo run; kept for good, so it must hold no reference to a training.
    """
    global _installed
    _at_work[:] = [threads]
    if _installed:
        return
    _installed, said = True, False
    pid = os.getpid()

    def advise() -> None:
        nonlocal said
        torch = sys.modules.get("torch")
        cuda = torch is not None and torch.cuda.is_initialized()
        reason = why_forking_is_unsafe(threads=_at_work[0](), cuda=cuda)
        if not said and reason is not None and os.getpid() == pid:
            said = True
            warnings.warn(
                f"this rank of an MPI job is being forked (a DataLoader with num_workers > 0?): {reason}. "
                "Pass multiprocessing_context='forkserver' to the DataLoader",
                RuntimeWarning,
                stacklevel=2,
            )

    os.register_at_fork(before=advise)


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
    threads = threads_per_rank(local_size, cores, usable_cores())
    import threadpoolctl

    env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    threadpoolctl.threadpool_limits(limits=threads)
    _LOG.info("%d ranks share %d cores of this host: %d threads each", local_size, cores, threads)
    return threads


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


class BorrowedThreads:
    """The threads that a server has while workers of its host wait for it: their cores have nothing to do.

    Args:
        rank: the server.
        places: of all ranks.
        servers: all ranks that serve as well; those of one host share what they borrow.
        groups: the ranks of each worker, leads first; they wait together.

    Example:
        >>> from nnlo_common.cluster._hosts import locate
        >>> places = locate([{"host": "a", "cores": 8, "gpus": 0}] * 3)
        >>> threads = BorrowedThreads(0, places, servers=[0], groups=[(1,), (2,)])
        >>> threads(waiting=[1], own=1), threads(waiting=[1, 2], own=2), threads(waiting=[2], own=4)
        (2, 6, 4)
    """

    def __init__(
        self, rank: int, places: Sequence[Place], servers: Collection[int], groups: Sequence[Sequence[int]]
    ) -> None:
        here = [place.rank for place in places if place.host == places[rank].host]
        self._ranks = {lead: sum(one in here for one in (lead, *rest)) for lead, *rest in groups}
        self._servers = sum(one in here for one in servers)
        self._cores, self._busy = places[rank].host_cores, len(here) - 1
        self._most = places[rank].cores

    def __call__(self, waiting: Collection[int], own: int | None = None) -> int:
        """Return how many threads may compute.

        Args:
            waiting: the leads of the workers that wait.
            own: the threads of each rank; None: as many as this process has.
        """
        own = usable_threads() if own is None else own
        idle = sum(self._ranks.get(lead, 0) for lead in waiting)
        free = self._cores - own * (self._busy - idle)
        return max(own, min(own * (1 + idle // self._servers), free, self._most))
