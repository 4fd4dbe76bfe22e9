"""Moments at which a rank waits to be killed: within a write of a checkpoint, or while it leaves."""

from __future__ import annotations

import atexit
import faulthandler
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

from nnlo_common.training._session import Session
from nnlo_common.training.checkpoint import _store

__all__ = ["LEAVING", "WRITING", "plan", "prepare", "reached", "within_a_write", "write_where_it_hangs"]

#: In the middle of a file: of a rank's own part of a checkpoint, or of the manifest.
WRITING = ("part", "manifest")
#: Between the last checkpoint and the last messages; at the beginning of MPI_Finalize.
LEAVING = ("close", "finalize")
# Jobs last for a tenth of it, and are given up a little later.
_HANGS_AFTER_S = 100.0


def plan(folder: Path, moment: str, victim: int, turn: int) -> None:
    """Let a rank of the next job wait at a moment.

    Args:
        folder: where the ranks note what they do.
        moment: one of `WRITING` and `LEAVING`; empty: none.
        victim: the rank.
        turn: at which of its writes.
    """
    (folder / "reached").unlink(missing_ok=True)
    (folder / "plan").unlink(missing_ok=True)
    if moment:
        (folder / "plan").write_text(f"{moment} {victim} {turn}")


def reached(folder: Path) -> bool:
    """Return whether the rank waits at its moment."""
    return (folder / "reached").exists()


def prepare(folder: Path, rank: int) -> None:
    """In a rank: wait at the moment that is planned; call it before the training begins."""
    path = folder / "plan"
    moment, victim, turn = path.read_text().split() if path.exists() else ("", "-1", "0")
    if int(victim) != rank:
        return

    def wait() -> None:
        fresh = folder / "reached.fresh"
        fresh.write_text(str(os.getpid()))
        fresh.rename(folder / "reached")
        while True:
            time.sleep(60)

    if moment in WRITING:
        within_a_write(moment, int(turn), wait)
    elif moment == "close":
        _within_close(wait)
    else:
        atexit.register(_finalize, wait)  # registered first, so it runs last


def write_where_it_hangs(folder: Path, rank: int) -> None:
    """Write the stacks of this rank to `stack{rank}` if its job lasts far too long."""
    faulthandler.dump_traceback_later(_HANGS_AFTER_S, file=(folder / f"stack{rank}").open("w"))


def within_a_write(moment: str, turn: int, wait: Callable[[], None]) -> None:
    """Call a function in the middle of a write of this rank.

    Args:
        moment: one of `WRITING`.
        turn: in which of its writes.
        wait: the function.
    """
    write, writes = _store._write, itertools.count(1)

    def write_half(folder: Path, name: str, data: bytes) -> None:
        if name.startswith("rank") == (moment == "part") and next(writes) == turn:
            write(folder, name, data[: len(data) // 2])
            wait()
        write(folder, name, data)

    _store._write = write_half


def _within_close(wait: Callable[[], None]) -> None:
    close = Session.close

    def close_and_wait(self: Session) -> None:
        self.last_round = wait  # type: ignore[method-assign] - it follows the last checkpoint
        close(self)

    Session.close = close_and_wait  # type: ignore[method-assign]


def _finalize(wait: Callable[[], None]) -> None:
    """End MPI; its first act is to delete the attributes of this communicator."""
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: wait())
    MPI.COMM_SELF.Set_attr(key, True)
    MPI.Finalize()
