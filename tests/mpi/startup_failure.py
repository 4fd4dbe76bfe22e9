"""Rank 1 fails in the way the argument names, while the others wait in a receive for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np

from nnlo_common._startup import connect, guard
from nnlo_common.transport._world import MPI


def fail() -> None:
    raise ValueError("the disk is full") from KeyError("cause")


def earlier_hook(*_args: object) -> None:
    print("earlier hook called", file=sys.stderr, flush=True)
    if sys.argv[1] == "hanging hook":
        time.sleep(60)


world = connect()
assert world is not None
if "hook" in sys.argv[1]:
    sys.excepthook = earlier_hook
guard(world)
guard(world)  # changes nothing
if world.rank == 1:
    match sys.argv[1]:
        case "thread":
            threading.Thread(target=fail, name="prefetch").start()
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        case _:
            fail()
world.comm.Recv(np.empty(1), source=MPI.ANY_SOURCE)
