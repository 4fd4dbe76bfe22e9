"""Trains while the test stops a rank: each rank prints its process id, and ends when a file is there.

With a third argument the launcher cannot be asked to kill a rank.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from nnlo_common import SGD, Downpour, Participant

FILE, limit = Path(sys.argv[1]), float(sys.argv[2])
with Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1), stall_timeout_s=limit or None) as me:
    if sys.argv[3:]:
        os.environ.pop("PMIX_NAMESPACE")
    print(f"{me.rank} {os.getpid()}", flush=True)
    for step, _ in enumerate(me.batches(range(1_000_000))):
        time.sleep(0.01)
        me.step()
        if step == 20:
            print("ready", flush=True)
        if FILE.exists():
            me.stop()
            break
print(f"done {me.report().lost}", flush=True)
