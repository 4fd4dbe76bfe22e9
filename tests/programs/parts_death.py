"""A long reply goes from rank 0 to rank 1 in parts; one of them dies or stops in the middle, or before.

Arguments: which, a folder, and "lent" for a reply that the worker reads where the centre lies.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from nnlo_common import FlatVector, PeerLostError
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.cluster.transport._parts import PART
from nnlo_common.protocol import Kind, Lost, Message

PARTS = 8
what, begun = sys.argv[1], Path(sys.argv[2]) / "begun"
world = MPIWorld(World())
disengage = world.engage()
# The second link has a receive posted all the time, which notices a death.
here = world.open([Link(1 - world.rank, shard, PARTS * PART, 1, serving=world.rank == 0) for shard in (0, 1)])
server = MPI.COMM_WORLD.bcast(os.getpid())

if world.rank == 0:
    event = here.receive()
    vector, filled = event.message.vector, []
    if "lent" in sys.argv:
        vector = vector.copy()
    if what == "worker dies before":
        print(f"server: {here.receive()}", flush=True)

    def fill(part):
        filled.append(part)
        vector[part] += 1
        while len(filled) == 3 and not begun.exists():  # the worker has had a part
            MPI.COMM_WORLD.Iprobe()  # makes it leave
        if len(filled) == 3 and what in ("server dies", "server stops"):
            os.kill(os.getpid(), signal.SIGKILL if what == "server dies" else signal.SIGSTOP)

    here.send(1, Message(Kind.CENTER, 0, 1, vector=vector), event.frame, fill)
    assert (vector == 2).all()
    print(f"server: {len(filled)} parts computed", flush=True)
    if what == "worker dies":
        event = here.receive()
        print(f"server: {event}", flush=True)
        assert isinstance(event, Lost)
else:
    flat = FlatVector.of([np.ones(PARTS * PART, "f4")])
    here.send(0, Message(Kind.EXCHANGE, 1, 1, vector=flat.vector), flat.frame)
    if what == "worker dies before":
        here.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    event, parts, waits = here.receive(), 0, 0
    try:
        for part in event.coming():
            if part is None:
                waits += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGCONT)
                continue
            assert (part[1] == 2).all()
            parts += 1
            begun.touch()
            if what == "worker dies" and parts == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"worker: {parts} parts, waited {waits > 0}", flush=True)
        here.release(0, event.frame)
    except PeerLostError as error:
        print(f"worker: after {parts} parts: {error}", flush=True)
here.close()
disengage()
