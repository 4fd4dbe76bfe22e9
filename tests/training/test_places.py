"""Spares that no server needs train in the places of dead workers, in one process and by mpiexec."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from nnlo_common import (
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    Adam,
    DiLoCo,
    Downpour,
    Frame,
    LocalSGD,
    Participant,
    PeerLostError,
    Steady,
    Synchronous,
)
from nnlo_common.data import Leases
from nnlo_common.protocol import Kind, Message, Places, Received, Server, Shard, Standing
from nnlo_common.protocol._query_messages import MeanQuery, PlaceAnswer, PlaceQuery
from nnlo_common.testing import MemoryCluster
from nnlo_common.training._spare_calls import SpareCalls
from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

ALGORITHMS = {
    "downpour": (Downpour(), Adam(0.05)),
    "lag": (Downpour(lag=1), SGD(0.1)),
    "packed": (Downpour(wire="int8"), SGD(0.1)),
    "easgd": (EASGD(every=2), SGD(0.2)),
    "eamsgd": (EAMSGD(every=2, learning_rate=0.1), None),
    "lock": (GEM(learning_rate=0.01), None),
    "synchronous": (Synchronous(), SGD(0.1)),
    "backup": (Synchronous(backup=1), SGD(0.1)),
    "rounds": (LocalSGD(every=3), SGD(0.1)),
    "diloco": (DiLoCo(every=3), SGD(0.1)),
}
EPOCHS, STEPS, WORKERS = 4, 7, 3
DIES, TIMEOUT_S = 2, 60.0  # the worker's rank


pytestmark = pytest.mark.usefixtures("_copies_at_once")


def train(name, *faults, spares=2, servers=1, epochs=EPOCHS, algorithms=ALGORITHMS, reached=None):
    """Train on numbers whose mean is the solution; return what each rank has at the end."""
    algorithm, optimizer = algorithms[name]
    ranks = {"servers": servers, "spares": spares}

    def program(world):
        pieces = [np.zeros(3, "f4") for _ in range(servers)]  # one for each server
        me = Participant(algorithm, pieces, optimizer=optimizer, world=world, **ranks)
        batches, centers, means = [], [], []
        with me:
            for epoch in range(epochs):
                batches.append([])
                for batch in me.batches(range(WORKERS * STEPS)):
                    for gradient, point in zip(me.gradients, me.point, strict=True):
                        gradient[:] = point - batch
                    me.step()
                    batches[-1].append(batch)
                part = me._part  # another one, if this rank takes a dead one's place
                centers.append(np.concatenate(me.parameters))
                answer = part.ask(MeanQuery(values={"epoch": float(epoch)}, weight=1.0, epochs=epoch + 1))
                means.append(answer.means["epoch"])
        living = None if me._member.server is None else me._member.server.rule
        return me.role, batches, centers, means, me.report().lost, living, np.concatenate(me.parameters)

    with MemoryCluster(servers + WORKERS + spares) as cluster:
        for rank, point, occurrence in faults:
            cluster.fail(rank, point, occurrence, may_miss=True)
        results = cluster.run(program, TIMEOUT_S)
        if reached is not None:
            reached.update(cluster.points._reached)
        return results


def check(results, *, dead, roles):
    """Check who has died, and that the others made all epochs, those that train with batches."""
    assert {rank for rank, result in enumerate(results) if isinstance(result, Exception)} == dead
    living = {rank: result for rank, result in enumerate(results) if rank not in dead}
    assert {rank: result[0] for rank, result in living.items()} == roles
    for role, batches, centers, means, *_ in living.values():
        assert means == [float(epoch) for epoch in range(EPOCHS)], role
        assert np.isfinite(centers).all()
        assert any(batches) == role.startswith("worker"), role


def joined_in(result):
    """The first epoch with batches, from 0."""
    return next(epoch for epoch, batches in enumerate(result[1]) if batches)


def batches_of(results, epoch):
    return sorted(one for result in results if not isinstance(result, Exception) for one in result[1][epoch])


ROLES = {0: "server 0", 1: "worker 0", 3: "worker 2", 4: "spare 0", 5: "worker 1"}


@pytest.mark.parametrize(
    ("point", "occurrence", "epoch"),
    [("send EPOCH", 1, 1), ("send EPOCH", 2, 2), ("receive ANSWER", 1, 2), ("receive ANSWER", 2, 3)],
)
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.sampled(16)
def test_from_the_next_epoch_on_a_spare_has_the_dead_workers_share(name, point, occurrence, epoch):
    results = train(name, (DIES, point, occurrence))
    check(results, dead={DIES}, roles=ROLES)
    assert joined_in(results[5]) == epoch
    for one in range(epoch, EPOCHS):
        assert batches_of(results, one) == list(range(WORKERS * STEPS))
        assert results[5][1][one] == list(range(1, WORKERS * STEPS, WORKERS))
    died, took = results[0][4]
    assert died.startswith(f"rank {DIES} on ")
    host = died.split(",")[0].split(" on ")[1]
    assert took == f"rank 5 on {host} takes the place of worker 1 (rank {DIES}) from epoch {epoch + 1} on"
    assert results[4][4] == ()


def test_the_centre_of_later_epochs_is_that_of_as_many_workers_as_before():
    """Computed without nnlo: each step is the mean of three gradients again, that of the spare among them."""
    results = train("synchronous", (DIES, "send EPOCH", 1))
    check(results, dead={DIES}, roles=ROLES)
    for epoch in range(joined_in(results[5]) + 1, EPOCHS):
        center = results[0][2][epoch - 1].astype("f8")
        for step in range(STEPS):
            center -= 0.1 * np.mean([center - (WORKERS * step + worker) for worker in range(WORKERS)], axis=0)
        np.testing.assert_allclose(results[0][2][epoch], center, rtol=1e-5)
        assert results[5][2][epoch].tobytes() == results[3][2][epoch].tobytes()


def test_a_rule_that_measures_hears_of_the_spare():
    results = train("steady", (DIES, "send EPOCH", 1), algorithms={"steady": (Steady(), SGD(0.1))})
    assert results[5][0] == "worker 1"
    assert any(results[5][1])
    assert results[0][5].living == WORKERS


@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_the_only_spare_stays_for_the_server(name):
    results = train(name, (DIES, "send EPOCH", 1), spares=1)
    check(results, dead={DIES}, roles={0: "server 0", 1: "worker 0", 3: "worker 2", 4: "spare 0"})
    assert len(results[0][4]) == 1


@pytest.mark.parametrize("name", ["synchronous", "rounds"])
def test_a_spare_for_workers_changes_no_bit_while_nobody_dies(name):
    one, two = train(name, spares=1), train(name, spares=2)
    for rank in range(1 + WORKERS):
        assert np.array(one[rank][2]).tobytes() == np.array(two[rank][2]).tobytes()
        assert one[rank][1] == two[rank][1]
    assert two[5][0] == "spare 1"


def test_two_spares_take_the_places_of_two_workers():
    results = train("downpour", (2, "send EPOCH", 1), (3, "send EPOCH", 2), spares=3)
    roles = {0: "server 0", 1: "worker 0", 4: "spare 0", 5: "worker 2", 6: "worker 1"}
    check(results, dead={2, 3}, roles=roles)
    assert batches_of(results, EPOCHS - 1) == list(range(WORKERS * STEPS))


@pytest.mark.parametrize("name", ["downpour", "easgd", "synchronous", "rounds"])
def test_a_place_is_free_again_once_the_spare_in_it_is_dead(name):
    results = train(name, (DIES, "send EPOCH", 1), (6, "send EPOCH", 1), spares=3)
    roles = {0: "server 0", 1: "worker 0", 3: "worker 2", 4: "spare 0", 5: "worker 1"}
    check(results, dead={DIES, 6}, roles=roles)
    assert batches_of(results, EPOCHS - 1) == list(range(WORKERS * STEPS))
    took = [line.split(" on ")[0] for line in results[0][4] if "takes the place of worker 1 (rank 2)" in line]
    assert took == ["rank 6", "rank 5"]


@pytest.mark.parametrize("point", ["send PLACE", "send JOIN", "receive CENTER", "send EXCHANGE"])
@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_the_spare_may_die_while_it_joins(name, point):
    occurrence = 2 if point == "receive CENTER" else 1  # the first was a spare's
    results = train(name, (DIES, "send EPOCH", 1), (5, point, occurrence))
    check(results, dead={DIES, 5}, roles={0: "server 0", 1: "worker 0", 3: "worker 2", 4: "spare 0"})


LATE = [
    ("receive JOIN", 4),
    ("send ANSWER", 7),
    ("send ANSWER", 9),
    ("send CENTER", 24),
    ("receive EXCHANGE", 28),
    ("receive EPOCH", 5),
    ("receive ASK", 17),
    ("send COPY", 40),
    ("receive PULL", 3),
    ("receive LEAVE", 1),
    ("receive LEAVE", 3),
]


@pytest.mark.parametrize(("point", "occurrence"), LATE)
@pytest.mark.parametrize("name", ["downpour", "lag", "packed", "easgd", "synchronous", "rounds"])
@pytest.mark.sampled(20)
def test_then_the_server_may_die_anywhere(name, point, occurrence):
    """The spare that is left serves, also if it has no copy that knows of the new worker."""
    results = train(name, (DIES, "send EPOCH", 1), (0, point, occurrence))
    serves = isinstance(results[0], Exception)
    takes = ("server 0", "spare 0") if serves else ("spare 0",)  # after the last word of the dead one
    assert results[4][0] in takes
    joined = results[5][0].startswith("worker")
    assert joined or serves  # else this spare stays for the server
    check(
        results,
        dead={DIES, 0} if serves else {DIES},
        roles={
            **({} if serves else {0: "server 0"}),
            1: "worker 0",
            3: "worker 2",
            4: results[4][0],
            5: "worker 1" if joined else "spare 1",
        },
    )
    if joined:
        for epoch in range(joined_in(results[5]), EPOCHS):
            assert batches_of(results, epoch) == list(range(WORKERS * STEPS))


def test_a_spare_that_trains_serves_nobody():
    with pytest.raises(PeerLostError, match="a server of the centre has died"):
        train("downpour", (DIES, "send EPOCH", 1), (0, "receive EPOCH", 5), (4, "send CENTER", 5))


def test_the_first_spares_death_keeps_the_next_for_the_server():
    results = train("downpour", (4, "receive COPY", 3), (DIES, "send EPOCH", 1))
    check(results, dead={DIES, 4}, roles={0: "server 0", 1: "worker 0", 3: "worker 2", 5: "spare 1"})


# -- several servers --------------------------------------------------------------------------------------

#: Of two servers: three workers, and two spares of each; the second of each may train.
TWO = {"servers": 2, "spares": 4}
NO_LOCK = [name for name in ALGORITHMS if name not in ("lock", "backup")]


def of_two(*, dead=(), **others):
    """The roles if worker 1, rank 3, has died and rank 8 is in its place."""
    roles = {0: "server 0", 1: "server 1", 2: "worker 0", 4: "worker 2", 5: "spare 0", 6: "spare 1"}
    roles |= {7: "spare 2", 8: "worker 1"} | {int(name[1:]): role for name, role in others.items()}
    return {rank: role for rank, role in roles.items() if rank not in dead}


@pytest.mark.parametrize(("point", "occurrence", "epoch"), [("send EPOCH", 1, 1), ("send EPOCH", 3, 2)])
@pytest.mark.parametrize("name", NO_LOCK)
def test_a_second_spare_of_several_servers_has_the_dead_workers_share(name, point, occurrence, epoch):
    results = train(name, (3, point, occurrence), **TWO)
    check(results, dead={3}, roles=of_two())
    assert joined_in(results[8]) == epoch
    for one in range(epoch, EPOCHS):
        assert batches_of(results, one) == list(range(WORKERS * STEPS))
    for result in results[:2] + results[4:]:
        if result[0].startswith(("server", "spare")):
            assert np.array(result[2]).tobytes() == np.array(results[0][2]).tobytes()
    assert len([line for line in results[0][4] if "rank 8" in line and "takes the place of" in line]) == 1
    assert not any("takes the place" in line for line in results[1][4])


@pytest.mark.parametrize("name", ["synchronous", "rounds"])
def test_the_second_spares_of_several_servers_change_no_bit_while_nobody_dies(name):
    one, two = train(name, servers=2, spares=2), train(name, **TWO)
    for rank in range(2 + WORKERS):
        assert np.array(one[rank][2]).tobytes() == np.array(two[rank][2]).tobytes()
        assert one[rank][1] == two[rank][1]


def test_each_server_keeps_its_first_spare():
    results = train("downpour", (3, "send EPOCH", 1), servers=2, spares=2)
    check(results, dead={3}, roles={rank: role for rank, role in of_two().items() if rank < 7})


@pytest.mark.parametrize(
    ("point", "occurrence"), [("send PLACE", 1), ("send PLACE", 3), ("send JOIN", 1), ("send JOIN", 2)]
)
@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_the_spare_of_one_of_several_servers_may_die_while_it_joins(name, point, occurrence):
    results = train(name, (3, "send EPOCH", 1), (8, point, occurrence), **TWO)
    roles = of_two(dead={8}, r7="worker 1")
    check(results, dead={3, 8}, roles=roles)
    assert batches_of(results, EPOCHS - 1) == list(range(WORKERS * STEPS))


@pytest.mark.parametrize("name", ["downpour", "synchronous", "rounds"])
def test_a_spare_that_only_a_dead_server_has_called_is_waited_for_by_no_other(name):
    """It dies once it has told the other server, before anyone has a copy of its records."""
    results = train(name, (3, "send EPOCH", 1), (0, "send PULL", 1), **TWO)
    check(results, dead={0, 3}, roles=of_two(dead={0}, r5="server 0"))
    assert batches_of(results, EPOCHS - 1) == list(range(WORKERS * STEPS))


@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_a_spare_that_stays_for_the_servers_now_is_waited_for_by_no_other(name):
    """The first server dies once it has called the second of its two spares, and told the other server."""
    results = train(name, (3, "send EPOCH", 1), (0, "send PULL", 1), servers=2, spares=3)
    roles = {1: "server 1", 2: "worker 0", 4: "worker 2", 5: "server 0", 6: "spare 1", 7: "spare 2"}
    check(results, dead={0, 3}, roles=roles)


def test_who_serves_next_says_whose_place_a_spare_has_taken_if_the_dead_server_has_not():
    """It dies of the spare's request to join, which it would have said it at."""
    results = train("synchronous", (DIES, "send EPOCH", 1), (0, "receive JOIN", WORKERS + 1))
    check(results, dead={0, DIES}, roles={1: "worker 0", 3: "worker 2", 4: "server 0", 5: "worker 1"})
    told = [line for line in results[4][4] if "takes the place" in line]
    epoch = joined_in(results[5]) + 1
    assert len(told) == 1
    assert re.fullmatch(
        rf"rank 5 on \S+ takes the place of worker 1 \(rank {DIES}\) from epoch {epoch} on", told[0]
    )


def test_the_heir_of_another_server_hears_from_the_first_which_spares_are_called():
    """Its copy may be older than the call; the spare itself says so only when it joins."""
    reached = {}
    results = train(
        "synchronous", (3, "send EPOCH", 1), (1, "receive CALL", 1), servers=2, spares=5, reached=reached
    )
    roles = {0: "server 0", 2: "worker 0", 4: "worker 2", 5: "spare 0", 6: "server 1", 7: "spare 2"}
    check(results, dead={1, 3}, roles={**roles, 8: "spare 3", 9: "worker 1"})
    assert reached[6, "receive CALL"] >= 1


@pytest.mark.parametrize(
    "seed", [*range(40), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(40, 600))]
)
@pytest.mark.sampled(4)
def test_whoever_of_several_servers_dies_then_the_others_train_to_the_end(seed):
    """A worker dies, and up to two of the servers, the spares, and who is in the dead worker's place."""
    draw = random.Random(seed)
    name = draw.choice(NO_LOCK)
    reached: dict[tuple[int, str], int] = {}
    train(name, (3, "send EPOCH", 1), **TWO, reached=reached)
    victims = draw.sample([0, 1, 5, 6, 7, 8, 2], draw.randint(1, 2))
    faults = [(3, "send EPOCH", 1)]
    for victim in victims:
        points = {at: times for (rank, at), times in reached.items() if rank == victim and at != "gather"}
        at = draw.choice(sorted(points))
        faults.append((victim, at, draw.randint(1, points[at])))
    try:
        results = train(name, *faults, **TWO)
    except PeerLostError as error:
        unready = "before a spare had a copy" in str(error)
        unheard = {0, 5} <= set(victims) or {1, 6} <= set(victims)  # who took their places trains
        assert unready or unheard, faults
        return
    living = [result for result in results if not isinstance(result, Exception)]
    roles = [result[0] for result in living]
    assert len(set(roles)) == len(roles), faults
    for server in (0, 1):  # a server that dies with its last words needs nobody in its place
        assert f"server {server}" in roles or isinstance(results[server], Exception), faults
    finals = [result[-1] for result in living if result[0].startswith(("server", "spare"))]
    assert all(final.tobytes() == finals[0].tobytes() for final in finals), faults
    for role, batches, _, means, *_ in living:
        assert means == [float(epoch) for epoch in range(EPOCHS)], (role, faults)
        if role.startswith("worker"):
            assert batches[-1], (role, faults)


# -- the records of the server, the answers to spares, and the leases ------------------------------------


def server_of(workers=(1, 2), spares=(3, 4)):
    rule = Downpour().center(np.zeros(2, "f4"), len(workers), SGD(0.1))
    return Server(rule, workers, other_servers=spares)


def test_a_called_spare_is_awaited_and_may_still_fetch_the_centre():
    server = server_of()
    for rank in (1, 2):
        server.handle(Received(Message(Kind.JOIN, rank, 0), Frame(2)))
    server.handle(Received(Message(Kind.LEAVE, 1, 1), Frame(2)))
    assert server.vacant == []  # it left, and is not dead
    server = server_of()
    for rank in (1, 2):
        server.handle(Received(Message(Kind.JOIN, rank, 0), Frame(2)))
    server._without(2)
    assert server.vacant == [2]
    server.call(4, 2, 0)
    assert (server.vacant, server.awaited, server.peers.called()) == ([], 2, [4])
    (answer,) = server.handle(Received(Message(Kind.PULL, 4, 0), Frame(2)))
    assert answer.message.kind is Kind.CENTER
    server.validate()
    assert server.saved_as == {1: 1, 2: 2}  # the dead worker's record, until the spare trains
    join = Message(Kind.JOIN, 4, 0, clock=0, scalar=2.0, stop=True, samples=3)
    (answer,) = server.handle(Received(join, Frame(2)))
    assert (answer.rank, answer.message.kind) == (4, Kind.CENTER)
    peer = server.peers[4]
    assert (peer.standing, peer.views, server.pauses.made) == (Standing.TRAINING, 2, 3)
    assert server.saved_as == {1: 1, 4: 2}
    assert sorted(server.state()["workers"]) == ["1", "2"]
    server.validate()
    heir = server_of()
    heir.take_over(server.copy())
    assert heir.places == {4: 2}
    assert {rank: one.standing for rank, one in heir.peers.items()} == {
        1: Standing.EXPECTED,
        2: Standing.LOST,
        4: Standing.EXPECTED,
    }


def test_another_server_waits_for_a_spare_only_in_pauses_that_the_first_grants_after_it_has_joined():
    """Else others would wait here, in a pause that the spare knows nothing of, for ever."""
    rule = Downpour().center(np.zeros(2, "f4"), 2, SGD(0.1))
    server = Server(rule, (1, 2), rank=9, shard=1, other_servers=(0, 3, 4))

    def handle(kind, rank, sequence, **options):
        message = Message(kind, rank, sequence, shard=1, **options)
        return [one for one in server.handle(Received(message, Frame(2))) if one.message is not None]

    for rank in (1, 2):
        handle(Kind.JOIN, rank, 0)
    server._without(2)
    server.call(4, 2, 0)
    handle(Kind.JOIN, 4, 0, stop=True, samples=3, pause=True)  # the first server had granted three pauses
    assert (server.peers[4].standing, server.pauses.made) == (Standing.TRAINING, 0)
    server.pauses.before_epoch = 9
    (answer,) = handle(Kind.PAUSE, 1, 0, clock=3)
    assert (answer.rank, answer.message.kind, answer.message.pauses) == (1, Kind.PAUSED, 3)
    assert server.saved_as == {1: 1, 2: 2}  # it is not part of what is saved in that pause
    assert handle(Kind.PAUSE, 1, 0, clock=4, scalar=2.0) == []  # granted to two
    answers = handle(Kind.PAUSE, 4, 0, clock=4, scalar=2.0)
    assert sorted(one.rank for one in answers) == [1, 4]
    assert server.saved_as == {1: 1, 4: 2}
    server.validate()


def test_a_called_spare_that_does_not_come_is_waited_for_no_more():
    server = server_of()
    for rank in (1, 2):
        server.handle(Received(Message(Kind.JOIN, rank, 0), Frame(2)))
    server._without(2)
    server.call(4, 2, 1)
    server.handle(Received(Message(Kind.EPOCH, 1, 1), Frame(2)))
    server.handle(Received(Message(Kind.EPOCH, 1, 2), Frame(2)))
    assert not server.peers.have_finished(2)
    server.dismiss(4)
    assert server.peers.have_finished(2)
    assert (server.places, server.vacant) == ({}, [2])
    server.validate()


def test_what_a_dead_server_had_not_copied_a_spare_says_itself():
    server = server_of()
    before = server.copy()
    heir = server_of()
    heir.seat(4, 2, 3)
    heir.take_over(before)
    assert (heir.places, heir.peers[4].standing, heir.peers[4].epochs) == ({4: 2}, Standing.EXPECTED, 3)
    assert heir.awaited == 3


def test_a_spare_is_answered_once_the_epoch_is_decided():
    places = Places(0)
    places.pauses, called = lambda: 5, {}
    places.place_of = called.get
    stays = PlaceAnswer(place=None, pauses=5)
    assert places.ask(4, PlaceQuery(epochs=0)) == [(4, stays)]
    assert places.ask(4, PlaceQuery(epochs=2)) == []
    assert places.decide(1) == []
    called[4] = (2, 2)
    assert places.decide(2) == [(4, PlaceAnswer(place=2, pauses=5))]
    assert places.told == {4}
    called[4] = (2, 4)  # it is behind, and a spare until then
    assert places.ask(4, PlaceQuery(epochs=1)) == [(4, stays)]
    assert places.ask(0, PlaceQuery(epochs=9)) == [(0, stays)]  # the rank that serves takes no place
    assert places.ask(4, PlaceQuery(epochs=9)) == []
    assert places.gone(4, lost=True) == []
    assert places.decide(9) == []


def test_a_ledger_leases_to_one_more_rank():
    leases = Leases(20, workers=[1, 2], unit=5)
    leases.ask(1, epoch=0)
    leases.lost(2)
    leases.admit(4)
    leases.validate()
    first = leases.ask(4, epoch=0)
    assert (first.epoch, first.start, first.stop) == (0, 5, 10)
    leases.leave(4)
    leases.admit(4)  # called again
    assert leases.living == (1, 4)
    leases.validate()


class Sent:
    """An endpoint that keeps what is sent."""

    def __init__(self):
        self.messages = []

    def send(self, rank, message, frame=None, fill=None):
        self.messages.append((rank, message))


def calls_of(shards, service=None):
    server = Server(Downpour().center(np.zeros(2, "f4"), 2, SGD(0.1)), (1, 2), rank=9, shard=1)
    sent, moved = Sent(), []
    calls = SpareCalls(
        sent,
        server,
        shards=lambda: {one.index: one for one in shards},
        service=lambda: service,
        moved=lambda: moved.append(1),
    )
    return calls, server, sent, moved


def test_who_takes_over_hears_which_spares_are_called_and_which_are_not():
    other = Shard(0, 5, slice(0, 2), (6, 7))
    calls, server, sent, _ = calls_of([other, Shard(1, 9, slice(2, 4), (8, 10))])
    server._without(2)
    server.call(7, 2, 3)
    server.seat(10, 2, 1)  # it trains: nobody tells that but itself
    calls.tell_all([other])
    told = {message.spare: (to, message.takes_back) for to, message in sent.messages}
    assert told == {6: (5, True), 7: (5, False), 8: (5, True)}
    (call,) = [message for _, message in sent.messages if message.spare == 7]
    assert (call.kind, call.place, call.epochs, call.shard) == (Kind.CALL, 2, 3, 0)


def test_what_a_spare_says_itself_counts_more_than_what_servers_say():
    calls, server, _, moved = calls_of([Shard(1, 9, slice(0, 2), (8, 10))])
    server._without(2)
    call = Message(Kind.CALL, 0, 0, 3, 2, shard=1, samples=8)
    back = call._replace(stop=True)
    calls.hear(call, gone={0})  # of a dead server: the next one says anew
    assert server.peers.called() == []
    calls.hear(call, gone=())
    assert (server.peers.called(), server.places, server.peers[8].epochs) == ([8], {8: 2}, 3)
    calls.hear(back, gone=())
    assert (server.peers.called(), server.places, moved) == ([], {}, [1])
    calls.hear(back, gone=())
    calls.hear(Message(Kind.PLACE, 8, 0, 3, 2, shard=1), gone=())
    for late in (call, back):
        calls.hear(late, gone=())
        assert server.peers[8].standing is Standing.EXPECTED
    assert moved == [1]


# -- by mpiexec -------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_by_mpiexec_a_spare_takes_the_place_of_a_killed_worker(servers):
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    options = ["--with-ft", "ulfm"]
    dies, ranks = servers + 1, 2 + 3 * servers
    arguments = [str(dies), str(servers)]
    done = mpiexec(ranks, PROGRAMS / "places_death.py", *arguments, timeout_s=60, options=options)
    assert done.returncode == 0, done.stderr
    assert f"takes the place of worker 1 (rank {dies}) from epoch " in done.stderr
    lines = sorted(done.stdout.splitlines())
    for server, line in enumerate(lines[:servers]):
        assert line.startswith(f"rank {server}, server {server}: [0, 0, 0, 0, 0, 0], ")
    first, *spares, replaces = lines[servers:]
    assert first == f"rank {servers}, worker 0: [6, 6, 6, 6, 6, 6], 0 lost"
    idle = [
        f"rank {dies + 1 + spare}, spare {spare}: [0, 0, 0, 0, 0, 0], 0 lost" for spare in range(len(spares))
    ]
    assert (spares, len(spares)) == (idle, 2 * servers - 1)
    assert replaces.startswith(f"rank {ranks - 1}, worker 1: [0, ")
    assert replaces.endswith(" 6, 6, 6], 0 lost")
