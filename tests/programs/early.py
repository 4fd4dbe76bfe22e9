"""One rank goes wrong before it has joined the others; they must not wait for ever."""

import os
import sys

import numpy as np

import nnlo_common
from nnlo_common.cluster._connecting import find_launch

what = sys.argv[1]
rank = find_launch(os.environ).rank
if what == "raises" and rank == 1:
    raise ValueError("no data file on this node")
if what == "alike":
    raise KeyError(f"sample {7 * rank} is not in the file")
arrays = [np.ones(3, "f8" if what == "float64" and rank == 1 else "f4")]
optimizer = None if what == "no_optimizer" and rank == 2 else nnlo_common.SGD(0.1)
with nnlo_common.Participant(nnlo_common.Downpour(), arrays, optimizer=optimizer) as me:
    if what == "barrier":
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()  # the user's own, where all ranks are
    for _ in me.batches(range(4)):
        me.step()
    me.say("done")
