"""Files that a script writes by `torch.save` on a worker: a warning, as other ranks write the same file."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from nnlo_common.plugin import names_rank, path_of, warn
from nnlo_torch._compat import watch_saves
from nnlo_torch._joint import JointTraining

__all__ = ["warn_of_saves"]

#: Packages that choose the rank that saves.
_CHOOSING = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "nnlo_common",
    "nnlo_torch",
    "pytorch_lightning",
    "torch",
    "transformers",
}


def warn_of_saves(joint: JointTraining, *, own_process: bool) -> Callable[[], None]:
    """Warn once if the script saves a file by `torch.save` on the first worker while the training is open.

    Args:
        joint: the training; it has joined.
        own_process: whether this rank is a process, and not a thread beside other ranks.

    Returns:
        A function that ends this.
    """
    team = joint.team
    if team is None or team.share[0] != 0:
        return lambda: None
    # A thread's number may be used again, and neither reference must keep its object.
    training, thread = weakref.ref(joint), None if own_process else weakref.ref(threading.current_thread())
    rank, said = team.rank, threading.Event()

    def look(file: Any, module: str) -> None:
        of_others = thread is not None and thread() is not threading.current_thread()
        if said.is_set() or of_others or module.partition(".")[0] in _CHOOSING:
            return
        open_still, path = training(), path_of(file)
        if open_still is None or open_still.over or path is None or names_rank(path, rank):
            return
        said.set()
        warn(
            f"rank {rank} writes {path} by torch.save, but it is a worker: it saves its own weights, not the "
            "centre, and all other ranks that run this line write the same file; write "
            'optimizer.save(model.state_dict(), "model.pt"), which saves the centre once'
        )

    forget = watch_saves(look)
    weakref.finalize(joint, forget)  # a training that has failed is never closed
    return forget
