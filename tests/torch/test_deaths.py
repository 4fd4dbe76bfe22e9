"""Threads as ranks that save all the time: whoever dies at whatever message, the others end, and all go on.

A run takes a tenth of a second, so that many more deaths are tried than by `test_chaos.py`, which kills
processes.
"""

from __future__ import annotations

import random
import time
from typing import NamedTuple

import pytest

from nnlo_common.testing import InjectedFault, MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from tests.programs import torch_checkpoint  # noqa: E402

pytestmark = [
    pytest.mark.framework("torch"),
    pytest.mark.filterwarnings("ignore:no checkpoint could be written:RuntimeWarning"),
]

WRAPPERS = [nt.AGN, nt.DiLoCo, nt.Downpour, nt.DynSGD, nt.EASGD, nt.GEM, nt.LocalSGD, nt.Synchronous]
WRAPPERS += [nt.Steady]
EPOCHS, SAMPLES, WORKERS = 3, 24, 3
TIMEOUT_S = 180.0


class Job(NamedTuple):
    wrapper: type
    servers: int
    assignment: str
    minutes: float  # between two checkpoints; they are written after each epoch, too
    pause_s: float  # the longest between two batches


def run(job, folder, fault=None):
    """The samples that each rank has taken in each epoch, and how often it has come to each point."""

    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if job.wrapper is nt.GEM else 0.0)
        optimizer = job.wrapper(inner, model=model, servers=job.servers, world=world)
        data = torch.ones(SAMPLES, 2)
        sampler = nt.ShardSampler(data, optimizer=optimizer, assignment=job.assignment)
        loader, taken = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler), {}
        for epoch in nt.Checkpoint(folder, optimizer, minutes=job.minutes, report=False).epochs(EPOCHS):
            taken[epoch] = torch_checkpoint.samples_of_epoch(
                model, optimizer, loader, lambda: time.sleep(pace.uniform(0, job.pause_s))
            )
        optimizer.close()
        return taken

    pace = random.Random(1)
    with MemoryCluster(job.servers + WORKERS) as cluster:
        if fault is not None:
            cluster.fail(*fault, may_miss=True)
        return cluster.run(program, TIMEOUT_S), dict(cluster.points._reached)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(12, 600))]
)
def test_whoever_dies_at_whatever_message_the_others_end_and_all_go_on(seed, tmp_path_factory):
    draw = random.Random(seed)
    wrapper = WRAPPERS[seed % len(WRAPPERS)]
    job = Job(
        wrapper,
        servers=1 if wrapper is nt.GEM else draw.choice([1, 2]),
        assignment=draw.choice(["static", "dynamic"]),
        minutes=draw.choice([0, 0.02 / 60]),
        pause_s=draw.choice([0, 0.004]),
    )
    victim = draw.randrange(job.servers, job.servers + WORKERS)
    _, reached = run(job, tmp_path_factory.mktemp("unharmed"))
    points = {name: count for (rank, name), count in reached.items() if rank == victim and name != "gather"}
    point = draw.choice(sorted(points))
    fault, folder = (victim, point, draw.randint(1, points[point])), tmp_path_factory.mktemp("run")
    ends, _ = run(job, folder, fault)
    dead = [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)]
    assert dead in ([victim], []), fault  # it may have come there less often than before
    again, _ = run(job, folder)
    assert all(set(taken) <= set(range(EPOCHS)) for taken in again)
