"""Trains on one rank only, as a script does with `if rank == 0:`; the others leave or stay."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from nnlo_common import SGD, Downpour, Participant

case, trains, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
if case == "own mpi":
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
else:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
if rank == trains:
    if case in ("leave", "die"):  # once the others are gone
        for other in {0, 1, 2} - {rank}:
            told = folder / str(other)
            while not told.exists():
                time.sleep(0.01)
            while Path(f"/proc/{told.read_text()}").exists():
                time.sleep(0.01)
    with Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1)) as me:
        for _ in me.batches(range(4)):
            me.step()
    print("trained", flush=True)
elif case != "own mpi":
    fresh = folder / f"{rank}.part"
    fresh.write_text(str(os.getpid()))
    fresh.rename(folder / str(rank))
    if case == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    while case == "stay":
        time.sleep(0.1)
