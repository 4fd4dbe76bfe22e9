"""Trains with an heir while the test stops a rank; each rank prints its process id, and its role at the end.

Arguments: a file that ends the training, the limit in seconds, and, to let no rank be killed by another,
"unkillable".
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.cluster.transport._deaths import HostPeers

FILE, limit = Path(sys.argv[1]), float(sys.argv[2])
if sys.argv[3:]:
    HostPeers.kill = lambda self, rank: True
options = {"stall_timeout_s": limit, "heir": True}
with Participant(Downpour(), [np.ones(1000, "f4")], optimizer=SGD(0.01), **options) as me:
    print(f"{me.rank} {os.getpid()}", flush=True)
    for epoch in range(1_000_000):
        for number in me.batches(range(60)):
            time.sleep(0.01)
            me.gradients[0][:] = me.point[0] - number % 7
            me.step()
            if (epoch, number) == (0, 59):
                print("ready", flush=True)
        if FILE.exists():
            me.stop()
        if me.stopped:
            break
print(f"done {me.rank}, {me.role}: {me.report().lost}", flush=True)
