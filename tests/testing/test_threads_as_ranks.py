"""Threads as ranks: whatever dies wherever, the others finish or say why, and nothing hangs or stays."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import threadpoolctl

from nnlo_common import (
    EASGD,
    GEM,
    SGD,
    ConfigurationError,
    DiLoCo,
    Downpour,
    LocalSGD,
    Participant,
    PeerLostError,
    Synchronous,
)
from nnlo_common.base._cores import THREAD_VARIABLES
from nnlo_common.cluster.transport._endpoint import Link
from nnlo_common.protocol import Kind, Lost, Message, Received
from nnlo_common.testing import InjectedFault, MemoryCluster
from tests.helpers.threads import flat, no_new_threads, ranks, server_of, train

# Every program waits for others; whoever waits in vain is a failure, and a quick one.
TIMEOUT_S = 180.0


# --- the death of a worker -------------------------------------------------------------------------------

ALGORITHMS = {
    "downpour": Downpour(),
    "pushes": Downpour(n_push=1, n_fetch=9),
    "warm": Downpour(warm_start=2),
    "lag": Downpour(lag=2),
    "synchronous": Synchronous(),
    "backup": Synchronous(backup=1),
    "easgd": EASGD(every=1, beta=0.5),
    "easgd_synchronous": EASGD(every=1, beta=0.5, synchronous=True),
    "localsgd": LocalSGD(every=2),
    "diloco": DiLoCo(every=2),
    "gem": GEM(learning_rate=0.1),
}
STEPS = 4

# Which algorithms, where the victim dies and at which occurrence, and how many of its contributions count.
# The server hears of a death after all that the dead has said; so the numbers are exact.
DEATHS = [
    (["*"], "gather", 1, 0),
    (["*"], "gather", 2, 0),
    (["*"], "send JOIN", 1, 0),
    (["*"], "receive CENTER", 1, 0),
    (["downpour", "easgd", "easgd_synchronous", "warm", "backup", "synchronous"], "send EXCHANGE", 1, 0),
    (["downpour", "easgd", "easgd_synchronous", "warm", "synchronous"], "send EXCHANGE", 3, 2),
    (["downpour", "easgd", "easgd_synchronous", "synchronous"], "receive CENTER", 3, 2),
    (["pushes"], "send PUSH", 2, 1),
    (["pushes"], "receive ACK", 2, 2),
    (["lag"], "send EXCHANGE", 3, 2),
    (["lag"], "receive CENTER", 2, 3),  # of the first exchange, after the third has been opened
    (["localsgd", "diloco"], "send EXCHANGE", 2, 1),
    (["localsgd", "diloco"], "receive CENTER", 3, 2),
    (["gem"], "send LOCK", 2, 1),
    (["gem"], "receive CENTER", 2, 0),  # it has the lock
    (["gem"], "send COMMIT", 1, 0),  # so it has here
    (["gem"], "send COMMIT", 3, 2),
    (["downpour", "synchronous", "easgd_synchronous", "gem"], "send EPOCH", 1, STEPS),
    (["downpour", "synchronous", "easgd_synchronous", "gem", "lag"], "send LEAVE", 1, STEPS),
]
DEATHS = [
    (name, point, occurrence, made)
    for names, point, occurrence, made in DEATHS
    for name in (ALGORITHMS if names == ["*"] else names)
]


def exchanges(algorithm, steps=STEPS):
    """How many contributions a worker makes in so many steps."""
    return steps // getattr(algorithm, "every", 1)


def training(algorithm, steps=STEPS, servers=1, shape=(3,), **roles):
    """A program in which every worker makes so many steps; it returns what its rank has seen."""

    def program(world):
        arrays = [np.ones(shape, "f4") for _ in range(servers)]
        optimizer = None if algorithm.optimizer_runs == "nowhere" else SGD(0.1)
        with Participant(algorithm, arrays, optimizer=optimizer, servers=servers, world=world, **roles) as me:
            train(me, steps * (me.size - servers))
        return server_of(me) or me.report()

    return program


@pytest.mark.parametrize(("name", "point", "occurrence", "made"), DEATHS)
def test_when_a_worker_dies_the_others_go_on_and_all_is_accounted_for(name, point, occurrence, made):
    algorithm, victim = ALGORITHMS[name], 2
    with ranks(4) as cluster:
        cluster.fail(victim, point, occurrence)
        if point == "gather":  # nobody can compare models with the dead
            with pytest.raises(PeerLostError, match=r"rank 2: ended while rank \d waited in gather_text"):
                cluster.run(training(algorithm), TIMEOUT_S)
            return
        results = cluster.run(training(algorithm), TIMEOUT_S)
    server, fault = results[0], results[victim]
    assert isinstance(fault, InjectedFault)
    assert str(fault) == f"rank 2 dies at {point!r}, occurrence {occurrence}"
    for rank in (1, 3):
        assert results[rank].steps == STEPS
        peer = server.peers[rank]
        assert (peer.standing.name, peer.epochs) == ("LEFT", 1)
        assert peer.commits + peer.dropped == exchanges(algorithm)
        assert peer.dropped == 0 or name == "backup"
    dead = server.peers[victim]
    assert dead.standing.name == "LOST"
    assert dead.commits + dead.dropped == made
    assert server.staleness.total() == sum(peer.commits for peer in server.peers.values())
    assert server.finished
    server.validate()


@pytest.mark.parametrize("name", ["synchronous", "easgd_synchronous", "localsgd"])
def test_a_synchronous_round_shrinks_to_those_who_are_left(name):
    """The dead worker's part of the round that it died in is in no commit: the numbers are exact."""
    with ranks(4) as cluster:
        cluster.fail(2, "send EXCHANGE", 2)
        server = cluster.run(training(ALGORITHMS[name]), TIMEOUT_S)[0]
    rounds = exchanges(ALGORITHMS[name])
    assert server.rule.clock == rounds
    assert dict(server.staleness) == {0: 3 + 2 * (rounds - 1)}


def test_all_workers_but_one_may_die():
    with ranks(4) as cluster:
        cluster.fail(1, "send JOIN")
        cluster.fail(3, "send EXCHANGE", 2)
        results = cluster.run(training(Synchronous()), TIMEOUT_S)
    assert [type(result).__name__ for result in results] == [
        "Server",
        "InjectedFault",
        "TrainingReport",
        "InjectedFault",
    ]
    assert results[0].rule.clock == STEPS


def test_when_every_worker_has_died_the_job_ends_and_says_so():
    with ranks(3) as cluster:
        cluster.fail(1, "send EXCHANGE", 2)
        cluster.fail(2, "send JOIN")
        with pytest.raises(PeerLostError, match="the last worker has died"):
            cluster.run(training(Downpour()), TIMEOUT_S)


def test_who_waits_after_an_epoch_pauses_with_the_server_also_where_a_death_ends_it():
    """One has ended the epoch and asks to pause; the server has not, as the other still trains, and dies."""
    seen, waiting = [], threading.Event()

    def program(world):
        with Participant(Downpour(), [np.ones(3, "f4")], optimizer=SGD(0.1), world=world) as me:
            part = me._member.part
            if server := server_of(me):
                ask = server.answer_pauses

                def answer_pauses():
                    if server.pauses.waiting:
                        waiting.set()
                    return ask()

                server.answer_pauses = answer_pauses
                part.keeper = SimpleNamespace(all_pause=lambda: seen.append(ended), settle=lambda: None)
                ended = False
                list(me.batches([]))
                ended = True
                return part.pause()
            for _ in me.batches(range(2)):
                assert world.rank == 1 or waiting.wait(TIMEOUT_S)
                me.step()
            return part.pause()

    with ranks(3) as cluster:
        cluster.fail(2, "send EXCHANGE", 1)
        results = cluster.run(program, TIMEOUT_S)
    assert results[:2] == [True, True]
    assert seen == [True]


@pytest.mark.parametrize(("point", "made"), [("send EXCHANGE", (1, 2)), ("receive CENTER", (1, 1))])
def test_with_several_servers_each_does_without_the_dead(point, made):
    """The victim dies between its messages to the two: the first has heard its second gradient."""
    with ranks(5) as cluster:
        cluster.fail(3, point, 4)
        results = cluster.run(training(Synchronous(), servers=2), TIMEOUT_S)
    assert isinstance(results[3], InjectedFault)
    assert [results[rank].steps for rank in (2, 4)] == [STEPS, STEPS]
    for server in results[:2]:
        assert server.rule.clock == STEPS
        assert server.peers[3].standing.name == "LOST"
        server.validate()
    assert results[0].peers[3].commits in made  # the round may have been complete before the death
    assert results[1].peers[3].commits == made[0]


# --- the death of a server -------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["gather", "receive JOIN", "send CENTER", "receive EXCHANGE"])
@pytest.mark.parametrize("name", ["downpour", "synchronous", "lag", "warm"])
def test_when_the_server_dies_every_worker_says_so(name, point):
    said = {}

    def program(world):
        try:
            training(ALGORITHMS[name], heir=False)(world)
        except PeerLostError as error:
            said[world.rank] = error.rank
            raise

    with ranks(3) as cluster:
        cluster.fail(0, point)
        with pytest.raises(PeerLostError, match="rank 0: ") as loss:
            cluster.run(program, TIMEOUT_S)
    assert said == {1: 0, 2: 0}
    assert loss.value.__notes__[0].startswith("on rank 1 of 3, last at ")


@pytest.mark.parametrize("point", ["receive JOIN", "receive EXCHANGE", "send PULL"])
def test_when_one_of_several_servers_dies_the_other_does_not_wait_for_its_shard(point):
    """At the pull the workers have gone, or wait for nothing: only the other server can notice."""
    with ranks(4) as cluster:
        cluster.fail(1, point)
        with pytest.raises(PeerLostError, match="rank 1: ") as loss:
            cluster.run(training(Downpour(), servers=2), TIMEOUT_S)
    assert loss.value.__notes__[0].startswith("on rank 0 of 4")


# --- errors and time limits ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["before", "joined", "after"])
def test_an_error_on_one_rank_ends_all_and_names_it(rank, when):
    error, ended = ValueError("no such sample"), {}
    # A server that has begun serves who has joined until all have: none is to have left by then.
    both = threading.Barrier(2 if (when, rank) == ("joined", 0) else 1)

    def bad(world, now):
        if (world.rank, now) == (rank, when):
            raise error

    def program(world):
        try:
            bad(world, "before")
            with Participant(Downpour(), [np.ones(3, "f4")], optimizer=SGD(0.1), world=world) as me:
                bad(world, "joined")
                train(me, 8, before_step=lambda step: step or both.wait(TIMEOUT_S))
            bad(world, "after")
        except Exception as caught:
            ended[world.rank] = caught
            raise

    with ranks(3) as cluster, pytest.raises(ValueError, match="no such sample") as raised:
        cluster.run(program, TIMEOUT_S)
    assert raised.value is error
    (note,) = error.__notes__
    assert note.startswith(f"on rank {rank} of 3, last at '{'start' if when == 'before' else ''}")
    others = [ended[other] for other in ended if other != rank]
    assert all(isinstance(other, PeerLostError) for other in others)
    if when == "before" or (when, rank) == ("joined", 0):
        assert len(others) == 2
    for other in others:
        assert other.rank != rank or "failed" in str(other) or "gather" in str(other)


def test_sys_exit_in_a_rank_is_an_error_too():
    def program(world):
        if world.rank == 1:
            world.abort(3)
        world.gather_text("")

    with ranks(2) as cluster, pytest.raises(SystemExit) as raised:
        cluster.run(program, TIMEOUT_S)
    assert raised.value.code == 3


def test_a_time_limit_names_every_rank_that_has_not_ended_and_where_it_was():
    def program(world):
        world.reach("reading the data")
        if world.rank:
            world.gather_text("")
        else:
            world.open([Link(1, 0, 1, 1, serving=True)]).receive()

    with ranks(4) as cluster:
        cluster.hold(2, "reading the data")
        with pytest.raises(PeerLostError) as late:
            cluster.run(program, timeout_s=0.05)
    assert late.value.rank == 0
    assert str(late.value) == (
        "rank 0: has not ended after 0.05 s: rank 0 last at 'reading the data', rank 1 last at 'gather', "
        "rank 2 last at 'reading the data', rank 3 last at 'gather'"
    )


def test_what_failed_is_told_although_another_rank_hangs():
    """A rank that never looks at its messages cannot be ended; the reason must not be lost over that."""
    stuck = threading.Event()

    def program(world):
        if world.rank == 1:
            raise ValueError("no such sample")
        world.reach("computing")
        stuck.wait(0.2)

    with ranks(2) as cluster, pytest.raises(PeerLostError, match="last at 'computing'") as late:
        cluster.run(program, timeout_s=0.05)
    assert isinstance(late.value.__cause__, ValueError)


# --- gates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 2])
def test_gates_put_events_in_the_wanted_order(first):
    second = 3 - first
    order = []

    def program(world):
        for turn in range(2):
            world.reach("turn")
            order.append((turn, world.rank))
            gates.pop(0).set()

    with ranks(3) as cluster:
        # 0 first; then the two others, one after the other, twice.
        gates = [cluster.hold(rank, "turn", turn) for turn in (1, 2) for rank in (0, first, second)]
        gates.append(threading.Event())
        gates.pop(0).set()
        cluster.run(program, TIMEOUT_S)
    assert order == [(turn, rank) for turn in (0, 1) for rank in (0, first, second)]


def test_a_held_worker_is_as_stale_as_was_wanted():
    """Rank 1 sends its first gradient after rank 2 has made all its steps, and the rest afterwards."""

    def program(world):
        with Participant(Downpour(), [np.ones(3, "f4")], optimizer=SGD(0.1), world=world) as me:
            if me.rank == 1:
                joined.set()
            train(me, 2 * STEPS)
            if me.rank == 2:
                late.set()
        return me.report(), server_of(me) and dict(server_of(me).staleness)

    with ranks(3) as cluster:
        late, joined = cluster.hold(1, "send EXCHANGE"), cluster.hold(2, "send EXCHANGE")
        report, staleness = cluster.run(program, TIMEOUT_S)[0]
    assert staleness == {0: 2 * STEPS - 1, STEPS: 1}
    assert (report.exchanges, report.dropped, report.mean_staleness) == (2 * STEPS, 0, 0.5)


def test_leaving_the_cluster_opens_every_gate():
    with MemoryCluster(1) as cluster:
        gates = [cluster.hold(0, "never"), cluster.hold(0, "never", 2)]
        assert cluster.hold(0, "never") is gates[0]
        assert gates[0] is not gates[1]
    assert all(gate.is_set() for gate in gates)


def test_an_error_opens_every_gate():
    def program(world):
        if world.rank == 1:
            raise ValueError("no such sample")
        world.reach("held")

    with ranks(2) as cluster:
        cluster.hold(0, "held")
        with pytest.raises(ValueError, match="no such sample"):
            cluster.run(program, TIMEOUT_S)


# --- points that are not reached -------------------------------------------------------------------------


def reaches_thrice(world):
    if world.rank == 1:
        for _ in range(3):
            world.reach("turn")
        world.reach("end")


@pytest.mark.parametrize(("ask", "purpose"), [(MemoryCluster.fail, "die"), (MemoryCluster.hold, "wait")])
@pytest.mark.parametrize(
    ("where", "found"),
    [
        ((1, "corner"), "at 'corner', occurrence 1, .* it reached 'turn' (3x), 'end' (1x)"),
        ((1, "turn", 4), "at 'turn', occurrence 4, .* it reached 'turn' (3x), 'end' (1x)"),
        ((0, "turn"), "at 'turn', occurrence 1, .* it reached no point"),
    ],
    ids=["wrong name", "too late", "another rank"],
)
def test_a_point_that_was_asked_for_has_to_be_reached(ask, purpose, where, found):
    found = found.replace("(", r"\(").replace(")", r"\)")
    with ranks(2) as cluster:
        ask(cluster, *where)
        for _ in range(2):  # asked of every run
            with pytest.raises(ConfigurationError, match=f"rank {where[0]} was to {purpose} {found}"):
                cluster.run(reaches_thrice, TIMEOUT_S)


def test_a_point_may_be_missed_where_that_was_said():
    with ranks(2) as cluster:
        cluster.fail(1, "corner", may_miss=True)
        cluster.hold(0, "turn", may_miss=True)
        assert cluster.run(reaches_thrice, TIMEOUT_S) == [None, None]
        cluster.hold(0, "turn")  # who asks for more gets it
        with pytest.raises(ConfigurationError, match="rank 0 was to wait at 'turn'"):
            cluster.run(reaches_thrice, TIMEOUT_S)


def test_every_missed_point_is_named_and_what_to_do():
    with ranks(2) as cluster:
        cluster.fail(1, "one")
        cluster.hold(0, "two")
        with pytest.raises(ConfigurationError) as missed:
            cluster.run(reaches_thrice, TIMEOUT_S)
    first, second, remedy = str(missed.value).splitlines()
    assert first.startswith("rank 1 was to die at 'one'")
    assert second.startswith("rank 0 was to wait at 'two'")
    assert remedy == "name a point that is reached, or pass may_miss=True"


def test_a_run_that_fails_says_so_first_and_notes_the_missed_points():
    def program(world):
        if world.rank == 1:
            raise ValueError("no such sample")

    stuck = threading.Event()
    with ranks(2) as cluster:
        cluster.fail(0, "never")
        with pytest.raises(ValueError, match="no such sample") as raised:
            cluster.run(program, TIMEOUT_S)
        with pytest.raises(PeerLostError, match=r"has not ended after 0.05 s") as late:
            cluster.run(lambda world: stuck.wait(0.2), timeout_s=0.05)
    for error in (raised.value, late.value):
        assert error.__notes__[-1].startswith("rank 0 was to die at 'never'")


@pytest.mark.parametrize("ask", [MemoryCluster.fail, MemoryCluster.hold])
@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ((2, "turn"), "rank=2: the cluster has the ranks 0 to 1"),
        ((-1, "turn"), "rank=-1: must be a whole number of at least 0"),
        ((1.0, "turn"), "rank=1.0: must be a whole number"),
        ((1, "turn", 0), "occurrence=0: must be a whole number of at least 1"),
    ],
)
def test_a_point_that_cannot_be_is_refused_at_once(ask, where, problem):
    with pytest.raises(ConfigurationError, match=problem):
        ask(MemoryCluster(2), *where)


@pytest.mark.parametrize("size", [0, -1, 2.0, None])
def test_a_cluster_of_no_ranks_is_refused(size):
    with pytest.raises(ConfigurationError, match=f"size={size}: must be a whole number of at least 1"):
        MemoryCluster(size)


def test_ranks_that_are_threads_leave_the_threads_of_the_process_alone(monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    pools = threadpoolctl.threadpool_info()
    with ranks(3) as cluster:
        cluster.run(training(Downpour()), TIMEOUT_S)
    assert not [name for name in THREAD_VARIABLES if name in os.environ]
    assert threadpoolctl.threadpool_info() == pools


# --- the door itself -------------------------------------------------------------------------------------


def test_every_rank_gets_the_texts_of_all_in_their_order_again_and_again():
    with ranks(5) as cluster:
        told = cluster.run(lambda world: [world.gather_text(f"{turn}é" * world.rank) for turn in range(20)])
    assert told == [[[f"{turn}é" * rank for rank in range(5)] for turn in range(20)]] * 5


def test_who_has_ended_is_not_waited_for():
    """Neither the one that ends before the others ask, nor one that takes part once and not again."""

    def program(world):
        world.gather_text("all")
        if world.rank != 2:
            world.gather_text("two only")

    with ranks(3) as cluster, pytest.raises(PeerLostError, match="rank 2: ended while rank 0 waited"):
        cluster.run(program, TIMEOUT_S)


def message(kind=Kind.PUSH, sequence=1, vector=None, sender=1):
    return Message(kind, sender, sequence, clock=7, pulled_at=3, scalar=0.5, vector=vector)


def test_a_message_is_a_copy_and_comes_whole_in_order_and_through_its_own_door():
    vector = np.arange(3, dtype="f4")

    def program(world):
        doors = [world.open([Link(1 - world.rank, 0, 4, 2, serving=world.rank == 0)]) for _ in range(2)]
        if world.rank == 1:
            for sequence in (1, 2):
                doors[1].send(0, message(sequence=sequence, vector=vector))
                vector[:] = 9
            doors[0].send(0, message(Kind.LEAVE))
        world.gather_text("sent")
        if world.rank == 1:
            return None
        events = [doors[1].receive(), doors[1].receive(0), doors[0].receive(0), doors[0].receive(0)]
        for door in doors:
            door.close()
        return events

    with ranks(2) as cluster:
        first, second, leaving, none = cluster.run(program, TIMEOUT_S)[0]
    assert none is None
    assert isinstance(leaving, Received)
    assert (leaving.message.kind, leaving.message.vector) == (Kind.LEAVE, None)
    for event, numbers in ((first, [0, 1, 2]), (second, [9, 9, 9])):
        assert event.message.vector.tolist() == numbers
        assert np.shares_memory(event.message.vector, event.frame.vector)
        assert (event.message.clock, event.message.pulled_at, event.message.share) == (7, 3, 0.5)
    assert [first.message.sequence, second.message.sequence] == [1, 2]


def test_who_opens_a_door_late_hears_of_an_earlier_death():
    def program(world):
        if world.rank == 1:
            world.reach("dying")
        world.reach("opening")
        return world.open([Link(1, 0, 1, 1, serving=True)]).receive()

    with ranks(2) as cluster:
        cluster.fail(1, "dying")
        gate = cluster.hold(0, "opening")
        watcher = threading.Timer(0, lambda: (wait_for_end(cluster, 1), gate.set()))
        watcher.start()
        assert cluster.run(program, TIMEOUT_S)[0] == Lost(1)
        watcher.join()


def wait_for_end(cluster, rank):
    with cluster._changed:
        assert cluster._changed.wait_for(lambda: rank in cluster._ended, TIMEOUT_S)


def test_a_second_run_knows_nothing_of_the_first():
    """Neither its messages nor its dead nor how often a point was reached."""
    died = []

    def program(world):
        door = world.open([Link(1 - world.rank, 0, 1, 1, serving=world.rank == 0)])
        if world.rank == 1:
            door.send(0, message(Kind.LEAVE, sequence=len(died)))
            return world.reach("end")
        return [door.receive(), door.receive()]

    with ranks(2) as cluster:
        cluster.fail(1, "end")
        for _ in range(3):
            (letter, loss), fault = cluster.run(program, TIMEOUT_S)
            assert (letter.message.sequence, loss) == (len(died), Lost(1))
            died.append(fault)
    assert [type(fault) for fault in died] == [InjectedFault] * 3


def test_participants_one_after_another():
    """Each has a door of its own, so that their messages do not mix."""

    def program(world):
        ended = []
        for value in (1, 2, 4):
            arrays = [np.full(3, value, "f4")]
            with Participant(Downpour(), arrays, optimizer=SGD(0.5), world=world) as me:
                train(me, 3)
            ended.append(flat(me.parameters))
        return ended

    with ranks(2) as cluster:
        served, worked = cluster.run(program, TIMEOUT_S)
    for mine, theirs in zip(served, worked, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    alone = []
    for value in (1, 2, 4):
        with Participant(Downpour(), [np.full(3, value, "f4")], optimizer=SGD(0.5)) as me:
            me.rank = 1  # the noise of the worker
            train(me, 3)
        alone.append(flat(me.parameters))
    assert np.array_equal(alone, worked)


def test_the_check_for_threads_that_stay_can_fail():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    with pytest.raises(AssertionError), no_new_threads():
        thread.start()
    stop.set()
    thread.join()
