"""A worker may look at the centre between steps; neither the numbers nor the protocol notice."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import EASGD, GEM, SGD, DiLoCo, Downpour, LocalSGD, Synchronous
from nnlo_common.base._flat_vector import FlatVector
from nnlo_common.protocol import Server, Shard, Worker
from nnlo_common.testing import Interleaved, VirtualCluster

RULES = [
    Downpour(),
    Downpour(lag=2),
    Synchronous(lag=1),
    EASGD(every=1),
    GEM(learning_rate=0.1),
    LocalSGD(every=1, lag=1),
    DiLoCo(every=2),
]


def run(rule, *, look, schedule, workers=3, steps=6):
    """The centre at the end, and what was seen of it on the way."""
    arrays = [np.ones(2, "f4"), np.ones(3, "f4")]
    places = FlatVector.of(arrays).layout.cut(2)
    shards = [Shard(index, index, place) for index, place in enumerate(places)]
    seen = []

    def program(worker):
        yield from worker.join()
        for step in range(steps):
            worker.gradient.vector[:] = 0.5 * worker.gradient_point() + worker.rank
            yield from worker.step()
            if look and step % 2:
                view = np.empty(5, "f4")
                yield from worker.look(view)
                seen.append(view)
        yield from worker.leave()

    ranks = range(2, 2 + workers)
    servers = [
        Server(
            rule.center(np.ones(s.place.stop - s.place.start, "f4"), workers, SGD(0.1)),
            ranks,
            rank=s.server,
            shard=s.index,
            depth=rule.lag + 1,
        )
        for s in shards
    ]
    members = {
        rank: Worker(
            rank, rule, FlatVector.of(arrays), FlatVector.of(arrays), shards, workers=workers, local=SGD(0.1)
        )
        for rank in ranks
    }
    cluster = VirtualCluster(
        servers, members, {r: program(w) for r, w in members.items()}, schedule=schedule, check=True
    )
    cluster.run()
    return np.concatenate([server.rule.center for server in servers]), seen


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{type(rule).__name__}-lag{rule.lag}")
def test_looking_at_any_time_never_hangs_and_sees_the_centre(rule):
    for seed in range(12):
        _, seen = run(rule, look=True, schedule=Interleaved(seed))
        assert len(seen) == 9
        assert all(np.isfinite(view).all() for view in seen)
        assert len({view.tobytes() for view in seen}) > 1  # it moves, and the looks are of different times


@pytest.mark.parametrize("rule", [Synchronous(), LocalSGD(every=1), Synchronous(lag=1)])
def test_looking_changes_no_bit_of_a_synchronous_training(rule):
    with_looks, _ = run(rule, look=True, schedule=Interleaved(1))
    without, _ = run(rule, look=False, schedule=Interleaved(2))
    assert np.array_equal(with_looks, without)
