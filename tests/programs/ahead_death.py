"""A vector leaves rank 1 ahead of its message to rank 0; one of them dies in the middle.

Arguments: which; "packed" where the vector leaves as it is made.
"""

import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

from nnlo_common import FlatVector
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.cluster.transport._mpi4py import World
from nnlo_common.cluster.transport._mpi_world import MPIWorld
from nnlo_common.cluster.transport._parts import PART, parts
from nnlo_common.protocol import Kind, Lost, Message

SIZE = 8 * PART
what, packed = sys.argv[1], sys.argv[2:] == ["packed"]
world = MPIWorld(World())
disengage = world.engage()
here = world.open(
    [Link(1 - world.rank, shard, SIZE, 1, world.rank == 0, SIZE, in_order=packed) for shard in (0, 1)]
)
server = MPI.COMM_WORLD.bcast(os.getpid())


def killed(process):
    os.kill(process, signal.SIGKILL)
    time.sleep(0.5)


def exchanged(dies=None):
    """Send the vector while it is made; at its fourth part a process dies."""

    def make(part):
        flat.vector[part] = 2
        if part == [*parts(SIZE)][3] and dies is not None:
            killed(dies)

    message = Message(Kind.EXCHANGE, 1, 1, vector=flat.vector)
    here.send(0, message, flat.frame, make)
    here.flush()


if world.rank == 0:
    event = here.receive()
    if isinstance(event, Lost):
        print(f"server: {event}", flush=True)
    else:
        assert (event.message.vector == 2).all()
        here.release(1, event.frame)
        print(f"server: {here.receive()}", flush=True)
elif packed:
    flat = FlatVector.of([np.zeros(SIZE, "f4")])
    if what == "worker dies later":
        exchanged()
    exchanged(server if what == "server dies" else os.getpid())
    assert (flat.vector == 2).all()
    print(f"worker: {here.receive()}", flush=True)
    exchanged()
else:
    flat = FlatVector.of([np.full(SIZE, 2, "f4")])
    if what == "worker dies later":
        here.send_ahead(0, 0, flat.vector, 0)
        here.send(0, Message(Kind.EXCHANGE, 1, 1, vector=flat.vector), flat.frame)
        here.flush()
    here.send_ahead(0, 0, flat.vector, SIZE // 2)
    if what != "server dies":
        killed(os.getpid())
    killed(server)
    here.send_ahead(0, 0, flat.vector, 0)
    here.send(0, Message(Kind.EXCHANGE, 1, 1, vector=flat.vector), flat.frame)
    print(f"worker: {here.receive()}", flush=True)
    here.send_ahead(0, 0, flat.vector, SIZE // 2)
    here.withdraw(0, 0)
here.close()
disengage()
