"""Rank 1 fails in the way the argument names, while the others wait in a receive for ever."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from nnlo_common.cluster._connecting import connect, guard
from nnlo_common.cluster.transport._mpi4py import MPI


def fail() -> None:
    raise ValueError("the disk is full") from KeyError("cause")


def leave_it_to_others(launcher: int) -> None:
    """Let the launcher go on when rank 1, which has stopped it, has ended all the same."""
    number = np.empty(1, dtype=np.int64)
    world.comm.Recv(number, source=1)
    rank = psutil.Process(int(number[0]))
    while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    Path(sys.argv[2]).touch()
    os.kill(launcher, signal.SIGCONT)


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
        case "deaf launcher":
            world.comm.Send(np.array([os.getpid()]), dest=0)
            os.kill(os.getppid(), signal.SIGSTOP)
            fail()
        case _:
            fail()
if sys.argv[1] == "deaf launcher" and world.rank == 0:
    leave_it_to_others(os.getppid())
world.comm.Recv(np.empty(1), source=MPI.ANY_SOURCE)
