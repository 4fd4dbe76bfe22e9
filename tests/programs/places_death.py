"""A worker is killed in the second epoch, and a spare takes its place.

Its arguments are the rank that dies and the number of servers; each has two spares.
"""

import os
import signal
import sys
import time

import numpy as np

from nnlo_common import SGD, Downpour, Participant

dies, servers = map(int, sys.argv[1:])
pieces, ranks = [np.ones(1000, "f4") for _ in range(servers)], {"servers": servers, "spares": 2 * servers}
with Participant(Downpour(), pieces, optimizer=SGD(0.01), **ranks) as me:
    had = []
    for epoch in range(6):
        had.append(0)
        for number in me.batches(range(12)):
            if (epoch, had[-1], me.rank) == (1, 3, dies):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # longer than a death takes to be heard of
            for gradient, point in zip(me.gradients, me.point, strict=True):
                gradient[:] = point - number % 7
            me.step()
            had[-1] += 1
print(f"rank {me.rank}, {me.role}: {had}, {len(me.report().lost)} lost", flush=True)
