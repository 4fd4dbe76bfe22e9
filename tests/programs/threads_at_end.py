"""Two ranks train; at the very end of Python each says which of nnlo's watches still run."""

import atexit
import threading


def say():
    print(sorted(one.name for one in threading.enumerate() if one.name == "nnlo-host-peers"), flush=True)


atexit.register(say)  # registered first, so it runs last

import numpy as np  # noqa: E402

from nnlo_common import SGD, Downpour, Participant  # noqa: E402

with Participant(Downpour(), [np.ones(3, "f4")], optimizer=SGD(0.1)) as me:
    print([one.name for one in threading.enumerate()].count("nnlo-host-peers"), flush=True)
    for _ in me.batches(range(3)):
        me.gradients[0][:] = me.point[0]
        me.step()
