"""Two groups of two ranks and a server train; one of the second group is killed in the second epoch."""

import os
import signal
import sys

import numpy as np

from nnlo_common import SGD, Downpour, Participant

dies = int(sys.argv[1])
with Participant(Downpour(), [np.ones(1000, "f4")], optimizer=SGD(0.01), group_size=2) as me:
    for epoch in range(3):
        for index, _ in enumerate(me.batches(range(24))):
            if me.rank == dies and epoch == 1 and index == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            me.gradients[0][:] = me.point[0]
            me.step()
print(f"{me.role}: {me.report().steps} steps, {len(me.report().lost)} lost", flush=True)
