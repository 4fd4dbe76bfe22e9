"""A server dies between any two messages, and another rank goes on from the newest copy of its state."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common import (
    AGN,
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    Adam,
    ConfigurationError,
    DiLoCo,
    Downpour,
    FlatVector,
    Frame,
    LocalSGD,
    PeerLostError,
    Steady,
    Synchronous,
)
from nnlo_common.algorithms._rule import Contribution
from nnlo_common.protocol import Kind, Message, Received, Send, Server, Shard, Wait, Worker
from nnlo_common.testing import Interleaved, RandomOrder, ServerDeath, train_virtually

pytestmark = pytest.mark.sampled(2)

STEPS = [[3, 4], [4, 3], [2, 5]]
ALGORITHMS = {
    "downpour": (Downpour(), {"optimizer": Adam(0.01)}),
    "push and fetch": (Downpour(n_push=3, n_fetch=2), {"optimizer": SGD(0.01)}),
    "lag": (Downpour(lag=2), {"optimizer": SGD(0.01)}),
    "warm start": (Downpour(warm_start=3), {"optimizer": SGD(0.01)}),
    "packed": (Downpour(wire="int8"), {"optimizer": SGD(0.01)}),
    "agn": (AGN(local_learning_rate=0.01), {"optimizer": SGD(0.01)}),
    "steady": (Steady(), {"optimizer": SGD(0.01)}),
    "synchronous": (Synchronous(), {"optimizer": SGD(0.01)}),
    "backup": (Synchronous(backup=1), {"optimizer": SGD(0.01)}),
    "easgd": (EASGD(every=2), {"local": SGD(0.01)}),
    "easgd, lag": (EASGD(every=1, lag=2), {"local": SGD(0.01)}),
    "easgd, packed": (EASGD(every=2, wire="int8"), {"local": SGD(0.01)}),
    "eamsgd": (EAMSGD(every=2, learning_rate=0.01), {}),
    "rounds": (LocalSGD(every=2), {"local": SGD(0.01)}),
    "diloco": (DiLoCo(every=2), {"local": SGD(0.01)}),
    "lock": (GEM(learning_rate=0.01), {}),
}


def train(name, **options):
    algorithm, optimizers = ALGORITHMS[name]
    start = np.linspace(0.5, 1.5, 7, dtype="f4")
    if options.get("servers", 1) > 1:
        start = [start[:4], start[4:]]
    return train_virtually(
        algorithm, lambda x, rank: x - rank, start, workers=3, steps=STEPS, **optimizers, **options
    )


@given(data=st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_workers_make_all_epochs_whenever_servers_die(name, data):
    """Each invariant of servers and workers is checked after each message."""
    schedule = data.draw(st.sampled_from([Interleaved, RandomOrder]))(data.draw(st.integers(0, 99)))
    servers = data.draw(st.sampled_from([1, 2])) if name not in ("backup", "lock") else 1
    times = sorted(data.draw(st.lists(st.integers(0, 60), min_size=2, max_size=4, unique=True)))
    deaths = [
        ServerDeath(*times[at : at + 2], shard=data.draw(st.integers(0, servers - 1)))
        for at in range(0, len(times) - 1, 2)
    ]
    losses = data.draw(st.dictionaries(st.integers(1, 3), st.integers(0, 25), max_size=1))
    losses = {rank + servers - 1: count for rank, count in losses.items()}
    run = train(name, deaths=deaths, schedule=schedule, losses=losses, servers=servers)
    assert [server.rank >= servers for server in run.servers] == [
        any(one.shard == shard and one.died <= run_length(run) for one in deaths) for shard in range(servers)
    ]
    for worker in run.workers:
        if worker.rank in losses and run.servers[0].peers[worker.rank].standing.name == "LOST":
            continue
        for client in worker.shard_clients:
            assert client.phase.name == "LEFT"
            assert client.epochs == 2
            assert client.rule.clock == 7
        assert np.isfinite(worker.parameters.vector).all()
    assert all(server.finished for server in run.servers)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_others_make_all_epochs_whoever_dies_where_workers_are_heirs(name, data):
    """Up to two of the servers, their heirs and the other workers die, each between any two messages."""
    schedule = data.draw(st.sampled_from([Interleaved, RandomOrder]))(data.draw(st.integers(0, 99)))
    servers = data.draw(st.sampled_from([1, 2])) if name not in ("backup", "lock") else 1
    workers = range(servers, servers + 3)
    victims = data.draw(st.lists(st.sampled_from(["server", "server", *workers]), max_size=2))
    times = sorted(data.draw(st.lists(st.integers(0, 60), min_size=4, max_size=4, unique=True)))
    deaths = [
        ServerDeath(*times[2 * at : 2 * at + 2], shard=data.draw(st.integers(0, servers - 1)))
        for at in range(victims.count("server"))
    ]
    losses = {rank: data.draw(st.integers(0, 25)) for rank in victims if rank != "server"}
    heirs = {one.shard: servers + one.shard for one in deaths}
    try:
        run = train(name, deaths=deaths, schedule=schedule, losses=losses, servers=servers, heir=True)
    except PeerLostError as error:
        assert "a server of the centre has died" in str(error)  # noqa: PT017 - else they go on
        assert len(deaths) == 2 > len(heirs) or losses.keys() & heirs.values()
        return
    died = {one.shard for one in deaths if one.died <= run_length(run)}
    for shard, server in enumerate(run.servers):
        assert server.rank == (heirs[shard] if shard in died else shard)
        assert server.finished
    turned = {heirs[shard] for shard in died}
    for worker in run.workers:
        standings = {server.peers[worker.rank].standing.name for server in run.servers}
        assert worker.rank not in turned or standings <= {"LOST", "LEFT"}
        if worker.rank in turned or "LOST" in standings:
            assert worker.rank in turned or worker.rank in losses
            continue
        for client in worker.shard_clients:
            assert client.phase.name == "LEFT"
            assert client.epochs == 2
            assert client.rule.clock == 7
        assert np.isfinite(worker.parameters.vector).all()


@pytest.mark.parametrize("name", ["downpour", "lag", "synchronous", "easgd", "rounds"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_both_servers_die_one_after_the_other_and_the_third_worker_trains_on(name, order):
    deaths = [ServerDeath(8, 11, order[0]), ServerDeath(16, 19, order[1])]
    run = train(name, deaths=deaths, servers=2, heir=True)
    assert [server.rank for server in run.servers] == [2, 3]
    for server in run.servers:
        assert {rank: peer.standing.name for rank, peer in server.peers.items()} == {
            2: "LOST",
            3: "LOST",
            4: "LEFT",
        }
        assert server.peers[4].epochs == 2


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("first", ["server", "heir"])
def test_a_server_and_its_heir_end_the_training_in_either_order(shard, first):
    heir, options = 2 + shard, {"servers": 2, "heir": True}
    deaths = [ServerDeath(5, 15 if first == "server" else 30, shard)]
    turns_at = sum(ranks.count(heir) for ranks in train("downpour", deaths=deaths, **options).trace.values())
    losses = {heir: turns_at if first == "server" else 3}
    with pytest.raises(PeerLostError, match="a server of the centre has died"):
        train("downpour", deaths=deaths, losses=losses, **options)


def run_length(run):
    """The number of requests that all servers have handled."""
    return sum(map(len, run.trace.values()))


@pytest.mark.parametrize("name", ["downpour", "push and fetch", "easgd"])
@pytest.mark.parametrize("heir", [False, True])
@pytest.mark.parametrize(("servers", "shard"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("died", [4, 6, 9])
def test_the_centre_is_that_of_the_copy_and_of_the_commits_since(
    name, died, servers, shard, heir, monkeypatch
):
    """Bit for bit, by a rule of its own to which the contributions are given that the second server took."""
    algorithm, optimizers = ALGORITHMS[name]
    taken, copies = [], []
    take_over = Server.take_over

    def watched(self, state, left=()):
        take_over(self, state, left)
        copies.append(state["server"]["rule"])

        def note(message):
            if message.kind in (Kind.EXCHANGE, Kind.PUSH):
                late = self.rule.clock - message.pulled_at
                sample = self.peers[message.sender].sample
                taken.append(Contribution(message.sender, message.vector.copy(), late, message.share, sample))

        self.before_taking = note

    monkeypatch.setattr(Server, "take_over", watched)
    at = servers * died
    run = train(name, deaths=[ServerDeath(at - 3, at, shard)], servers=servers, heir=heir)
    (copied,) = copies
    assert taken
    optimizer = copy.deepcopy(optimizers.get("optimizer"))  # that of others steps parts of other sizes
    server = run.servers[shard]
    rule = algorithm.center(np.zeros_like(server.rule.center), 3, optimizer)
    if servers > 1:
        rule.share(7)
    rule.load(copied)
    assert rule.center.tobytes() == copied["center"].tobytes()
    for one in taken:
        rule.commit([one])
    assert server.rule.center.tobytes() == rule.center.tobytes()
    assert server.rule.clock == rule.clock


def test_without_a_death_spares_change_no_bit():
    plain, spared = train("downpour"), train("downpour", deaths=[ServerDeath(1000, 1001)])
    assert plain.center.tobytes() == spared.center.tobytes()
    assert plain.trace == spared.trace


@pytest.mark.parametrize("name", ALGORITHMS)
def test_only_some_workers_keep_their_own_parameters(name):
    """Elastic workers and those that average go on where they are; others take the centre of the copy."""
    algorithm, _ = ALGORITHMS[name]
    own = FlatVector.of([np.full(3, 5, "f4")])
    worker = Worker(1, algorithm, own, FlatVector(own.layout), [Shard(0, 0, slice(0, 3), (2,))], workers=1)
    for _ in worker.join():
        break
    worker.deliver(center(worker, 0, 5.0))
    own.vector[:] = 7
    going = worker.go_on_without(0)
    (asked,) = (action for action in (next(going),) if isinstance(action, Send))
    assert (asked.rank, asked.message.kind, asked.message.again) == (2, Kind.JOIN, True)
    worker.deliver(center(worker, 2, 1.0))
    assert [one for one in going if not isinstance(one, Wait)] == []
    keeps = isinstance(algorithm, EASGD | LocalSGD) and not isinstance(algorithm, DiLoCo)
    assert own.vector.tolist() == [7.0 if keeps else 1.0] * 3


def center(worker, server, value):
    """The answer to a JOIN."""
    (client,) = worker.shard_clients
    frame = Frame(64)
    frame.vector[:3] = value
    client._wire = None  # its reference is not what this is about
    return Received(Message(Kind.CENTER, server, 0, clock=9, vector=frame.vector[:3]), frame)


def test_without_a_spare_the_death_of_a_server_is_an_error():
    own = FlatVector.of([np.ones(3, "f4")])
    worker = Worker(1, Downpour(), own, FlatVector(own.layout), [Shard(0, 0, slice(0, 3))], workers=1)
    with pytest.raises(PeerLostError, match="rank 0: a server of the centre has died"):
        list(worker.go_on_without(0))


def test_the_death_of_a_spare_only_leaves_it_out():
    shard = Shard(0, 0, slice(0, 3), (4, 5))
    assert shard.without(4) == Shard(0, 0, slice(0, 3), (5,))
    assert shard.without(0) == Shard(0, 4, slice(0, 3), (5,))
    assert Shard(0, 4, slice(0, 3)).without(4) is None


def test_a_late_message_of_a_worker_that_left_is_not_waited_for():
    """Its LEAVE was lost with the server, but the spare has heard of it."""
    total = sum(map(len, train("downpour").trace.values()))
    for died in range(total - 6, total + 1):
        run = train("downpour", deaths=[ServerDeath(3, died)])
        assert run.servers[0].finished


@pytest.mark.parametrize(("servers", "workers"), [(2, 2), (1, 1)])
def test_an_heir_is_refused_where_it_cannot_serve(servers, workers):
    start, options = [np.zeros(2, "f4")] * 2, {"workers": workers, "servers": servers}
    with pytest.raises(ConfigurationError, match=f"heir=True with {servers} servers and {workers} workers"):
        train_virtually(Downpour(), lambda x, rank: x, start, steps=1, heir=True, optimizer=SGD(1), **options)


def test_without_a_death_an_heir_changes_no_bit():
    plain, inherited = train("downpour"), train("downpour", heir=True)
    assert plain.center.tobytes() == inherited.center.tobytes()
    assert plain.trace == inherited.trace


def test_a_shard_that_nobody_serves_is_named():
    with pytest.raises(ConfigurationError, match=r"there is no shard 2; the servers have the shards 0 to 1"):
        train("downpour", deaths=[ServerDeath(1, 2, shard=2)], servers=2)


@pytest.mark.parametrize(("copied", "died"), [(9, 6), (-1, 6)])
def test_a_copy_that_no_server_could_have_made_is_refused(copied, died):
    with pytest.raises(ConfigurationError, match=f"copied={copied}.*died={died}"):
        ServerDeath(copied, died)


def test_each_shard_goes_back_to_its_own_newest_copy():
    deaths = [ServerDeath(3, 20, 0), ServerDeath(18, 21, 1)]  # the second was copied before the first died
    run = train("downpour", deaths=deaths, servers=2)
    assert [server.rank for server in run.servers] == [5, 6]
    assert run.servers[0].commits_lost > 3 >= run.servers[1].commits_lost


@pytest.mark.parametrize("heir", [False, True])
@pytest.mark.parametrize("shard", [0, 1])
def test_one_shard_goes_back_to_its_copy_and_the_other_goes_on(shard, heir):
    """The heir's steps until then are in the other shard, too."""
    run = train("downpour", deaths=[ServerDeath(20, 30, shard)], servers=2, heir=heir)
    assert run.servers[shard].rank == (2 + shard if heir else 5)
    assert run.servers[shard].commits_lost > 0
    other = run.servers[1 - shard]
    assert other.rank == 1 - shard
    steps = [sum(of_worker) for of_worker in STEPS]
    if heir:
        assert sum(steps) - steps[shard] < other.rule.clock < sum(steps)
    else:
        assert other.rule.clock == sum(steps)


def test_a_join_again_says_where_the_worker_is():
    message = Message(Kind.JOIN, 1, 0, clock=5, pulled_at=40, scalar=3.0, stop=True)
    assert (message.again, message.epochs, message.views) == (True, 5, 3)
    assert not message.after_last_round
    done = Message(Kind.JOIN, 1, 0, stop=True, mark=True)
    assert (done.after_last_round, done.keeps_parameters) == (True, False)
    assert not Message(Kind.JOIN, 1, 0, mark=True).after_last_round
    assert not Message(Kind.JOIN, 1, 0, clock=5).again
    assert not Message(Kind.CENTER, 0, 0, stop=True).again


def test_commits_lost_are_counted_by_what_workers_have_seen():
    rule = Downpour().center(np.zeros(1, "f4"), 1, SGD(0.1))
    server = Server(rule, [1])
    server.take_over(Server(Downpour().center(np.ones(1, "f4"), 1, SGD(0.1)), [1]).copy())
    server.handle(Received(Message(Kind.JOIN, 1, 0, clock=2, pulled_at=37, scalar=0.0, stop=True), Frame(1)))
    assert server.commits_lost == 37
    assert server.peers[1].epochs == 2
    assert server.progress_at == [0.0, 0.0, 0.0]
    assert rule.center.tolist() == [1.0]


def test_the_last_round_waits_for_no_worker_that_has_contributed_to_it_on_the_dead_server():
    server = Server(Synchronous().center(np.zeros(2, "f4"), 3, SGD(0.1)), [2, 3, 4])
    server.take_over(Server(Synchronous().center(np.zeros(2, "f4"), 3, SGD(0.1)), [2, 3, 4]).copy())
    sent(server, Kind.JOIN, 2, 0, stop=True, mark=True)
    sent(server, Kind.JOIN, 4, 0, stop=True)
    assert sent(server, Kind.EXCHANGE, 4, 1) == []  # rank 3 may still contribute
    sent(server, Kind.JOIN, 3, 0, stop=True, mark=True)
    assert server.rule.clock == 1


# -- contributions to one shard of several that a server has taken along -------------------------------------

TOGETHER = {
    "synchronous": (Synchronous(lag=1), {"optimizer": SGD(0.01)}),
    "rounds": (LocalSGD(every=1, lag=1), {"local": SGD(0.01)}),
    "diloco": (DiLoCo(every=1, lag=1), {"local": SGD(0.01)}),
    "easgd": (EASGD(every=1, lag=1, synchronous=True), {"local": SGD(0.01)}),
}


@pytest.mark.parametrize("name", TOGETHER)
def test_workers_do_not_wait_for_each_other_on_two_servers_after_a_death(name):
    algorithm, optimizers = TOGETHER[name]
    start = [np.full(4, 0.5, "f4"), np.full(3, 1.5, "f4")]
    for seed in range(40):
        draw = np.random.default_rng(seed)
        copied, died = sorted(draw.choice(60, 2, replace=False).tolist())
        run = train_virtually(
            algorithm,
            lambda x, rank: x - rank,
            start,
            workers=2,
            servers=2,
            steps=[[4, 3], [3, 4]],
            deaths=[ServerDeath(copied, died, shard=int(draw.integers(2)))],
            schedule=RandomOrder(seed),
            **optimizers,
        )
        assert np.isfinite(run.center).all()


def rejoined(rounds):
    """A server in the place of a dead one, with workers that have told their contributions so far."""
    server, dead = (Server(LocalSGD().center(np.zeros(2, "f4"), 3, None), list(rounds)) for _ in range(2))
    server.take_over(dead.copy())
    for rank in rounds:
        sent(server, Kind.JOIN, rank, 0, stop=True)
    for rank, number in rounds.items():
        assert sent(server, Kind.ROUND, rank, 1, clock=number) == []
    return server


def test_a_commit_waits_for_no_worker_whose_contribution_to_it_is_lost():
    server = rejoined({2: 5, 3: 7, 4: 6})
    assert sent(server, Kind.EXCHANGE, 3, 2) == []  # the eighth
    assert sent(server, Kind.EXCHANGE, 2, 2) == [(2, Kind.CENTER, False)]  # the sixth, alone
    assert server.rule.absent == 2
    assert sent(server, Kind.EXCHANGE, 4, 2) == []  # the seventh
    assert sent(server, Kind.EXCHANGE, 2, 3) == [(2, Kind.CENTER, False), (4, Kind.CENTER, False)]
    assert sent(server, Kind.EXCHANGE, 4, 3) == []
    assert len(sent(server, Kind.EXCHANGE, 2, 4)) == 3
    server.validate()
    assert (server.rule.clock, server.rule.absent) == (3, 0)


def test_in_the_next_epoch_all_rounds_are_those_of_all():
    server = rejoined({2: 0, 3: 1})
    for rank in (2, 3):
        sent(server, Kind.EPOCH, rank, 2)
    assert sent(server, Kind.EXCHANGE, 2, 3) == []
    assert len(sent(server, Kind.EXCHANGE, 3, 3)) == 2


def test_who_others_wait_for_on_another_server_does_not_pause():
    server = rejoined({2: 0, 3: 1})
    assert sent(server, Kind.PAUSE, 2, 1) == [(2, Kind.PAUSED, True)]  # cancelled
    assert sent(server, Kind.EXCHANGE, 2, 2) == [(2, Kind.CENTER, False)]
    assert sent(server, Kind.PAUSE, 2, 2) == []


# -- a worker that serves another shard ---------------------------------------------------------------------


def sent(server, kind, sender, sequence, **fields):
    """What a server answers to a message: the receivers and the kinds."""
    frame = Frame(2)
    vector = frame.vector if kind is Kind.EXCHANGE else None
    actions = server.handle(Received(Message(kind, sender, sequence, vector=vector, **fields), frame))
    server.validate()
    return [(one.rank, one.message.kind, one.message.mark) for one in actions if isinstance(one, Send)]


def test_a_worker_that_turns_is_not_waited_for_and_pulls_like_a_server():
    server = Server(Synchronous().center(np.zeros(2, "f4"), 2, SGD(0.1)), [2, 3], other_servers=[1, 2])
    for rank in (2, 3):
        assert sent(server, Kind.JOIN, rank, 0) == [(rank, Kind.CENTER, False)]
    assert sent(server, Kind.EXCHANGE, 3, 1) == []
    assert sent(server, Kind.TURN, 2, 0) == [(2, Kind.ACK, True), (3, Kind.CENTER, False)]
    assert (server.rule.clock, server.awaited, server.turned) == (1, 1, {2})
    assert sent(server, Kind.PULL, 2, 0) == [(2, Kind.CENTER, False)]
    assert sent(server, Kind.PULL, 2, 1) == []
    assert server.tell_wishes() == []
    server.stopping = True
    assert server.tell_wishes() == []  # only a sub-server would be told of it without the centre
    assert sent(server, Kind.EPOCH, 3, 2) == [(2, Kind.CENTER, False)]
    assert server.pulled_by([2], 1)
    assert not server.pulled_by([2], 2)
    assert sent(server, Kind.TURN, 2, 0) == [(2, Kind.ACK, True)]
    sent(server, Kind.LEAVE, 2, 0)
    assert server.pulled_by([2], np.inf)
    assert sent(server, Kind.LEAVE, 3, 3) == []
    assert server.finished


def test_a_worker_that_turns_gives_up_what_it_has_asked_for():
    server = Server(Synchronous().center(np.zeros(2, "f4"), 2, SGD(0.1)), [2, 3], other_servers=[2])
    for rank in (2, 3):
        sent(server, Kind.JOIN, rank, 0)
    assert sent(server, Kind.EXCHANGE, 2, 1) == []
    assert sent(server, Kind.TURN, 2, 0) == [(2, Kind.ACK, True)]
    assert (server.queued, server.rule.clock) == (0, 0)


def test_others_do_not_pause_in_an_epoch_that_a_worker_had_finished_before_it_turned():
    """It is past that epoch with its script, in which it saves as a server."""
    server = Server(Downpour().center(np.zeros(2, "f4"), 2, SGD(0.1)), [2, 3], other_servers=[2])
    for rank in (2, 3):
        sent(server, Kind.JOIN, rank, 0)
    sent(server, Kind.EPOCH, 2, 1)
    sent(server, Kind.TURN, 2, 0)
    assert sent(server, Kind.PAUSE, 3, 0) == [(3, Kind.PAUSED, True)]
    sent(server, Kind.EPOCH, 3, 1)
    assert sent(server, Kind.PAUSE, 3, 1) == [(3, Kind.PAUSED, False)]


def test_a_worker_that_has_left_turns_and_stays_among_those_that_have():
    server = Server(Downpour().center(np.zeros(2, "f4"), 1, SGD(0.1)), [2], other_servers=[2])
    sent(server, Kind.JOIN, 2, 0)
    sent(server, Kind.LEAVE, 2, 1)
    assert sent(server, Kind.TURN, 2, 0) == [(2, Kind.ACK, True)]
    assert server.peers[2].standing.name == "LEFT"
    assert sent(server, Kind.PULL, 2, 1, mark=True) == [(2, Kind.CENTER, True)]
    assert server.pulled_by([2], np.inf)
