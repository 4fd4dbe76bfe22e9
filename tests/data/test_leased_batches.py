"""Batches of leases: each sample is used once in each epoch, also with slow, dead or interrupted workers.

A worker that dies may have used samples that it had not reported yet: those since it last asked the server,
i.e. in its present window. They are leased again, and are the only samples seen twice.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common.data import WAIT, Arrays, Batches, LeasedBatches, Leases, _batches


class StillWaits(Exception):
    """The server has not answered yet."""


class Server:
    """A ledger, and its answers to workers that had to wait."""

    def __init__(self, batches, workers, patient):
        self.ledger = Leases(batches.size, workers, unit=batches.window_size, patient=patient)
        self.late = {}

    def take(self, rank, epoch, unused):
        if rank in self.ledger.waiting:
            raise StillWaits
        answer = self.late.pop(rank) if rank in self.late else self.ledger.ask(rank, epoch, unused)
        self.tell()
        if answer is WAIT:
            raise StillWaits
        return answer

    def tell(self):
        self.late.update(self.ledger.answers())
        self.ledger.validate()


class Worker:
    """Takes batches, and records its samples that the server does not know to be used."""

    def __init__(self, rank, server, batches):
        self.rank, self.server, self.epoch, self.batches = rank, server, 0, 0
        self.unbooked = defaultdict(Counter)
        self.mine = LeasedBatches(batches, self)

    def take(self, epoch, unused):
        lease = self.server.take(self.rank, epoch, unused)
        self.unbooked.clear()
        return lease

    def held(self):
        return self.server.ledger.held(self.rank)

    def give_back(self, left):
        self.server.ledger.give_back(self.rank, sum(lease.size for lease in self.held()) - left)
        self.server.tell()

    def step(self, seen):
        """Take a batch, or begin the next epoch."""
        if not self.mine.more(self.epoch):
            self.mine.give_back()
            self.epoch += 1
            return
        epoch = self.mine.left()[0][0]
        (batch,), size = self.mine.take(self.epoch)
        assert len(batch) == size
        self.batches += 1
        seen[epoch].update(batch.tolist())
        self.unbooked[epoch].update(batch.tolist())

    def resumed(self, server, batches):
        """Return a worker that resumes in another process, from its state as JSON."""
        other = Worker(self.rank, server, batches)
        other.epoch, other.batches = self.epoch, self.batches
        other.mine.resume(json.loads(json.dumps(self.mine.left())))
        return other


def train(make, speeds, *, epochs, patient, deaths=(), interrupted=None):
    """Return the samples seen in each epoch, those that dead workers did not report, and unfinished ones."""
    server = Server(make(), range(len(speeds)), patient)
    workers = {rank: Worker(rank, server, make()) for rank in range(len(speeds))}
    seen, twice = defaultdict(Counter), defaultdict(Counter)
    turns = [(1 / speed, rank) for rank, speed in enumerate(speeds)]
    fruitless = steps = 0
    while turns:
        now, rank = heapq.heappop(turns)
        worker = workers[rank]
        try:
            worker.step(seen)
            fruitless = 0
        except StillWaits:
            fruitless += 1
            assert fruitless < 100 * len(speeds), "all wait"
        if (rank, worker.batches) in deaths and len(server.ledger.living) > 1:
            for epoch, samples in worker.unbooked.items():
                twice[epoch] += samples
            server.ledger.lost(rank)
            server.tell()
        elif worker.epoch < epochs:
            heapq.heappush(turns, (now + 1 / speeds[rank], rank))
        steps += 1
        if steps == interrupted and not server.ledger.waiting and not server.late:
            after = Server(make(), server.ledger.living, patient)
            after.ledger.load(json.loads(json.dumps(server.ledger.state())))
            server = after
            workers |= {rank: workers[rank].resumed(server, make()) for rank in server.ledger.living}
    left = {epoch: sum(stop - start for start, stop in server.ledger.unfinished(epoch)) for epoch in seen}
    return seen, twice, left


OPTIONS = {
    "lengths": st.lists(st.integers(0, 30), min_size=1, max_size=5),
    "speeds": st.lists(st.sampled_from([1.0, 0.9, 0.3, 0.05]), min_size=1, max_size=4),
    "batch_size": st.integers(1, 9),
    "window": st.none() | st.integers(1, 4),
    "block": st.none() | st.integers(1, 9),
    "shuffle": st.booleans(),
    "patient": st.booleans(),
}


def maker(lengths, batch_size, window, block, shuffle):
    source = Arrays(np.arange(sum(lengths)), lengths=lengths)
    options = {"batch_size": batch_size, "window": window, "block": block, "shuffle": shuffle}
    return lambda: Batches(source, leased=True, seed=1, **options)


@settings(max_examples=60)
@given(**OPTIONS)
def test_however_slow_workers_are_each_sample_comes_once_in_each_epoch(speeds, patient, **options):
    seen, *_ = train(maker(**options), speeds, epochs=3, patient=patient)
    everything = Counter(range(sum(options["lengths"])))
    assert [seen[epoch] for epoch in range(3)] == [everything] * 3


@settings(max_examples=100)
@given(
    deaths=st.sets(st.tuples(st.integers(0, 3), st.integers(0, 12)), min_size=1, max_size=4),
    **OPTIONS,
)
def test_of_a_dead_worker_only_what_it_had_not_reported_comes_twice(speeds, deaths, patient, **options):
    epochs, everything = 3, Counter(range(sum(options["lengths"])))
    seen, twice, left = train(maker(**options), speeds, epochs=epochs, patient=patient, deaths=deaths)
    for epoch in range(epochs):
        booked = seen[epoch] - twice[epoch]
        assert not booked - everything
        # A patient server has it made up for in the same epoch; another one at the end of a later epoch, if
        # there is one, and knows of it till then.
        assert sum((everything - booked).values()) == (0 if patient else left.get(epoch, 0))


@settings(max_examples=60)
@given(interrupted=st.integers(1, 60), **OPTIONS)
def test_an_interrupted_epoch_goes_on_with_exactly_the_rest(speeds, interrupted, patient, **options):
    seen, *_ = train(maker(**options), speeds, epochs=2, patient=patient, interrupted=interrupted)
    everything = Counter(range(sum(options["lengths"])))
    assert [seen[epoch] for epoch in range(2)] == [everything] * 2


def test_who_is_twenty_times_slower_has_a_twentieth():
    make = maker([4000], 5, 2, 2, shuffle=True)
    server = Server(make(), range(2), patient=False)
    fast, slow = (Worker(rank, server, make()) for rank in range(2))
    seen = defaultdict(Counter)
    while not (fast.epoch and slow.epoch):
        for _ in range(20):
            if not fast.epoch:
                fast.step(seen)
        if not slow.epoch:
            slow.step(seen)
    assert fast.batches + slow.batches == 800
    assert slow.batches == pytest.approx(800 / 21, abs=6)


def test_the_next_lease_is_read_while_this_one_is_used(monkeypatch):
    """Each window but the first is being read before it is requested."""
    ready, asked = [], []
    monkeypatch.setattr(_batches, "_MOST_AHEAD", 1)

    class Watched(Arrays):
        def read(self, start, stop, out):
            ready.append(start)
            super().read(start, stop, out)

    batches = Batches(Watched(np.arange(60)), batch_size=2, window=2, leased=True)
    worker = Worker(0, Server(batches, [0], patient=True), batches)
    while worker.epoch == 0:
        before = len(worker.mine.left()) and worker.mine.left()[0][1]
        worker.step(defaultdict(Counter))
        reads = batches._ahead._reads
        with reads._changed:
            assert reads._changed.wait_for(lambda reads=reads: not reads._wanted, 20)
        asked.append((before, max(ready)))
    assert ready == list(range(0, 60, 4))  # nothing twice
    assert all(ahead == min(start // 4 * 4 + 4, 56) for start, ahead in asked[:-1])
