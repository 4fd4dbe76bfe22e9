"""Fails on rank 1 when no file can be opened any more."""

import resource

import numpy as np

from nnlo_common import SGD, Downpour, Participant

with Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1)) as me:
    for step, _ in enumerate(me.batches(range(100))):
        if me.rank == 1 and step == 5:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            raise ValueError("no such sample")
        me.step()
