"""Long packed vectors between one worker and its servers over real MPI, beside the virtual cluster's bits.

Arguments: the wire, and the number of servers.
"""

import sys

import numpy as np

from nnlo_common import EASGD, SGD, Downpour, Participant
from nnlo_common.cluster.transport import _mpi
from nnlo_common.testing import train_virtually

wire, servers = sys.argv[1], int(sys.argv[2])
STEPS, SIZES = [3, 2], (900_000, 700_001)
arrays = [np.linspace(0, 1, size, dtype=np.float32) for size in SIZES]
sent = []
original = _mpi.MPIEndpoint._send_made
_mpi.MPIEndpoint._send_made = lambda *args: sent.append(1) or original(*args)
replied = []
original_reply = _mpi.MPIEndpoint._start_parts
_mpi.MPIEndpoint._start_parts = lambda *args: replied.append(1) or original_reply(*args)


def slope(x):
    return x * np.float32(0.3) - np.linspace(-1, 1, x.size, dtype=np.float32)


def slopes(x, rank):
    parts = np.split(x, [SIZES[0]])
    return np.concatenate([slope(part.astype(np.float32)) for part in parts])


for algorithm, center, local in (
    (Downpour(wire=wire), SGD(0.1, momentum=0.5), None),
    (EASGD(every=1, wire=wire), None, SGD(0.1)),
    (Downpour(n_push=1, n_fetch=2, wire=wire), SGD(0.1), None),
):
    sent.clear()
    replied.clear()
    with Participant(
        algorithm, [one.copy() for one in arrays], optimizer=center or local, servers=servers
    ) as me:
        for epoch in STEPS:
            for _ in me.batches(range(epoch)):
                for gradient, point in zip(me.gradients, me.point, strict=True):
                    gradient[:] = slope(point)
                me.step()
    virtual = train_virtually(
        algorithm, slopes, arrays, workers=1, servers=servers, steps=[STEPS], optimizer=center, local=local
    )
    bits = virtual.parameters[0] if me.role.startswith("worker") else virtual.center
    mine = np.concatenate([*me.parameters])
    ends = np.cumsum([0, *SIZES])
    place = slice(*ends[me.rank : me.rank + 2]) if me.rank < servers == 2 else slice(None)  # a server's shard
    np.testing.assert_array_equal(mine[place], bits[place])
    fetches = sum(STEPS) if getattr(algorithm, "n_fetch", 1) == 1 else 3
    if me.role.startswith("worker"):
        assert (len(sent), len(replied)) == (sum(STEPS) * servers, 0), (sent, replied)
    else:
        assert (len(sent), len(replied)) == (0, fetches), (sent, replied)
    print(f"{me.role}: {algorithm.describe()}", flush=True)
