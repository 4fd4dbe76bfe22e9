"""A worker is killed in the second epoch, and a spare takes its place; its argument is the rank that dies."""

import os
import signal
import sys
import time

import numpy as np

from nnlo_common import SGD, Downpour, Participant

dies = int(sys.argv[1])
with Participant(Downpour(), [np.ones(1000, "f4")], optimizer=SGD(0.01), spares=2) as me:
    had = []
    for epoch in range(6):
        had.append(0)
        for number in me.batches(range(12)):
            if (epoch, had[-1], me.rank) == (1, 3, dies):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.05)  # longer than a death takes to be heard of
            me.gradients[0][:] = me.point[0] - number % 7
            me.step()
            had[-1] += 1
print(f"rank {me.rank}, {me.role}: {had}, {len(me.report().lost)} lost", flush=True)
