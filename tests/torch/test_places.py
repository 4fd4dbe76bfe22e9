"""A spare that takes a dead worker's place has that worker's samples at once, whatever deals them out."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from nnlo_common.protocol import Places
from nnlo_common.protocol._waiting_requests import Pauses
from nnlo_common.testing import InjectedFault, MemoryCluster
from nnlo_common.training._spare_rank import PlacedRank

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import h5py  # noqa: E402

import nnlo_torch as nt  # noqa: E402

pytestmark = [pytest.mark.framework("torch"), pytest.mark.usefixtures("_copies_at_once")]
EPOCHS, SAMPLES, WORKERS, DIES = 4, 24, 3, 2


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "numbers.h5", "w") as opened:
        opened["x"] = np.arange(SAMPLES, dtype="f4")[:, None]
    return tmp_path / "numbers.h5"


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return map(float, range(SAMPLES))


def sampled(optimizer, file):
    data = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
    sampler = nt.ShardSampler(data, optimizer=optimizer)
    return lambda: torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)


def batches(optimizer, file):
    made = nt.Batches(file, features="x", batch_size=2, optimizer=optimizer)
    return lambda: (x for (x,) in made)


def iterable(optimizer, file):
    data = nt.ShardIterable(Numbers(), optimizer=optimizer)
    return lambda: (x[:, None].float() for x in torch.utils.data.DataLoader(data, batch_size=2))


@pytest.mark.parametrize("source", [sampled, batches, iterable])
def test_from_the_next_epoch_on_a_spare_has_the_dead_workers_share(source, file):
    def program(world):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(
            torch.optim.SGD(model.parameters(), lr=1e-4), model=model, world=world, spares=2
        )
        loop, taken = source(optimizer, file), []
        for _ in range(EPOCHS):
            taken.append([])
            for inputs in loop():
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                taken[-1] += inputs[:, 0].int().tolist()
            optimizer.mean({"ranks": 1.0})
        optimizer.close()
        return optimizer.role, taken

    with MemoryCluster(1 + WORKERS + 2) as cluster:
        cluster.fail(DIES, "send EPOCH", 1)
        ranks = cluster.run(program, 60)
    assert isinstance(ranks[DIES], InjectedFault)
    living = [one for one in ranks if not isinstance(one, InjectedFault)]
    assert ranks[5][0] == "worker 1"
    joined = next(epoch for epoch, taken in enumerate(ranks[5][1]) if taken)
    assert joined == 1
    for epoch in range(joined, EPOCHS):
        assert sorted(one for _, taken in living for one in taken[epoch]) == list(range(SAMPLES))


def test_a_spare_joins_after_the_save_between_two_epochs(monkeypatch, tmp_path):
    """Or all workers would wait at that save for a rank that has begun the next epoch."""
    asked, answered, ask = threading.Event(), [], Places.ask

    def ask_and_note(self, rank, query):
        answers = ask(self, rank, query)
        if (rank, query.epochs) == (5, 1):
            answered.append(answers)
            asked.set()
        return answers

    monkeypatch.setattr(Places, "ask", ask_and_note)

    def program(world):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(
            torch.optim.SGD(model.parameters(), lr=1e-4), model=model, world=world, spares=2
        )
        data = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
        sampler = nt.ShardSampler(data, optimizer=optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        checkpoint = nt.Checkpoint(tmp_path / "run", optimizer)
        for epoch in checkpoint.epochs(EPOCHS):
            for inputs in checkpoint.batches(loader):
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.mean({"ranks": 1.0})
            if (world.rank, epoch) == (3, 0):
                asked.wait(60)  # so that the others are at the save, and the spare is past it
        optimizer.close()
        return optimizer.role

    with MemoryCluster(1 + WORKERS + 2) as cluster:
        cluster.fail(DIES, "send EPOCH", 1)
        ranks = cluster.run(program, 60)
    assert answered == [[]]
    assert [ranks[rank] for rank in (0, 1, 3, 4, 5)] == [
        *("server 0", "worker 0", "worker 2", "spare 0", "worker 1")
    ]


def test_nobody_saves_without_a_spare_that_joins_when_the_others_have_ended_its_first_epoch(
    monkeypatch, tmp_path
):
    """Else the server would count that save as none of its own, and wait for one more at the end."""
    start, ask, asked = PlacedRank.start, Pauses.ready, threading.Event()

    def join_late(self):
        asked.wait(60)
        start(self)

    def ready(self, **options):
        epochs = [self._peers[event.message.sender].epochs for event in self.waiting]
        found = ask(self, **options)
        if epochs == [2, 2]:  # workers 0 and 2 are at the save after the spare's first epoch
            asked.set()
        return found

    monkeypatch.setattr(PlacedRank, "start", join_late)
    monkeypatch.setattr(Pauses, "ready", ready)

    def program(world):
        model = torch.nn.Linear(1, 1)
        optimizer = nt.Downpour(
            torch.optim.SGD(model.parameters(), lr=1e-4), model=model, world=world, spares=2
        )
        data = torch.arange(SAMPLES, dtype=torch.float32)[:, None]
        sampler = nt.ShardSampler(data, optimizer=optimizer)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        checkpoint = nt.Checkpoint(tmp_path / "run", optimizer, report=False)
        for _ in checkpoint.epochs(EPOCHS):
            for inputs in checkpoint.batches(loader):
                model(inputs).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.close()
        return optimizer.role

    with MemoryCluster(1 + WORKERS + 2) as cluster:
        cluster.fail(DIES, "send EPOCH", 1)
        ranks = cluster.run(program, 60)
    assert asked.is_set()
    assert [ranks[rank] for rank in (0, 1, 3, 4, 5)] == [
        *("server 0", "worker 0", "worker 2", "spare 0", "worker 1")
    ]
