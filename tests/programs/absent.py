"""Trains on one rank only, as a script does with `if rank == 0:`; the others leave or stay."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from nnlo_common import SGD, Downpour, Participant

case, trains, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if case == "own mpi":
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
else:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))


def tell(name: str) -> None:
    """Write the number of this process into a file."""
    fresh = folder / f"{name}.part"
    fresh.write_text(str(os.getpid()))
    fresh.rename(folder / name)


def told(name: str) -> str:
    """Return the number of another process, once it has told that."""
    while not (folder / name).exists():
        time.sleep(0.01)
    return (folder / name).read_text()


def is_watched(pid: str) -> bool:
    """Whether a process has been waiting for MPI's start for a second."""
    for one in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (one / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == pid and b"_start_watch" in (one / "cmdline").read_bytes():
                time.sleep(1)
                return True
    return False


if rank == trains:
    if case in ("leave", "die"):  # once the others are gone
        for other in {0, 1, 2} - {rank}:
            gone = Path(f"/proc/{told(str(other))}")
            while gone.exists():
                time.sleep(0.01)
    tell("trains")
    with Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1)) as me:
        for _ in me.batches(range(4)):
            me.step()
    print("trained", flush=True)
elif case != "own mpi":
    tell(str(rank))
    while case.endswith("later") and not is_watched(told("trains")):
        time.sleep(0.05)
    if case.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    while case == "stay":
        time.sleep(0.1)
