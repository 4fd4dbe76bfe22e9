"""Trainings of `group_cases.py` in groups; each rank saves its parameters, its samples and its steps."""

import sys
from pathlib import Path

import numpy as np

from nnlo_common.cluster.transport._mpi4py import MPI
from tests.helpers.group_cases import SIZES, train_grouped

folder, servers, group_size, *names = sys.argv[1:]
rank = MPI.COMM_WORLD.Get_rank()
for name in names:
    vector, seen, steps = train_grouped(name, SIZES, servers=int(servers), group_size=int(group_size))
    path = Path(folder) / f"{name}.rank{rank}.npz"
    np.savez(path, vector=vector, seen=np.array(seen, np.int64), steps=steps)
