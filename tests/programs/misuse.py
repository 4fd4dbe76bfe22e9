"""Programs that go wrong on one rank, in ways the others would wait for for ever."""

import os
import signal
import sys

import numpy as np

from nnlo_common import EASGD, SGD, Downpour, Participant


def train(algorithm, arrays, at_step=lambda rank, step: None, steps=20, **options):
    with Participant(algorithm, arrays, optimizer=SGD(0.1), **options) as me:
        for step, _ in enumerate(me.batches(range(steps))):
            me.gradients[0][:] = me.point[0]
            at_step(me.rank, step)
            me.step()
        me.say("done")


def exits(rank, step):
    if rank == 1 and step == 2:
        sys.exit(3)


def raises(rank, step):
    if rank == 1 and step == 2:
        raise ValueError("no such sample")


def caught():
    try:
        train(Downpour(), [np.ones(3, "f4")], raises)
    except ValueError:
        print("swallowed", flush=True)


def other_model():
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    train(Downpour(), [np.ones(3 + (rank == 2), "f4")], names=["kernel"])


def other_algorithm():
    from mpi4py import MPI

    train(EASGD() if MPI.COMM_WORLD.rank == 2 else Downpour(), [np.ones(3, "f4")])


def exit_on_server():
    with Participant(Downpour(), [np.ones(3, "f4")], optimizer=SGD(0.1)) as me:
        if me.role.startswith("server"):
            sys.exit(0)
        for _ in me.batches(range(20)):
            me.step()


def killed(rank, step):
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


PROGRAMS = {
    "killed": lambda: train(Downpour(), [np.ones(3, "f4")], killed),
    "exit": lambda: train(Downpour(), [np.ones(3, "f4")], exits),
    "exception": lambda: train(Downpour(), [np.ones(3, "f4")], raises),
    "swallowed": caught,
    "other_model": other_model,
    "other_algorithm": other_algorithm,
    "no_batches": lambda: train(Downpour(), [np.ones(3, "f4")], steps=1),
    "too_many_servers": lambda: train(Downpour(), [np.ones(3, "f4")], servers=3),
    "unusable_array": lambda: train(Downpour(), [np.ones(3)]),
    "server_exits": exit_on_server,
}

PROGRAMS[sys.argv[1]]()
