"""Spares and heirs: copies of the server's state, and trainings that go on when it dies, in one process."""

from __future__ import annotations

import logging
import queue
import random
import re
import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from nnlo_common import (
    EASGD,
    SGD,
    Adam,
    ConfigurationError,
    Downpour,
    LocalSGD,
    Participant,
    PeerLostError,
    Synchronous,
)
from nnlo_common.cluster._topology import Topology
from nnlo_common.protocol import Kind, Received, Standing
from nnlo_common.protocol._query_messages import LastRoundQuery, MeanQuery
from nnlo_common.testing import InjectedFault, MemoryCluster
from nnlo_common.training import _joining, _spare_rank, _state_copies
from nnlo_common.training._heir_rank import HeirRank
from nnlo_common.training._state_copies import PIECE, ReceivedCopies, StateCopies

pytestmark = pytest.mark.sampled(3)

ALGORITHMS = {
    "downpour": (Downpour(), Adam(0.05)),
    "lag": (Downpour(lag=1), SGD(0.1)),
    "easgd": (EASGD(every=2), SGD(0.2)),
    "synchronous": (Synchronous(), SGD(0.1)),
    "rounds": (LocalSGD(every=3), SGD(0.1)),
}
TIMEOUT_S = 60.0


class Told(logging.Handler):
    """Keeps what is said of the server and of spares."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        text = record.getMessage()
        if any(
            words in text for words in ("serves in its place", "a spare", "lost commits", "would have served")
        ):
            self.lines.append(text.removeprefix("nnlo: "))


def train(name, faults, *, servers=1, spares=1, epochs=3, steps=7, workers=2, heir=False):
    """Train workers on a problem whose solution is 1, 2, 3; return what each rank has at the end."""
    algorithm, optimizer = ALGORITHMS[name]
    target = np.array([1, 2, 3], "f4")

    def program(world):
        start = [np.zeros(2, "f4"), np.zeros(1, "f4")]  # a part for each of two servers
        roles = {"servers": servers, "spares": spares, "heir": heir}
        world.own_process = heir is None  # else no worker is an heir by itself
        me = Participant(algorithm, start, optimizer=optimizer, world=world, **roles)
        means = []
        with me:
            for epoch in range(epochs):
                for _ in me.batches(range(workers * steps)):
                    for gradient, point, best in zip(
                        me.gradients, me.point, np.split(target, [2]), strict=True
                    ):
                        gradient[:] = point - best
                    me.step()
                part = me._part  # another one, if this rank has begun to serve
                answer = part.ask(MeanQuery(values={"epoch": float(epoch)}, weight=1.0, epochs=epoch + 1))
                means.append((epoch, answer.means["epoch"]))
        return me.role, np.concatenate(me.parameters), means, me.report()

    with MemoryCluster(workers + servers + spares) as cluster:
        for rank, point, occurrence in faults:
            cluster.fail(rank, point, occurrence, may_miss=True)
        told = Told()
        logger = logging.getLogger("nnlo_common.training")
        logger.addHandler(told)
        try:
            results = cluster.run(program, TIMEOUT_S)
        finally:
            logger.removeHandler(told)
    return results, told.lines


POINTS = [
    ("send CENTER", 4),
    ("send CENTER", 9),
    ("receive EXCHANGE", 6),
    ("receive EPOCH", 2),
    ("receive EPOCH", 4),
    ("receive ASK", 1),
    ("receive ASK", 3),
    ("send ANSWER", 1),
    ("send ANSWER", 2),
    ("send ANSWER", 5),
    ("send COPY", 3),
    ("receive ACK", 2),
    ("receive LEAVE", 1),
    ("receive LEAVE", 2),
    ("send ANSWER", 11),
]


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize(("point", "occurrence"), POINTS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_others_train_to_the_end_wherever_the_server_dies(name, point, occurrence):
    results, told = train(name, [(0, point, occurrence)])
    died = isinstance(results[0], Exception)
    for rank in (1, 2, 3):
        role, parameters, means, _ = results[rank]
        assert means == [(epoch, float(epoch)) for epoch in range(3)]
        assert np.isfinite(parameters).all()
        assert np.abs(parameters).max() > 0.1, role
    role, center, _, report = results[3]
    assert np.abs(center - [1, 2, 3]).max() < 2.5
    if died and role == "server 0":
        line, *after = told
        assert line.startswith("rank 0 on ")
        assert "the server, has died; rank 3 serves in its place, from a copy of " in line
        lost = re.fullmatch(r".* of [\d.]+ s before, at [-\d: ]+?(?:; lost commits: (\d+))?", report.lost[0])
        assert len(report.lost) == 1
        assert lost
        counted = [f"all workers are with rank 3 now; lost commits: {lost[1]}"] if lost[1] else []
        assert after == counted
        assert counted or point == "receive LEAVE" or occurrence > 4
    elif not died:
        assert (role, told) == ("spare 0", [])


# -- several servers --------------------------------------------------------------------------------------


def check_all_went_on(results, *, dead, last=2):
    """Check that all ranks but these have made all epochs, and that the spares have the centre."""
    for rank, result in enumerate(results):
        if isinstance(result, Exception):
            assert rank in dead
            continue
        role, parameters, means, _ = result
        assert means == [(epoch, float(epoch)) for epoch in range(last + 1)], role
        assert np.isfinite(parameters).all()
        assert np.abs(parameters).max() > 0.1, role
        if not role.startswith("worker"):
            assert np.abs(parameters - [1, 2, 3]).max() < 2.5, role


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize(("point", "occurrence"), POINTS)
@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("spares", [1, 2])
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_of_two_servers_either_may_die_anywhere(name, spares, dies, point, occurrence):
    results, told = train(name, [(dies, point, occurrence)], servers=2, spares=spares)
    check_all_went_on(results, dead={dies})
    takes_over = 4 if spares == 1 else 4 + dies
    others = [result[0] for rank, result in enumerate(results) if rank not in (dies, takes_over)]
    assert all(role.startswith(("server", "worker", "spare")) for role in others)
    role, _, _, report = results[takes_over]
    if isinstance(results[dies], Exception) and role == f"server {dies}":
        line, *after = told
        assert line.startswith("rank ")
        words = f", server {dies}, has died; rank {takes_over} serves in its place, from a copy of "
        assert words in line
        assert len(after) <= 1
        assert f"server {dies}, has died" in report.lost[0]
        if dies == 1:
            assert f"server 1, has died; rank {takes_over} serves" in results[0][3].lost[0]
    elif not isinstance(results[dies], Exception):
        assert told == []


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "points",
    [
        ("receive EXCHANGE", 3, "receive EXCHANGE", 8),
        ("send CENTER", 4, "receive PULL", 1),
        ("receive PULL", 2, "send CENTER", 3),
        ("receive EPOCH", 2, "receive EPOCH", 2),
        ("send CENTER", 9, "receive EPOCH", 4),
        ("receive LEAVE", 1, "receive LEAVE", 2),
    ],
)
def test_with_a_spare_for_each_both_servers_may_die(name, points):
    first, at, second, then = points
    results, _ = train(name, [(0, first, at), (1, second, then)], servers=2, spares=2)
    check_all_went_on(results, dead={0, 1})
    for rank in (0, 1):
        if not isinstance(results[rank], Exception):
            assert results[4 + rank][0] == f"spare {rank}"


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "synchronous", "rounds"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("later", [3, 7])
def test_with_one_spare_for_both_the_second_death_ends_the_training(name, order, later):
    one, other = order
    faults = [(one, "receive EXCHANGE", 3), (other, "receive EXCHANGE", later)]
    began_s = time.monotonic()
    with pytest.raises(PeerLostError, match=r"a server of the centre has died") as caught:
        train(name, faults, servers=2)
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    assert caught.value.rank in (0, 1)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize(
    "second", [(4, "send CENTER", 3), (5, "receive EXCHANGE", 4), (6, "receive COPY", 3)]
)
def test_each_server_has_a_line_of_spares(second):
    results, told = train("downpour", [(0, "receive EXCHANGE", 4), second], servers=2, spares=4)
    check_all_went_on(results, dead={0, second[0]})
    if second[0] == 4 and isinstance(results[4], Exception):
        assert results[6][0] == "server 0"
    if second[0] == 5 and isinstance(results[5], Exception):
        assert [line for line in told if "a spare, has died" in line] == [
            "rank 5, a spare, has died; spares left: 2"
        ]


@pytest.mark.usefixtures("_copies_at_once")
def test_the_death_of_one_of_several_spares_names_the_server_that_has_none_left():
    results, told = train("synchronous", [(5, "receive COPY", 2)], servers=2, spares=2)
    assert isinstance(results[5], Exception)
    assert told == ["rank 5, a spare, has died; the death of server 1 now ends the job"]


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["synchronous", "rounds"])
@pytest.mark.parametrize("spares", [1, 2])
def test_spares_of_several_servers_change_no_bit_while_nobody_dies(name, spares):
    spared, _ = train(name, [], servers=2, spares=spares)
    without, _ = train(name, [], servers=2, spares=0)
    for rank in range(4):
        assert spared[rank][1].tobytes() == without[rank][1].tobytes()
    for rank in range(4, 4 + spares):
        assert spared[rank][1].tobytes() == without[0][1].tobytes()


@pytest.mark.parametrize(
    ("servers", "spares", "of_each"),
    [
        (1, 2, [(0, 1)]),
        (2, 1, [(0,), (0,)]),
        (2, 2, [(0,), (1,)]),
        (2, 3, [(0, 2), (1,)]),
        (3, 2, [(0,), (1,), (0,)]),
    ],
)
def test_whose_place_a_spare_takes_is_fixed(servers, spares, of_each):
    cell = Topology.of_training([""] * (servers + 1 + spares), servers=servers, spares=spares).cells[0]
    first = servers + 1
    expected = [tuple(first + spare for spare in one) for one in of_each]
    assert [cell.spares_of(shard) for shard in range(servers)] == expected


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "synchronous", "rounds"])
@pytest.mark.parametrize("second", [(3, "send CENTER", 3), (3, "receive EPOCH", 1), (3, "send ANSWER", 2)])
def test_a_second_spare_takes_over_from_the_first(name, second):
    results, told = train(name, [(0, "receive EXCHANGE", 4), second], spares=2)
    role, center, means, _ = results[4]
    assert means == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert np.abs(center - [1, 2, 3]).max() < 2.5
    if isinstance(results[3], Exception):
        assert role == "server 0"
        died = [line.split(" on ")[0] for line in told if "has died" in line]
        assert died == ["rank 0", "rank 3"]
        counted = [line.split(";")[0] for line in told if "lost commits" in line]
        assert counted[-1] == "all workers are with rank 4 now"


@pytest.mark.usefixtures("_copies_at_once")
def test_a_worker_and_the_server_die_at_once():
    results, _ = train("downpour", [(0, "receive EXCHANGE", 4), (1, "send EXCHANGE", 3)])
    assert all(isinstance(results[rank], Exception) for rank in (0, 1))
    assert results[3][0] == "server 0"
    assert results[2][2] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.usefixtures("_copies_at_once")
def test_the_death_of_a_spare_is_said_and_changes_nothing():
    plain, _ = train("synchronous", [])
    results, told = train("synchronous", [(3, "receive COPY", 2)])
    assert isinstance(results[3], Exception)
    assert told == ["rank 3, a spare, has died; the server's death now ends the job"]
    assert results[0][1].tobytes() == plain[0][1].tobytes()


@pytest.mark.usefixtures("_copies_at_once")
def test_before_the_first_copy_the_death_ends_the_training():
    with pytest.raises(PeerLostError, match="the server has died before a spare had a copy"):
        train("downpour", [(0, "send COPY", 1)])


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["synchronous", "rounds"])
def test_a_spare_changes_no_bit_while_nobody_dies(name):
    with_spare, _ = train(name, [])
    without, _ = train(name, [], spares=0)
    for rank in range(3):
        assert with_spare[rank][1].tobytes() == without[rank][1].tobytes()
    assert with_spare[3][1].tobytes() == without[0][1].tobytes()
    assert with_spare[3][0] == "spare 0"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"servers": 0}, "spares=1 with servers=0 is not possible"),
        ({"group_size": 2}, "spares=1 with group_size=2 is not possible"),
        ({"sub_servers": 1}, "spares=1 with sub_servers=1 is not possible"),
    ],
)
def test_spares_are_refused_where_they_cannot_take_over(options, told):
    with pytest.raises(ConfigurationError, match=told):
        Topology.of_training([""] * 5, spares=1, **options)


def test_the_last_ranks_are_spares():
    topology = Topology.of_training([""] * 6, spares=2)
    topology.validate()
    titles = [one.title for one in topology.assignments]
    assert titles == ["server 0", "worker 0", "worker 1", "worker 2", "spare 0", "spare 1"]
    assert topology.cells[0].spares == (4, 5)
    assert topology.table().splitlines()[-1].split() == ["5", "spare", "1", "of", "2"]
    with pytest.raises(ConfigurationError, match=r"1 - 1 spare = 0 worker ranks.* Start 3 ranks"):
        Topology.of_training(["", ""], spares=1)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_a_copy_under_way_holds_up_nobody_at_the_end(name, monkeypatch):
    """Copies of many pieces follow each other without a pause, also while all leave."""
    monkeypatch.setattr(_state_copies, "PIECE", 8)
    results, told = train(name, [], epochs=1, steps=3)
    assert told == []
    assert [role for role, *_ in results] == ["server 0", "worker 0", "worker 1", "spare 0"]


@pytest.mark.usefixtures("_copies_at_once")
def test_a_spare_that_does_not_take_over_asks_the_next_server_for_the_same_centre():
    """The server dies when both spares wait for the centre after the last round."""

    def program(world):
        me = Participant(LocalSGD(every=3), [np.zeros(3, "f4")], optimizer=SGD(0.1), world=world, spares=2)
        with me:
            part = me._member.part
            for _ in me.batches(range(8)):
                me.gradients[0][:] = me.point[0] - 1
                me.step()
            part.ask(LastRoundQuery(values={}, weight=1.0))
            if me.role.startswith("worker"):
                part.last_round()
            part.ask(LastRoundQuery(values={}, weight=0.0))
            if not me.role.startswith("worker"):
                part.last_round()
            part.ask(MeanQuery(values={}, weight=1.0))
        return me.role

    with MemoryCluster(5) as cluster:
        cluster.fail(0, "receive PULL", 4)
        roles = cluster.run(program, TIMEOUT_S)
    assert roles[1:] == ["worker 0", "worker 1", "server 0", "spare 1"]


# -- copies -----------------------------------------------------------------------------------------------


class Tensor:
    """An array of a framework."""

    def __init__(self, values):
        self.values = values

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return np.array(self.values)

    def __array__(self, dtype=None):  # NumPy 2 warns of its arguments
        pytest.fail("it is not asked for its array")


class Wires:
    """The endpoints of a server and a spare; each message waits until the test takes it."""

    def __init__(self):
        self.sent, self.released = queue.SimpleQueue(), 0

    def send(self, peer, message, frame=None, fill=None):
        vector = None if message.vector is None else message.vector.copy()
        self.sent.put((peer, message.with_vector(vector)))

    def release(self, peer, frame):
        self.released += 1


def copied(state, spares=(3,)):
    """Copy a state; return what the spare has, and the number of pieces."""
    wires, received = Wires(), ReceivedCopies()
    copies = StateCopies(wires, 0, spares, 2, take=lambda: state, clock=lambda: 100.0)
    copies.look()
    number = 0
    while not copies.idle:
        _, message = wires.sent.get_nowait()
        assert wires.sent.empty(), "the next piece was sent before the last one was taken"
        received.take(message)
        copies.acknowledged(Received(message._replace(kind=Kind.ACK, vector=None), None))
        number += 1
    return received, number


def test_a_copy_has_every_bit():
    odd = np.array([0x7FA00001, 0xFFC00000, 1], np.uint32).view("f4")  # NaNs with their bits
    state = {
        "a": odd,
        "b": {0: Tensor(np.float32(3.5)), 1: [np.zeros((0, 4)), np.arange(6).reshape(2, 3)]},
        "c": [None, True, 0.1, "text", -(2**70)],
        "d": np.array(5, "i8"),
        "e": np.arange(12, dtype="f8").reshape(3, 4).T,
        "f": np.array([True, False]),
        "g": np.float64(1 / 3),
    }
    received, _ = copied(state)
    found = received.state()
    assert found["a"].tobytes() == odd.tobytes()
    assert found["b"][0] == np.float32(3.5)
    assert found["b"][1][0].shape == (0, 4)
    assert found["b"][1][1].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["c"] == state["c"]
    assert (found["d"].shape, int(found["d"])) == ((), 5)
    assert found["e"].tolist() == state["e"].tolist()
    assert found["f"].tolist() == [True, False]
    assert found["g"] == 1 / 3


@pytest.mark.parametrize("size", [1, PIECE - 100, PIECE, PIECE + 1, 3 * PIECE + 7])
def test_a_large_copy_travels_in_pieces(size):
    values = np.random.default_rng(size).normal(size=size).astype("f4")
    received, number = copied({"x": values})
    assert received.state()["x"].tobytes() == values.tobytes()
    assert number == -(-(4 * size + 200) // (4 * PIECE)) or number == 1 + size // PIECE


def test_a_copy_shows_one_moment_though_the_server_goes_on():
    values, wires, received = np.zeros(2 * PIECE, "f4"), Wires(), ReceivedCopies()
    copies = StateCopies(wires, 0, (3,), 2, take=lambda: {"x": values}, clock=lambda: 100.0)
    copies.look()
    while not copies.idle:
        values += 1  # commits between two pieces
        _, message = wires.sent.get_nowait()
        received.take(message)
        copies.acknowledged(Received(message._replace(kind=Kind.ACK, vector=None), None))
    assert not received.state()["x"].any()


def test_half_a_copy_does_not_replace_a_whole_one():
    received, _ = copied({"x": np.ones(3)})
    wires = Wires()
    copies = StateCopies(wires, 0, (3,), 2, take=lambda: {"x": np.zeros(2 * PIECE)}, clock=lambda: 1.0)
    copies._number = 7
    copies.look()
    received.take(wires.sent.get_nowait()[1])
    assert received.state()["x"].tolist() == [1, 1, 1]


def test_copies_take_a_hundredth_of_the_time_and_not_more_than_one_a_second():
    now = [0.0]

    def slow():
        now[0] += 0.5
        return {"x": np.ones(1)}

    wires = Wires()
    copies = StateCopies(wires, 0, (3,), 2, take=slow, clock=lambda: now[0])
    begun = []
    for tick in range(3000):
        now[0] = max(now[0], 0.1 * tick)
        before = now[0]
        copies.look()
        if now[0] != before:
            begun.append(before)
        while not copies.idle:
            copies.acknowledged(
                Received(wires.sent.get_nowait()[1]._replace(kind=Kind.ACK, vector=None), None)
            )
    assert [round(one) for one in begun] == [0, 100, 200]


def test_the_next_spare_gets_a_copy_at_once_when_the_first_dies():
    wires = Wires()
    copies = StateCopies(wires, 0, (3, 4), 2, take=lambda: {"x": np.ones(1)}, clock=lambda: 50.0)
    copies.look()
    assert wires.sent.get_nowait()[0] == 3
    copies.without(3)
    copies.look()
    assert wires.sent.get_nowait()[0] == 4
    copies.without(4)
    copies.look()
    assert wires.sent.empty()


def test_one_of_three_copies_goes_to_the_second_spare(monkeypatch):
    monkeypatch.setattr(_state_copies, "_SHORTEST_S", 0.0)
    monkeypatch.setattr(_state_copies, "_SHARE", 1e9)
    wires, to = Wires(), []
    copies = StateCopies(wires, 0, (3, 4, 5), 2, take=lambda: {"x": np.ones(1)})
    for _ in range(7):
        copies.look()
        spare, message = wires.sent.get_nowait()
        to.append(spare)
        copies.acknowledged(Received(message._replace(kind=Kind.ACK, vector=None), None))
    assert to == [3, 4, 3, 3, 4, 3, 3]
    copies.without(3)
    copies.look()
    assert wires.sent.get_nowait()[0] == 5  # its turn
    copies.without(5)  # before it has all of it
    copies.look()
    assert wires.sent.get_nowait()[0] == 4


def test_no_copy_begins_once_they_are_stopped():
    wires = Wires()
    copies = StateCopies(wires, 0, (3,), 2, take=dict, clock=lambda: 50.0)
    copies.stop()
    copies.look()
    assert wires.sent.empty()
    assert copies.idle


def test_the_spare_says_how_old_its_copy_is():
    assert ReceivedCopies().came_s is None
    received, _ = copied({"x": 1})
    assert received.came_s is not None
    assert _spare_rank.ReceivedCopies is ReceivedCopies


# -- heirs: a worker that serves in the place of a dead server ----------------------------------------------

INHERITED = (
    r"rank 0 on \S+, the server, has died; rank 1 serves in its place and trains no more, from a copy of"
)


def train_with_heir(name, faults, *, workers=3, **options):
    return train(name, faults, spares=0, workers=workers, heir=True, **options)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize(("point", "occurrence"), [*POINTS, ("receive LEAVE", 3), ("send ANSWER", 12)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_wherever_the_server_dies_the_first_worker_serves_and_the_others_train_on(name, point, occurrence):
    results, told = train_with_heir(name, [(0, point, occurrence)])
    for role, parameters, means, _ in results[1:]:
        assert means == [(epoch, float(epoch)) for epoch in range(3)], role
        assert np.abs(parameters).max() > 0.1, role
        assert np.abs(parameters - [1, 2, 3]).max() < 2.5, role
    role, _, _, report = results[1]
    others = [role for role, *_ in results[2:]]
    assert others == ["worker 1", "worker 2"]
    if role == "worker 0":
        assert not isinstance(results[0], Exception) or point in ("send ANSWER", "receive LEAVE")
        assert told == []
        return
    assert role == "server 0"
    assert re.match(INHERITED, told[0])
    assert len(report.lost) == 1
    assert re.match(INHERITED, report.lost[0])


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "easgd", "rounds"])
@pytest.mark.parametrize("occurrence", [3, 8])
def test_an_heir_begins_with_the_bits_and_the_commits_of_the_copy(name, occurrence, monkeypatch):
    seen, inherit = [], _spare_rank.SpareRank.inherit

    def watched(self, known, dead):
        rule = known.copies.state()["server"]["server"]["rule"]

        def note():
            server = self.server
            same = server.rule.center.tobytes() == np.asarray(rule["center"]).tobytes()
            seen.append((same, server.rule.clock == rule["clock"], server.peers[1].standing))

        self.on_taking_over.append(note)
        inherit(self, known, dead)

    monkeypatch.setattr(_spare_rank.SpareRank, "inherit", watched)
    results, _ = train_with_heir(name, [(0, "receive EXCHANGE", occurrence)])
    assert results[1][0] == "server 0"
    assert seen == [(True, True, Standing.LOST)]


@pytest.mark.usefixtures("_copies_at_once")
def test_a_worker_that_serves_at_the_end_waits_for_no_answer_of_one_that_has_left(monkeypatch):
    finish, take_over, left = (
        _spare_rank.SpareRank.finish,
        _spare_rank.SpareRank._take_over,
        threading.Event(),
    )

    def noted(self, last=lambda: None):
        finish(self, last)
        if self.server.rank == 2:
            left.set()

    def later(self, shard, dead):
        assert left.wait(TIMEOUT_S)
        take_over(self, shard, dead)

    def dies(self):
        if self._rank == 0:
            raise InjectedFault("dies when all is over but for telling so")
        end(self)

    end = StateCopies.end

    monkeypatch.setattr(_spare_rank.SpareRank, "finish", noted)
    monkeypatch.setattr(_spare_rank.SpareRank, "_take_over", later)
    monkeypatch.setattr(StateCopies, "end", dies)
    results, told = train_with_heir("downpour", [])
    assert [isinstance(one, InjectedFault) for one in results] == [True, False, False, False]
    assert [role for role, *_ in results[1:]] == ["server 0", "worker 1", "worker 2"]
    assert re.match(INHERITED, told[0])


@pytest.mark.usefixtures("_copies_at_once")
def test_after_the_server_has_died_a_synchronous_step_waits_for_the_workers_that_are_left():
    results, _ = train_with_heir("synchronous", [(0, "receive EXCHANGE", 4)])
    two, three = (results[rank][1].tobytes() for rank in (2, 3))
    assert two == three == results[1][1].tobytes()


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ["synchronous", "rounds"])
def test_heirs_change_no_bit_while_nobody_dies(name, servers):
    with_heir, told = train_with_heir(name, [], servers=servers)
    without, _ = train(name, [], servers=servers, spares=0, workers=3)
    assert told == []
    for here, there in zip(with_heir, without, strict=True):
        assert here[0] == there[0]
        assert here[1].tobytes() == there[1].tobytes()


@pytest.mark.usefixtures("_copies_at_once")
def test_once_the_heir_is_dead_the_next_worker_is_and_then_nobody():
    results, told = train_with_heir("downpour", [(1, "send EXCHANGE", 3), (0, "receive EXCHANGE", 16)])
    assert told[0] == "rank 1 would have served in the server's place; rank 2 now would"
    assert re.match(r"rank 0 on \S+, the server, has died; rank 2 serves in its place and trains no", told[1])
    assert [results[rank][0] for rank in (2, 3)] == ["server 0", "worker 2"]
    assert [results[rank][2] for rank in (2, 3)] == [[(epoch, float(epoch)) for epoch in range(3)]] * 2
    both = [(1, "send EXCHANGE", 2), (2, "send EXCHANGE", 2)]
    results, told = train_with_heir("downpour", both, workers=4)
    assert re.match(
        r"rank [12] would have served in the server's place; the server's death now ends", told[1]
    )
    with pytest.raises(PeerLostError, match="a server of the centre has died"):
        train_with_heir("downpour", [*both, (0, "receive EPOCH", 3)], workers=4)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_next_worker_serves_when_the_first_that_did_has_died(name):
    results, told = train_with_heir(name, [(0, "receive EXCHANGE", 5), (1, "receive EXCHANGE", 4)], workers=4)
    assert [isinstance(result, Exception) for result in results] == [True, True, False, False, False]
    assert [results[rank][0] for rank in (2, 3, 4)] == ["server 0", "worker 2", "worker 3"]
    serves = [re.match(r"rank (\d) .* has died; rank (\d) serves in its place", line) for line in told]
    assert [found.groups() for found in serves if found] == [("0", "1"), ("1", "2")]
    for role, parameters, means, _ in results[2:]:
        assert means == [(epoch, float(epoch)) for epoch in range(3)], role
        assert np.abs(parameters - [1, 2, 3]).max() < 2.5, role
    assert len(results[2][3].lost) == 2


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_server_and_its_first_heir_die_together(name):
    """The heir is dead before it has sent a copy: the second has one of the server's."""
    results, told = train_with_heir(name, [(0, "receive EXCHANGE", 8), (1, "receive JOIN", 1)], workers=4)
    assert [isinstance(result, Exception) for result in results] == [True, True, False, False, False]
    assert [results[rank][0] for rank in (2, 3, 4)] == ["server 0", "worker 2", "worker 3"]
    assert any("rank 2 serves in its place" in line for line in told)
    for role, parameters, means, _ in results[2:]:
        assert means == [(epoch, float(epoch)) for epoch in range(3)], role
        assert np.abs(parameters - [1, 2, 3]).max() < 2.5, role


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("occurrence", range(8, 15))
@pytest.mark.parametrize("spares", [0, 2])
def test_whoever_is_next_stays_until_those_after_it_have_been_answered(spares, occurrence):
    """Else they ask it, once the server has died, for ever."""
    for _ in range(2):
        results, _ = train(
            "synchronous", [(0, "send ANSWER", occurrence)], spares=spares, workers=3, heir=not spares
        )
        for role, _, means, _ in results[1:]:
            assert means == [(epoch, float(epoch)) for epoch in range(3)], role


AT = ["send CENTER", "receive EXCHANGE", "receive EPOCH", "receive ASK", "send ANSWER", "send COPY"]
AT += ["receive ACK", "receive LEAVE", "send EXCHANGE", "send ASK", "receive CENTER", "receive ANSWER"]
AT += ["send EPOCH", "send LEAVE", "receive COPY", "receive JOIN"]


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "seed", [*range(30), *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(30, 400))]
)
def test_any_two_of_a_server_and_its_heirs_may_die_at_any_message(seed):
    draw = random.Random(seed)
    name, workers = draw.choice([*ALGORITHMS]), draw.choice([3, 4, 5])
    victims = draw.sample([0, 1, 2], 2)
    faults = [(rank, draw.choice(AT), draw.randint(1, 14)) for rank in victims]
    try:
        results, _ = train_with_heir(name, faults, workers=workers)
    except PeerLostError as error:
        assert re.search(r"before rank \d had a copy", str(error)), faults  # noqa: PT017 - else it goes on
        return
    dead = {rank for rank, result in enumerate(results) if isinstance(result, Exception)}
    assert dead <= set(victims), faults
    for role, parameters, means, _ in (one for rank, one in enumerate(results) if rank not in dead):
        assert means == [(epoch, float(epoch)) for epoch in range(3)], (faults, role)
        assert np.abs(parameters - [1, 2, 3]).max() < 2.9, (faults, role)


@pytest.mark.usefixtures("_copies_at_once")
def test_the_server_and_a_worker_that_is_not_the_heir_die():
    results, _ = train_with_heir("downpour", [(0, "receive EXCHANGE", 6), (2, "send EXCHANGE", 4)])
    assert [isinstance(result, Exception) for result in results] == [True, False, True, False]
    assert results[1][0] == "server 0"
    assert results[3][2] == [(0, 0.0), (1, 1.0), (2, 2.0)]


@pytest.mark.usefixtures("_copies_at_once")
def test_without_a_copy_no_worker_serves():
    with pytest.raises(PeerLostError, match="the server has died before rank 1 had a copy"):
        train_with_heir("downpour", [(0, "send COPY", 1)])


@pytest.mark.usefixtures("_copies_at_once")
def test_a_server_that_dies_after_all_workers_but_its_heir_ends_the_training():
    faults = [(2, "send EXCHANGE", 2), (3, "send EXCHANGE", 2), (0, "receive EXCHANGE", 12)]
    with pytest.raises(PeerLostError, match="rank 1: the last worker serves in a dead server's place"):
        train_with_heir("downpour", faults)


# -- heirs of several servers: each has a worker of its own ----------------------------------------------


def check_heirs(results, told, *, dead, turned):
    """Check that these workers serve, and that all that live have made all epochs."""
    check_all_went_on(results, dead=dead)
    for rank, result in enumerate(results):
        if not isinstance(result, Exception) and rank not in turned:
            assert result[0] == (f"server {rank}" if rank < 2 else f"worker {rank - 2}")
    for rank in turned:
        assert results[rank][0] == f"server {rank - 2}"
        assert np.abs(results[rank][1] - [1, 2, 3]).max() < 2.5
        words = rf"rank {rank - 2} on \S+, server {rank - 2}, has died; rank {rank} serves in its place and "
        assert any(re.match(words + r"trains no more, from a copy of", line) for line in told)
        assert any(re.match(words, line) for line in results[rank][3].lost)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize(("point", "occurrence"), [*POINTS, ("receive LEAVE", 3), ("receive PULL", 2)])
@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_wherever_one_of_two_servers_dies_its_own_heir_serves(name, dies, point, occurrence):
    results, told = train_with_heir(name, [(dies, point, occurrence)], servers=2)
    role = results[2 + dies][0]
    check_heirs(results, told, dead={dies}, turned={2 + dies} if role.startswith("server") else set())
    if role.startswith("worker"):
        assert not isinstance(results[dies], Exception) or point in ("send ANSWER", "receive LEAVE")
    elif dies == 1:
        assert "server 1, has died; rank 3 serves" in results[0][3].lost[0]


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(
    "points",
    [
        ("receive EXCHANGE", 4, "receive EXCHANGE", 9),
        ("receive EXCHANGE", 5, "receive EXCHANGE", 5),
        ("send CENTER", 6, "receive PULL", 1),
        ("receive PULL", 2, "send CENTER", 5),
        ("receive EPOCH", 2, "receive EPOCH", 2),
        ("send CENTER", 9, "receive EPOCH", 4),
        ("receive LEAVE", 1, "receive LEAVE", 2),
        ("receive EXCHANGE", 6, "receive TURN", 1),
    ],
)
def test_both_servers_may_die_one_after_the_other_if_their_heirs_live(name, points):
    first, at, second, then = points
    results, told = train_with_heir(name, [(0, first, at), (1, second, then)], servers=2, workers=4)
    turned = {rank for rank in (2, 3) if results[rank][0].startswith("server")}
    check_heirs(results, told, dead={0, 1}, turned=turned)


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "synchronous", "rounds"])
@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("receive EXCHANGE", 4), ("send CENTER", 3)),  # the heir dies as a server
        (("receive EXCHANGE", 4), ("send TURN", 1)),  # as it begins to be one
        (("receive EPOCH", 2), ("send EXCHANGE", 2)),  # as a worker, before
    ],
)
def test_a_server_and_its_heir_end_the_training(name, dies, first, then):
    with pytest.raises(PeerLostError, match="a server of the centre has died"):
        train_with_heir(name, [(dies, *first), (2 + dies, *then)], servers=2)


@pytest.mark.usefixtures("_copies_at_once")
def test_the_dead_heir_of_one_server_is_said_and_the_other_server_has_its_own():
    faults = [(3, "send EXCHANGE", 3), (0, "receive EXCHANGE", 16)]
    results, told = train_with_heir("downpour", faults, servers=2, workers=4)
    line, *others = told
    assert line == "rank 3 would have served in the place of server 1; its death now ends the job"
    check_heirs(results, others, dead={0, 3}, turned={2})


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("name", ["downpour", "easgd", "rounds"])
@pytest.mark.parametrize("dies", [0, 1])
def test_an_heir_has_the_other_servers_shard_as_soon_as_it_serves(name, dies, monkeypatch):
    """Also that of a worker whose own parameters are others than the centre's."""
    seen = []
    inherit = _spare_rank.SpareRank.inherit

    def watched(self, known, dead):
        self._parameters.vector[self._shards[1 - dies].place] = np.nan
        inherit(self, known, dead)
        seen.append(np.isfinite(self._parameters.vector).all())

    monkeypatch.setattr(_spare_rank.SpareRank, "inherit", watched)
    results, _ = train_with_heir(name, [(dies, "receive EXCHANGE", 5)], servers=2)
    assert results[2 + dies][0] == f"server {dies}"
    assert seen == [True]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"servers": 0}, "heir=True with servers=0 is not possible"),
        ({"group_size": 2}, "heir=True with group_size=2 is not possible"),
        ({"spares": 1}, "heir=True with spares=1 is not possible"),
    ],
)
def test_an_heir_is_refused_where_it_cannot_serve(options, told):
    with pytest.raises(ConfigurationError, match=told):
        Participant(Downpour(), [np.zeros(2, "f4")], optimizer=SGD(0.1), heir=True, **options)


@pytest.mark.parametrize(
    ("servers", "workers", "told"),
    [
        (1, 1, r"heir=True with 1 server and 1 worker is not possible: .* Start 1 more rank, or"),
        (2, 2, r"heir=True with 2 servers and 2 workers is not possible: .* Start 1 more rank, or"),
        (2, 1, r"heir=True with 2 servers and 1 worker is not possible: .* Start 2 more ranks, or"),
    ],
)
def test_heirs_are_refused_where_nobody_would_train_on(servers, workers, told):
    def program(world):
        options = {"optimizer": SGD(0.1), "world": world, "servers": servers, "heir": True}
        with Participant(Downpour(), [np.zeros(2, "f4"), np.zeros(2, "f4")], **options):
            pass

    with MemoryCluster(servers + workers) as cluster, pytest.raises(ConfigurationError, match=told):
        cluster.run(program, TIMEOUT_S)


@pytest.mark.usefixtures("_copies_at_once")
def test_a_worker_is_the_heir_where_nothing_is_said():
    results, told = train("downpour", [(0, "receive EXCHANGE", 6)], spares=0, workers=3, heir=None)
    assert [role for role, *_ in results[1:]] == ["server 0", "worker 1", "worker 2"]
    assert re.match(INHERITED, told[0])


@pytest.mark.parametrize(
    ("workers", "options", "heirs"),
    [
        (2, {}, True),
        (3, {"servers": 2}, True),
        (2, {"servers": 2}, False),
        (1, {}, False),
        (2, {"heir": False}, False),
        (2, {"spares": 1}, False),
        (2, {"group_size": 2}, False),
        (2, {"servers": 0}, False),
    ],
)
def test_there_are_heirs_by_default_wherever_they_can_be(workers, options, heirs):
    def program(world):
        world.own_process = True
        part = Participant(
            Downpour(), [np.zeros(9, "f4"), np.zeros(1, "f4")], optimizer=SGD(0.1), world=world, **options
        )
        with part:
            return isinstance(part._part, HeirRank)

    size = workers * options.get("group_size", 1) + options.get("servers", 1) + options.get("spares", 0)
    with MemoryCluster(size) as cluster:
        servers = options.get("servers", 1)
        first = range(servers, 2 * servers)
        assert cluster.run(program, TIMEOUT_S) == [heirs and rank in first for rank in range(size)]


@pytest.mark.parametrize("survives", [True, False])
def test_no_worker_is_an_heir_by_default_where_memory_or_the_launcher_forbids_it(survives, monkeypatch):
    monkeypatch.setattr(_joining, "free_memory", lambda: (4 * 9 * 10 * 4 - 1, 2**40))

    def program(world):
        world.survives_loss, world.own_process = survives, True
        part = Participant(Downpour(), [np.zeros(9, "f4")], optimizer=SGD(0.1), world=world)
        with part:
            return isinstance(part._part, HeirRank)

    refused = pytest.warns(RuntimeWarning, match=r"rank 1 on memory would need 0.0 GiB .* heir=True has it")
    with MemoryCluster(3) as cluster, refused if survives else nullcontext():
        assert cluster.run(program, TIMEOUT_S) == [False] * 3


@pytest.mark.usefixtures("_copies_at_once")
@pytest.mark.parametrize("dies", ["receive EXCHANGE", "receive EPOCH"])
def test_where_heirs_are_refused_the_death_of_a_server_ends_the_training(dies):
    def program(world):
        me = Participant(Downpour(), [np.zeros(3, "f4")], optimizer=SGD(0.1), world=world, heir=True)
        with me:
            me._part.refuse_heirs()
            for _ in range(3):
                for _ in me.batches(range(14)):
                    me.gradients[0][:] = me.point[0] - 1
                    me.step()

    with MemoryCluster(3) as cluster:
        cluster.fail(0, dies, 3)
        with pytest.raises(PeerLostError, match="a server of the centre has died"):
            cluster.run(program, TIMEOUT_S)
