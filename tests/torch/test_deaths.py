"""Threads as ranks that save all the time: whoever dies at whatever message, the others end, and all go on.

A run takes a tenth of a second, so that many more deaths are tried than by `test_chaos.py`, which kills
processes.
"""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from typing import NamedTuple

import pytest

from nnlo_common import PeerLostError
from nnlo_common.protocol._waiting_requests import Pauses
from nnlo_common.testing import InjectedFault, MemoryCluster
from nnlo_common.training import _server_rank
from nnlo_common.training._server_rank import ServerRank
from nnlo_common.training.checkpoint import SavedCheckpoint
from nnlo_common.training.checkpoint._saving import wait_for_all

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
    spares: int = 0
    heir: bool = False


def run(job, folder, *faults):
    """The samples that each rank has taken in each epoch, and how often it has come to each point."""

    def program(world):
        model = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9 if job.wrapper is nt.GEM else 0.0)
        ranks = {"servers": job.servers, "spares": job.spares, "heir": job.heir}
        optimizer = job.wrapper(inner, model=model, world=world, **ranks)
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
    with MemoryCluster(job.servers + WORKERS + job.spares) as cluster:
        for fault in faults:
            cluster.fail(*fault, may_miss=True)
        try:
            return cluster.run(program, TIMEOUT_S), dict(cluster.points._reached)
        finally:
            wait_for_all()  # a dead rank's thread still writes, which a dead process does not


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


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(24, 600))]
)
def test_whatever_server_dies_a_spare_serves_and_the_checkpoints_are_whole(
    seed, tmp_path_factory, monkeypatch
):
    """Also between the pauses of two servers; nobody waits for ever, and the next start goes on."""
    monkeypatch.setattr(_server_rank, "LOOK_FOR_COPIES_S", 1e-3)
    draw = random.Random(seed)
    wrapper = WRAPPERS[seed % len(WRAPPERS)]
    servers = 1 if wrapper is nt.GEM else 2
    job = Job(
        wrapper,
        servers,
        assignment=draw.choice(["static", "dynamic"]),
        minutes=draw.choice([0, 0.02 / 60]),
        pause_s=draw.choice([0, 0.004]),
        spares=draw.choice([1, 2]),
    )
    _, reached = run(job, tmp_path_factory.mktemp("unharmed"))
    victim = draw.randrange(servers)
    points = {name: count for (rank, name), count in reached.items() if rank == victim and name != "gather"}
    point = draw.choice(sorted(points))
    fault, folder = (victim, point, draw.randint(1, points[point])), tmp_path_factory.mktemp("run")
    try:
        ends, _ = run(job, folder, fault)
    except PeerLostError as error:
        assert "before a spare had a copy" in str(error), fault  # noqa: PT017 - else the training goes on
    else:
        dead = [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)]
        assert dead in ([victim], []), fault
        for epoch in range(EPOCHS if wrapper is not nt.Steady else 0):  # it counts progress, not samples
            assert sum(end[epoch] for end in ends[servers : servers + WORKERS]) == SAMPLES, fault
    for path in folder.glob("checkpoint-??????"):
        SavedCheckpoint.open(path, int(path.name[-6:])).verify()
    again, _ = run(job, folder)
    assert all(set(taken) <= set(range(EPOCHS)) for taken in again)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(24, 600))]
)
def test_whenever_a_server_dies_its_heir_serves_and_the_checkpoints_are_whole(seed, tmp_path_factory):
    """At each message: the heir is within a step, a lease, a mean, a save or its end; it may die, too."""
    draw = random.Random(seed)
    wrapper = WRAPPERS[seed % len(WRAPPERS)]
    servers = 1 if wrapper is nt.GEM else 1 + seed // len(WRAPPERS) % 2
    job = Job(
        wrapper,
        servers,
        assignment=draw.choice(["static", "dynamic"]),
        minutes=draw.choice([0, 0.02 / 60]),
        pause_s=draw.choice([0, 0.004]),
        heir=True,
    )
    _, reached = run(job, tmp_path_factory.mktemp("unharmed"))
    victim = draw.randrange(servers)
    points = {name: count for (rank, name), count in reached.items() if rank == victim and name != "gather"}
    point = draw.choice(sorted(points))
    faults, folder = [(victim, point, draw.randint(1, points[point]))], tmp_path_factory.mktemp("run")
    if servers == 1 and draw.random() < 0.5:
        point, times = draw.choice(
            sorted((at, count) for (_, at), count in reached.items() if at != "gather")
        )
        faults.append((1, point, draw.randint(1, times)))
    try:
        ends, _ = run(job, folder, *faults)
    except PeerLostError as error:
        assert re.search(r"before rank \d had a copy", str(error)), faults  # noqa: PT017 - else it goes on
    else:
        dead = [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)]
        assert set(dead) <= {rank for rank, *_ in faults}, faults
        leased = job.assignment == "dynamic" and job.wrapper in (nt.Downpour, nt.DynSGD, nt.EASGD)
        # Else the heir's share is missing from then on, or the rest of its last lease.
        if leased and dead in ([], [victim]):
            assert sum(sum(end.values()) for end in ends[servers:]) >= EPOCHS * SAMPLES, faults
    for path in folder.glob("checkpoint-??????"):
        SavedCheckpoint.open(path, int(path.name[-6:])).verify()
    again, _ = run(job, folder)
    assert all(set(taken) <= set(range(EPOCHS)) for taken in again)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "seed", [*range(36), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(36, 600))]
)
def test_whenever_a_worker_dies_a_spare_takes_its_share_and_its_part_of_checkpoints(
    seed, tmp_path_factory, monkeypatch
):
    """A checkpoint of the spare is the dead worker's: the same ranks go on where it was."""
    monkeypatch.setattr(_server_rank, "LOOK_FOR_COPIES_S", 1e-3)
    draw, wrapper = random.Random(seed), WRAPPERS[seed % len(WRAPPERS)]
    servers = 1 if wrapper is nt.GEM else 1 + seed // len(WRAPPERS) % 2
    job = Job(
        wrapper,
        servers,
        assignment=draw.choice(["static", "dynamic"]),
        minutes=draw.choice([0, 0.02 / 60]),
        pause_s=draw.choice([0, 0.004]),
        spares=2 * servers,
    )
    victim, spare = servers + draw.randrange(WORKERS), servers + WORKERS + job.spares - 1
    point = draw.choice([("send EPOCH", 1), ("send EXCHANGE", 2), ("receive CENTER", 2), ("send ASK", 1)])
    fault, folder = (victim, *point), tmp_path_factory.mktemp("run")
    ends, reached = run(job, folder, fault)
    assert [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)] in ([victim], []), fault
    trained = [epoch for epoch, taken in ends[spare].items() if taken]
    in_time = reached.get((victim, "send EPOCH"), 0) < EPOCHS - 1  # another epoch followed
    if isinstance(ends[victim], InjectedFault) and job.assignment == "static" and in_time:
        assert trained, fault  # else the others may have been faster to lease all
    living = [end for rank, end in enumerate(ends) if not isinstance(end, InjectedFault)]
    counted = job.wrapper is not nt.Steady  # it counts progress, not samples
    for epoch in trained if counted else ():
        # What the dead worker has not finished may be leased in the spare's first epoch, with what is in it.
        returned = job.assignment == "dynamic" and epoch == trained[0]
        assert SAMPLES <= sum(end[epoch] for end in living) <= SAMPLES * (1 + returned), fault
    for path in folder.glob("checkpoint-??????"):
        SavedCheckpoint.open(path, int(path.name[-6:])).verify()
    newest = max(folder.glob("checkpoint-??????"))
    files = SavedCheckpoint.open(newest, int(newest.name[-6:])).manifest.files
    if in_time or not isinstance(ends[victim], InjectedFault):
        assert f"rank{victim}.pt" in files, fault  # that of the spare, if the worker has died
    assert f"rank{spare}.pt" not in files, fault
    shutil.rmtree(newest)
    again, _ = run(job, folder)
    assert again[spare].keys() == again[victim].keys()
    assert not any(again[spare].values())
    if counted and job.minutes == 0 and again[victim]:  # whole epochs
        for epoch in again[victim]:
            assert sum(end[epoch] for end in again) == SAMPLES, fault


@pytest.mark.parametrize("wrapper", [nt.LocalSGD, nt.DiLoCo])
def test_nobody_waits_for_a_spare_that_is_called_when_no_epoch_follows(wrapper, tmp_path):
    """The last round is made by those that have trained, though a worker's place is empty."""
    job = Job(wrapper, servers=1, assignment="static", minutes=0, pause_s=0, spares=2)
    ends, _ = run(job, tmp_path, (1, "send EPOCH", EPOCHS))
    assert [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)] == [1]
    assert not any(ends[-1].values())


@pytest.mark.usefixtures("_copies_at_once")
def test_an_heir_that_alone_has_not_been_let_out_of_a_pause_goes_on_with_the_others(tmp_path, monkeypatch):
    """Server 0 has let out all; server 1 dies when it has let out all but the worker that takes its place."""
    complete = Pauses.complete

    def completed(self, **options):
        return sorted(complete(self, **options), key=lambda event: event.message.sender == 3)

    monkeypatch.setattr(Pauses, "complete", completed)
    job = Job(nt.Downpour, servers=2, assignment="static", minutes=0, pause_s=0, heir=True)
    ends, _ = run(job, tmp_path, (1, "send PAUSED", 2 * WORKERS))
    assert [rank for rank, end in enumerate(ends) if isinstance(end, InjectedFault)] == [1]
    assert all(end.keys() == set(range(EPOCHS)) for rank, end in enumerate(ends) if rank != 1)


@pytest.mark.usefixtures("_copies_at_once")
def test_an_heir_waits_until_the_other_server_needs_nothing_of_the_dead_one(monkeypatch):
    """Server 0 dies when it leaves, and server 1 has not asked for its last means yet."""
    finish, left = ServerRank.finish, threading.Event()

    def late(self, last=lambda: None):
        def at_last():
            if self.server.rank == 1:
                left.wait(0.5)  # it does not come
            last()

        finish(self, at_last)

    monkeypatch.setattr(ServerRank, "finish", late)

    def program(world):
        linear = torch_checkpoint.initialised(torch.nn.Linear(2, 1))
        model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(1))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = nt.Downpour(inner, model=model, world=world, servers=2, heir=True)
        for _ in range(2):
            for x in optimizer.epoch([torch.ones(3, 2)] * 2):
                model(x).sum().backward()
                optimizer.step()
        optimizer.close()
        if world.rank == 2:
            left.set()
        return optimizer.role

    with MemoryCluster(2 + WORKERS) as cluster:
        cluster.fail(0, "send LEAVE", 1)
        ends = cluster.run(program, 60)
    assert isinstance(ends[0], InjectedFault)
    assert ends[1] == "server 1"
