"""Workers that the servers drop as too silent: the others go on, and who wakes is told."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest

from nnlo_common import GEM, SGD, Downpour, DroppedError, LocalSGD, Participant, Synchronous
from nnlo_common.protocol._query_messages import MeanQuery
from nnlo_common.testing import Interleaved, MemoryCluster, RandomOrder, train_virtually

TIMEOUT_S = 180.0
ALGORITHMS = {
    "downpour": Downpour(),
    "lag": Downpour(lag=2),
    "synchronous": Synchronous(),
    "backup": Synchronous(backup=1),
    "rounds": LocalSGD(every=2),
    "lock": GEM(learning_rate=0.1),
}


def run(algorithm, servers=1, **options):
    center = SGD(0.1) if algorithm.optimizer_runs == "center" else None
    return train_virtually(
        algorithm,
        lambda x, rank: x * rank - 1,
        [np.ones(2, "f4") for _ in range(servers)],
        workers=3,
        steps=4,
        servers=servers,
        optimizer=center,
        local=lambda: SGD(0.05),
        **options,
    )


@pytest.mark.parametrize("handled", range(9))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_dropped_worker_is_refused_and_the_others_finish(name, handled):
    result = run(ALGORITHMS[name], drops={2: handled})
    (server,) = result.servers
    assert server.finished
    assert [server.peers[rank].standing.name for rank in (1, 3)] == ["LEFT", "LEFT"]
    if server.peers[2].standing.name == "LEFT":  # it had done everything before
        assert result.refused == []
        return
    assert server.peers[2].standing.name == "LOST"
    assert [(error.rank, error.server) for error in result.refused] in ([(2, 0)], [])
    # Its last message may have been one that gets no answer.
    assert result.refused or result.workers[1].shard_clients[0].phase.name == "LEFT"


@pytest.mark.parametrize("name", ["downpour", "synchronous", "rounds", "lock"])
@pytest.mark.parametrize("handled", [0, 1, 2, 5])
def test_the_centre_is_that_of_a_training_in_which_the_worker_died(name, handled):
    dropped = run(ALGORITHMS[name], drops={2: handled})
    died = run(ALGORITHMS[name], losses={2: handled})
    assert dropped.center.tobytes() == died.center.tobytes()
    assert dropped.servers[0].rule.clock == died.servers[0].rule.clock


@pytest.mark.parametrize("schedule", [Interleaved(3), RandomOrder(1), RandomOrder(2)])
@pytest.mark.parametrize("handled", range(0, 13, 2))
def test_several_servers_drop_a_worker_in_the_middle_of_its_messages(schedule, handled):
    result = run(Synchronous(), servers=2, drops={3: handled}, schedule=schedule)
    for server in result.servers:
        assert server.finished
    assert {error.rank for error in result.refused} <= {3}
    first, second = result.servers
    assert first.rule.clock == second.rule.clock == 4


@pytest.mark.parametrize("algorithm", [Downpour(), Synchronous()], ids=["downpour", "synchronous"])
@pytest.mark.parametrize("where", ["a step", "a mean"])
def test_a_rank_that_a_server_drops_is_told_when_it_wakes(algorithm, where):
    """Rank 2 sleeps before a step or a mean, and wakes when the others have made all theirs."""
    worlds, done, told = {}, threading.Barrier(2), threading.Event()

    def drop_who_sleeps(part):
        look = part._stall_detector.look

        def look_again(is_awaited):
            asleep = worlds[2].last == "asleep" and is_awaited(2)
            return [*look(is_awaited), *([2] if asleep else [])]

        part._stall_detector.look = look_again

    def program(world):
        worlds[world.rank] = world
        with Participant(algorithm, [np.ones(3, "f4")], optimizer=SGD(0.1), world=world) as me:
            if world.rank == 0:
                drop_who_sleeps(me._member.part)
            for step, _ in enumerate(me.batches(range(9))):
                if (world.rank, step, where) == (2, 1, "a step"):
                    world.reach("asleep")
                me.step()
            if (world.rank, where) == (2, "a mean"):
                world.reach("asleep")
            me._member.part.ask(MeanQuery(values={"ranks": 1.0}, weight=1.0))
            if world.rank in (1, 3):
                done.wait(TIMEOUT_S)
                woken.set()
                assert told.wait(TIMEOUT_S)
        return me.report()

    def program_that_tells(world):
        try:
            return program(world)
        except DroppedError:
            told.set()
            raise

    with MemoryCluster(4) as cluster:
        woken = cluster.hold(2, "asleep")
        results = cluster.run(program_that_tells, TIMEOUT_S)
    assert isinstance(results[2], DroppedError)
    assert (results[2].rank, results[2].server) == (2, 0)
    (line,) = results[0].lost
    assert re.match(r"rank 2 on \S+, last heard \d+\.\d s ago: [A-Z]+ after step \d; dropped after", line)
    assert results[1].steps == results[3].steps == 3
