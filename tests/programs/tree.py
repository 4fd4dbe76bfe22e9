"""An elastic tree over MPI; each rank saves its numbers and the commits on it."""

import os
import signal
import sys
from pathlib import Path

import numpy as np

from nnlo_common import SGD
from nnlo_common.algorithms import EASGD
from nnlo_common.training._joining import launched
from nnlo_common.training._participant import Participant
from tests.helpers.trees import HALF, START, TREE, commits_of

folder, dies, times = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
world = launched()
rule = EASGD(**{**TREE, "sub_servers": "host"} if "host" in sys.argv else TREE)
start = np.tile(START, times)


def die(count):
    """Die after so many steps, or commits on a server."""
    if world.rank == dies and count == 20:
        os.kill(os.getpid(), signal.SIGKILL)


with Participant(rule, [start], optimizer=SGD(0.5), world=world) as me:
    server = me._member.server
    commits = [] if server is None else commits_of(server)
    if server is not None:
        server.after_commit = lambda: die(server.rule.clock)
    world.gather_text("begun")  # all start from the same centre
    steps = 0
    for _ in range(2):
        for _ in me.batches(range(170)):
            me.gradients[0][:] = HALF * (me.point[0] - np.float32(world.rank))
            me.step()
            steps += 1
            die(steps)
own = me.parameters[0] if server is None else server.rule.center
model = me.parameters[0]
np.savez(folder / f"{world.rank}.npz", own=own, model=model, commits=np.array(commits, np.int64))
