"""What the progress thread does over real MPI; each check is a job of its own, on two ranks."""

import logging
import os
import sys
import threading
import time

import mpi4py
import numpy as np
import pytest

CHECK, SIZE = sys.argv[1], int(sys.argv[2])
LONG_S = 30.0
if CHECK == "granted_less":
    mpi4py.rc.thread_level = "serialized"

from mpi4py import MPI  # noqa: E402

from nnlo_common import SGD, Downpour, Participant  # noqa: E402
from nnlo_common.cluster.transport import _mpi  # noqa: E402
from nnlo_common.cluster.transport._endpoint import Link  # noqa: E402
from nnlo_common.cluster.transport._mpi import MPIEndpoint  # noqa: E402
from nnlo_common.cluster.transport._mpi4py import World  # noqa: E402
from nnlo_common.cluster.transport._mpi_world import MPIWorld  # noqa: E402
from nnlo_common.cluster.transport._progress_thread import OverlappedEndpoint  # noqa: E402
from nnlo_common.protocol import Kind, Message  # noqa: E402

STEPS = 5
if CHECK != "reads_late":  # as between hosts
    _mpi.SHORT_BYTES = 0


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "nnlo-progress"]


def endpoint(me):
    return me._member.part._endpoint


def train(lag, between=lambda me: None):
    """With the gradient 1 at every step; `between` stands for the computing."""
    with Participant(Downpour(lag=lag), [np.zeros(SIZE, "f4")], optimizer=SGD(1.0)) as me:
        for _ in me.batches(range(STEPS)):
            me.gradients[0][:] = 1
            me.step()
            me.gradients[0][:] = -1000  # the step's own numbers are on their way, or have left
            between(me)
    assert not threads()
    assert (me.parameters[0] == -STEPS).all()
    return me


def overlap():
    """Whole exchanges pass while the worker calls nothing: neither MPI nor us."""
    taken = []

    def compute(me):
        assert type(endpoint(me)) is OverlappedEndpoint
        assert len(threads()) == 1
        inner, end_s = endpoint(me)._inner, time.monotonic() + LONG_S
        while not inner._ready and time.monotonic() < end_s:
            time.sleep(1e-3)
        taken.append(len(inner._ready))

    me = train(1, compute)
    assert taken == ([] if me.role == "server 0" else [1] * STEPS), taken


def reads_late():
    """Short replies of this host are read when their worker is back: without a thread, the same numbers."""

    def compute(me):
        assert type(endpoint(me)) is MPIEndpoint
        assert endpoint(me).reads_late
        assert not threads()
        time.sleep(5e-3)  # so the server does not hurry any more

    me = train(1, compute)
    assert me.report().exchanges == STEPS * (me.role == "server 0")


def without():
    """Without lag, and on servers, there is no thread."""

    def compute(me):
        assert type(endpoint(me)) is MPIEndpoint
        assert not threads()

    train(0, compute)
    served = threading.enumerate()
    train(1)
    started = set(threading.enumerate()) - set(served)
    assert {thread.name for thread in started} <= {"nnlo-host-peers"}  # which calls no MPI


def shares_a_core():
    """Ranks poll without a pause where each has a core; on one core they never do."""
    own = os.sched_getaffinity(0)
    for cores in ({MPI.COMM_WORLD.bcast(min(own))}, own):
        os.sched_setaffinity(0, cores)
        usable, naps = set().union(*MPI.COMM_WORLD.allgather(cores)), []
        train(0, lambda me, naps=naps: naps.append(endpoint(me)._backoff()._naps))
        assert naps == [len(usable) < 2] * len(naps), (usable, naps)


def granted_less():
    """The same numbers without a thread, and one line that says so."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("nnlo_common.cluster.transport").addHandler(handler)
    me = train(1, lambda me: None if threads() == [] else sys.exit("a thread"))
    assert type(endpoint(me)) is MPIEndpoint
    if me.role == "server 0":
        assert lines == []
    else:
        (line,) = lines
        assert "needs the MPI thread level MULTIPLE" in line


def too_long():
    """What MPI reports to the thread is raised by the worker's next calls."""
    world = MPIWorld(World())
    serving = world.rank == 0
    here = world.open([Link(1 - world.rank, 0, SIZE, 2, serving)])
    if serving:
        event = here.receive()
        here._comm.Send([np.zeros(here._slots[0].frame.bytes.size + 4, "u1"), MPI.BYTE], 1, 1)
        here.release(1, event.frame)
        event = here.receive()
        assert event.message.kind is Kind.LEAVE
        return
    here.send(0, Message(Kind.PULL, 1, 1))
    here.flush()
    here._thread.join(LONG_S)
    for call in (here.receive, here.receive, lambda: here.send(0, None)):
        with pytest.raises(MPI.Exception):
            call()
    here._inner.send(0, Message(Kind.LEAVE, 1, 2))
    here._inner.flush()


def fork():
    """Processes forked amid an exchange, such as a data loader's, live and end as usual."""

    def compute(me):
        child = os.fork()
        if child == 0:
            os._exit(len(threads()))
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0

    train(1, compute)


def fails():
    """A worker that fails amid an exchange ends the job."""

    def compute(me):
        raise RuntimeError("no more data")

    train(1, compute)


def leaves():
    """So does one that just ends."""
    train(1, lambda me: sys.exit(0))


globals()[CHECK]()
print(f"<{CHECK}>", flush=True)
