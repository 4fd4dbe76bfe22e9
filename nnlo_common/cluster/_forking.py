"""Advice for who forks a rank: a data loader's processes are copies of a process that MPI is at work in."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

__all__ = ["advise_on_fork", "why_forking_is_unsafe"]

# Network cards that read and write the memory of a process by themselves.
_CARDS = (Path("/sys/class/infiniband"), Path("/sys/class/cxi"))
_installed = False
_at_work: list[Callable[[], bool]] = []  # asks the training that was begun last


def why_forking_is_unsafe(*, threads: bool, cuda: bool, cards: tuple[Path, ...] = _CARDS) -> str | None:
    """Return what may go wrong in a copy of this process; None if nothing is known to.

    Args:
        threads: threads of nnlo are at work here; a lock that one holds stays locked in the copy.
        cuda: CUDA is initialised here; it cannot be used in the copy.
        cards: where such devices would be listed.
    """
    if any(place.is_dir() and any(place.iterdir()) for place in cards):
        return "the network card of this host uses memory that the copy would share"
    if cuda:
        return "CUDA is initialised, and cannot be used in the copy"
    return (
        "a thread that moves messages is at work, and the copy would inherit its locks" if threads else None
    )


def advise_on_fork(threads: Callable[[], bool]) -> None:
    """Warn once, from now on, when this process is forked and that is not known to be safe.

    Args:
        threads: whether any of ours are at work; kept for good, so it should keep no training alive.
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
