"""Elastic tree on ranks: threads as ranks, against NumPy; deaths, stops, epochs and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import SGD, ConfigurationError, PeerLostError
from nnlo_common.algorithms import EAMSGD, EASGD
from nnlo_common.testing import InjectedFault, MemoryCluster, MemoryWorld
from nnlo_common.training._participant import Participant
from tests.helpers.trees import HALF, START, TREE, WORKERS, commits_of, numbers_of

RULE = EASGD(**TREE)


def program(world: MemoryWorld, rule: EASGD = RULE, epochs: int = 2) -> dict[str, object]:
    me = Participant(rule, [START.copy()], optimizer=SGD(0.5), world=world)
    with me:
        server = me._member.server
        commits = [] if server is None else commits_of(server)
        world.gather_text("begun")  # all start from the same centre
        for _ in range(epochs):
            for _ in me.batches(range(170)):
                me.gradients[0][:] = HALF * (me.point[0] - np.float32(world.rank))
                me.step()
    model = me.parameters[0].copy()
    own = model if server is None else server.rule.center.copy()
    return {"role": me.role, "model": model, "own": own, "commits": commits, "report": me.report()}


def test_all_numbers_are_those_of_the_reference() -> None:
    with MemoryCluster(8) as cluster:
        ranks = cluster.run(program)
    assert [one["role"] for one in ranks[:5]] == [
        "server 0",
        "sub-server 0",
        "worker 0",
        "worker 1",
        "sub-server 1",
    ]
    expected = numbers_of({rank: ranks[rank]["commits"] for rank in (0, 1, 4)}, 2 * 170 // WORKERS)
    np.testing.assert_array_equal(ranks[0]["own"], expected.top)
    for rank, vector in (*expected.subs.items(), *expected.workers.items()):
        np.testing.assert_array_equal(ranks[rank]["own"], vector, err_msg=f"rank {rank}")
    for sub in (1, 4):  # the model of a sub-server is the top's centre
        np.testing.assert_array_equal(ranks[sub]["model"], expected.top)
    assert ranks[0]["report"].exchanges == 2 * 22 // 5 + 3 * 22 // 5


def test_a_dead_worker_is_dropped_by_its_sub_server() -> None:
    with MemoryCluster(8) as cluster:
        cluster.fail(6, "send EXCHANGE", 4)
        ranks = cluster.run(program)
    assert isinstance(ranks[6], InjectedFault)
    assert [line.split(" on ")[0] for line in ranks[0]["report"].lost] == ["rank 6"]
    assert [len(set(ranks[sub]["commits"])) for sub in (1, 4)] == [2, 3]
    assert ranks[4]["commits"].count(6) == 3


@pytest.mark.parametrize(
    ("rank", "point", "told"),
    [
        (
            4,
            "receive EXCHANGE",
            "rank 4: the sub-server of the workers 5, 6, 7|a server of the centre",
        ),
        (0, "receive EXCHANGE", "the top server of the tree has died|a server of the centre has died"),
    ],
)
def test_a_dead_server_ends_the_training(rank: int, point: str, told: str) -> None:
    with MemoryCluster(8) as cluster:
        cluster.fail(rank, point, 2)
        with pytest.raises(PeerLostError, match=told):
            cluster.run(program)


def test_the_last_worker_of_a_sub_server() -> None:
    with MemoryCluster(5) as cluster:
        cluster.fail(2, "send EXCHANGE", 3)
        with pytest.raises(PeerLostError, match="the last worker of the sub-server on rank 1 has died"):
            cluster.run(program)


def test_a_stop_reaches_all_workers_at_once() -> None:
    """Also those whose sub-server never exchanges: it hears of the stop beside its exchanges."""
    rule = EASGD(every=3, sub_servers=2, sub_every=100_000)

    def stopping(world: MemoryWorld) -> int:
        with Participant(rule, [START.copy()], optimizer=SGD(0.5), world=world) as me:
            for epoch in range(1000):
                for _ in me.batches(range(50)):
                    me.step()
                if epoch == 2 and me.role == "server 0":
                    me.stop()
                if me.stopped:
                    return epoch
        return 1000

    with MemoryCluster(8) as cluster:
        assert max(cluster.run(stopping)) < 1000


def test_a_rate_set_on_the_top_server_reaches_all_workers() -> None:
    rule = EASGD(every=3, sub_servers=2, sub_every=100_000)

    def told(world: MemoryWorld) -> float:
        with Participant(rule, [START.copy()], optimizer=SGD(0.5), world=world) as me:
            for epoch in range(40):
                for _ in me.batches(range(50)):
                    me.step()
                if epoch == 1 and me.role == "server 0":
                    me._part.tell_rate(0.25)
            return me._part.told_rate

    with MemoryCluster(8) as cluster:
        assert cluster.run(told) == [0.25] * 8


def test_look_ahead_momentum_in_a_tree() -> None:
    rule = EAMSGD(learning_rate=0.1, momentum=0.5, every=2, sub_servers=2, sub_every=3)

    def train(world: MemoryWorld) -> np.ndarray:
        with Participant(rule, [START.copy()], world=world) as me:
            for _ in range(6):
                for _ in me.batches(range(200)):
                    me.gradients[0][:] = me.point[0] - np.float32(4.0)
                    me.step()
        return me.parameters[0]

    with MemoryCluster(8) as cluster:
        ranks = cluster.run(train)
    assert all(np.allclose(one, 4.0, atol=0.05) for one in ranks)


@pytest.mark.parametrize(
    ("size", "options", "rule", "told"),
    [
        (8, {"servers": 2}, RULE, "sub_servers=2 with servers=2 is not possible: a tree has one server"),
        (8, {"servers": 0}, RULE, "sub_servers=2 with servers=0 is not possible"),
        (9, {"group_size": 2}, RULE, "sub_servers=2 with group_size=2 is not possible: use groups"),
        (4, {}, RULE, "need 5 ranks. Start at least 5 ranks, or ask for at most 1"),
        (8, {"log_order": "x.json"}, RULE, "log_order with sub_servers=2 is not possible"),
        (8, {}, EASGD(sub_servers=2, beta=4.0), "makes alpha=1.33, but alpha must be below 1"),
    ],
)
def test_what_a_tree_cannot_have(size: int, options: dict[str, object], rule: EASGD, told: str) -> None:
    def make(world: MemoryWorld) -> None:
        with Participant(rule, [START.copy()], optimizer=SGD(0.5), world=world, **options):
            pass

    with MemoryCluster(size) as cluster, pytest.raises(ConfigurationError, match=told):
        cluster.run(make)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("abababa", ["server 0", "sub-server 1", "sub-server 0"]),
        ("abbbccc", ["server 0", "sub-server 0", "worker 0", "worker 1", "sub-server 1"]),
        ("abbbbbb", ["server 0", "sub-server 0", "worker 0"]),
    ],
)
def test_one_sub_server_for_each_host(hosts: str, expected: list[str]) -> None:
    rule = EASGD(sub_servers="host")

    def roles(world: MemoryWorld) -> str:
        world.host = hosts[world.rank]
        with Participant(rule, [START.copy()], optimizer=SGD(0.5), world=world) as me:
            return me.role

    with MemoryCluster(7) as cluster:
        found = cluster.run(roles)
    assert found[: len(expected)] == expected
