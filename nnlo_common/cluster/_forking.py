"""Warning about forks of a rank, such as a data loader's: the copy shares memory and locks with MPI."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = ["advise_on_fork", "why_forking_is_unsafe"]

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
