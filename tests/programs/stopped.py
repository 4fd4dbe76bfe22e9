"""Trains while the test stops a rank: each rank prints its process id, and ends when a file is there.

With the argument "without PMIx" the launcher cannot be asked to kill a rank. With "spared" the last rank is
a spare.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from nnlo_common import SGD, Downpour, Participant

FILE, limit = Path(sys.argv[1]), float(sys.argv[2])
ranks = {"stall_timeout_s": limit or None, "spares": int("spared" in sys.argv)}
with Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1), **ranks) as me:
    if "without PMIx" in sys.argv:
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
