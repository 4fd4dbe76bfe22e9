"""The same script on every rank: alone, with threads as ranks, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from nnlo_common import (
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    ConfigurationError,
    Downpour,
    LocalSGD,
    NNLOError,
    Participant,
    PeerLostError,
    RMSprop,
    Synchronous,
    TrainingReport,
)
from nnlo_common.testing import Replay, RoundRobin
from tests.helpers.threads import flat, ranks, server_of, train
from tests.testing.test_mpi_replay import LAYOUTS, again

from tests.helpers.numpy_cases import CASES, EPOCHS, STEPS, initial  # isort: skip - in_memory has made it importable

TIMEOUT_S = 180.0


def ones(*sizes):
    return [np.ones(size, "f4") for size in sizes or (3,)]


def name_of(algorithm):
    return type(algorithm).__name__


# --- the same numbers ------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.01),
    "adagrad": lambda: Adagrad(0.1),
    "rmsprop": lambda: RMSprop(0.01),
    "adadelta": lambda: Adadelta(1.0),
}


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_with_servers_is_the_optimizer_alone_bit_for_bit(name, servers):
    def program(world=None):
        optimizer = OPTIMIZERS[name]()
        with Participant(Downpour(), initial(), optimizer=optimizer, servers=servers, world=world) as me:
            me.rank = servers  # whose noise the gradient has
            seen = train(me, [7, 5], after_epoch=lambda: flat(me.parameters))
        return [*seen, flat(me.parameters)]

    expected = program()
    assert not np.array_equal(expected[0], expected[1])
    assert np.array_equal(expected[1], expected[2])
    with ranks(servers + 1) as cluster:
        found = cluster.run(program, TIMEOUT_S)
    for rank in found[servers:]:
        assert [np.array_equal(*pair) for pair in zip(rank, expected, strict=True)] == [True] * 3
    for rank in found[:servers]:  # in between, the worker may be ahead of the assembled centre
        assert np.array_equal(rank[-1], expected[-1])


def jitter(rank, step):
    """Let other ranks pass, more or less often: mixes the ranks up."""
    for _ in range(np.random.default_rng([rank, step]).integers(4)):
        time.sleep(0)


def train_in_memory(case, size, servers, log, epochs):
    """Run a case with threads as ranks; each rank's parameters and steps, and the order of each server."""

    def program(world):
        optimizer = case.optimizer and case.optimizer()
        with Participant(
            case.algorithm, initial(), optimizer=optimizer, servers=servers, world=world, log_order=log
        ) as me:
            train(me, epochs, before_step=lambda step: jitter(world.rank, step))
        return flat(me.parameters), me.report().steps

    with ranks(size) as cluster:
        results = cluster.run(program, TIMEOUT_S)
    logs = [log, *(log.with_name(f"{log.name}.shard{shard}") for shard in range(1, servers))]
    orders = {read["shard"]: read["handled"] for read in (json.loads(path.read_text()) for path in logs)}
    assert sorted(log.parent.iterdir()) == sorted(logs)  # and nothing half written
    return results, orders


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"n{layout[0]}-servers{layout[1]}")
@pytest.mark.parametrize("name", CASES)
def test_replaying_the_logged_order_gives_the_same_bits(name, layout, tmp_path):
    (size, servers), case = layout, CASES[name]
    epochs = [STEPS // EPOCHS * (size - servers) + 1] * EPOCHS  # one more for some: uneven on purpose
    results, orders = train_in_memory(case, size, servers, tmp_path / "order.json", epochs)
    workers = size - servers
    steps = [[len(range(worker, count, workers)) for count in epochs] for worker in range(workers)]
    assert [count for _, count in results[servers:]] == [sum(counts) for counts in steps]
    run = again(case, size, servers, steps, Replay(orders))
    assert run.trace == orders
    for vector, _ in results[:servers]:
        assert np.array_equal(vector, run.center)
    for (vector, _), expected in zip(results[servers:], run.parameters, strict=True):
        assert np.array_equal(vector, expected)
    if servers == 2 and size == 3:
        assert not np.array_equal(run.center, flat(initial()))


def test_the_threads_do_not_simply_take_turns(tmp_path):
    """Otherwise the replays above would prove little."""
    steps = [[6]] * 4
    turns = again(CASES["downpour"], 5, 1, steps, RoundRobin()).trace[0]
    _, orders = train_in_memory(CASES["downpour"], 5, 1, tmp_path / "order.json", [24])
    assert sorted(orders[0]) == sorted(turns)
    assert orders[0] != turns


# --- batches and epochs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "batches", "shares"),
    [
        (1, 5, ["01234"]),
        (2, 5, ["024", "13"]),
        (4, 6, ["04", "15", "2", "3"]),
        (4, 1, ["0", "", "", ""]),
        (3, 0, ["", "", ""]),
    ],
)
@pytest.mark.parametrize("algorithm", [Downpour(), Synchronous(), LocalSGD(every=2)], ids=name_of)
def test_batches_are_dealt_out_however_uneven_they_are(algorithm, workers, batches, shares):
    def program(world):
        with Participant(algorithm, ones(), optimizer=SGD(0.1), world=world) as me:
            epochs = []
            for _ in range(2):
                epochs.append("")
                for batch in me.batches(map(str, range(batches))):
                    epochs[-1] += batch
                    me.step()
        return epochs, me.report().steps

    with ranks(workers + 1) as cluster:
        server, *others = cluster.run(program, TIMEOUT_S)
    assert server == (["", ""], 0)
    assert others == [([share, share], 2 * len(share)) for share in shares]


def test_alone_every_batch_is_ones_own():
    with Participant(Downpour(), ones(), optimizer=SGD(0.1)) as me:
        assert list(me.batches(iter("abc"))) == ["a", "b", "c"]
    assert (me.rank, me.size, me.role) == (0, 1, "alone")


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_after_each_epoch_and_at_the_end_the_servers_have_the_whole_centre(servers):
    """All ranks meet after each epoch, so the numbers cannot move while they are looked at."""

    def program(world):
        with Participant(Downpour(), initial(), optimizer=Adam(0.01), servers=servers, world=world) as me:
            own = server_of(me) and server_of(me).rule

            def look():
                world.gather_text("nobody is in the epoch any more")
                now = flat(me.parameters), own and own.center.copy(), me.report().exchanges
                world.gather_text("everybody has looked")
                return now

            seen = train(me, [5, 2, 0, 7], after_epoch=look)
        seen.append((flat(me.parameters), own and own.center.copy(), me.report().exchanges))
        return seen

    with ranks(servers + 2) as cluster:
        seen = cluster.run(program, TIMEOUT_S)[:servers]
    previous = 0, flat(initial())
    for done, each in zip([5, 7, 7, 14, 14], zip(*seen, strict=True), strict=True):
        center = np.concatenate([shard for _, shard, _ in each])
        assert [exchanges for _, _, exchanges in each] == [done] * servers  # epochs are served exactly
        for whole, _, _ in each:
            assert np.array_equal(whole, center)
        assert np.array_equal(center, previous[1]) == (done == previous[0])
        previous = done, center


def test_a_participant_may_take_part_again():
    """It goes on from where its server's parameters are."""

    def program(world):
        me = Participant(Downpour(), ones(), optimizer=SGD(0.5), world=world)
        for _ in range(2):
            with me:
                for _ in me.batches("ab"):
                    me.gradients[0][:] = me.point[0]
                    me.step()
        return me.parameters[0].tolist(), me.report()

    with ranks(2) as cluster:
        served, worked = cluster.run(program, TIMEOUT_S)
    assert served == ([1 / 16] * 3, TrainingReport(exchanges=2))
    assert worked == ([1 / 16] * 3, TrainingReport(steps=2))


# --- what is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 3)])
def test_say_prints_once_where_the_centre_is(size, servers, capsys):
    def program(world):
        with Participant(Downpour(), ones(1, 1, 1), optimizer=SGD(0.1), servers=servers, world=world) as me:
            for epoch in range(2):
                train(me, 3)
                me.say(f"epoch {epoch}")
        me.say(f"{me.role} of {me.size}")
        return me.role

    with ranks(size) as cluster:
        roles = cluster.run(program, TIMEOUT_S)
    if size == 1:
        expected = ["alone"]
    else:
        expected = [f"server {s}" for s in range(servers)] + [f"worker {w}" for w in range(size - servers)]
    assert roles == expected
    assert capsys.readouterr().out == f"epoch 0\nepoch 1\n{expected[0]} of {size}\n"


def two_workers_one_late(algorithm, held):
    """Three steps each; rank 1 has joined before rank 2 sends, and sends once rank 2 has made `held`."""

    def program(world):
        with Participant(algorithm, ones(), optimizer=SGD(0.1), world=world) as me:
            if me.rank == 1:
                joined.set()
            for made, _ in enumerate(me.batches(range(6)), 1):
                me.step()
                if (me.rank, made) == (2, held):
                    late.set()
        return me.report()

    with ranks(3) as cluster:
        late, joined = cluster.hold(1, "send EXCHANGE"), cluster.hold(2, "send EXCHANGE")
        return cluster.run(program, TIMEOUT_S)


def test_reports_are_exact():
    assert two_workers_one_late(Downpour(), held=3) == [
        TrainingReport(exchanges=6, mean_staleness=0.5),
        TrainingReport(steps=3),
        TrainingReport(steps=3),
    ]
    server, *workers = two_workers_one_late(Synchronous(backup=1), held=2)
    assert workers == [TrainingReport(steps=3)] * 2
    assert server.dropped >= 1  # the first of rank 1; the others race
    assert (server.exchanges + server.dropped, server.mean_staleness) == (6, 0.0)


def test_a_report_of_a_synchronous_training_counts_contributions_and_not_commits():
    def program(world):
        with Participant(Synchronous(), ones(), optimizer=SGD(0.1), world=world) as me:
            train(me, [9, 9])
        return me.report()

    with ranks(4) as cluster:
        server, *workers = cluster.run(program, TIMEOUT_S)
    assert dataclasses.replace(server, noise_scale=None) == TrainingReport(exchanges=18)
    assert workers == [TrainingReport(steps=6)] * 3


def test_weights_are_shares_in_the_mean():
    def program(world):
        with Participant(Synchronous(), [np.zeros(1, "f4")], optimizer=SGD(1.0), world=world) as me:
            for _ in me.batches(range(2)):
                me.gradients[0][:] = 4.0 * me.rank  # 4 and 8
                me.step(weight=me.rank)  # 1 and 2
        return me.parameters[0][0]

    with ranks(3) as cluster:
        center, *workers = cluster.run(program, TIMEOUT_S)
    assert center == np.float32(-20) / np.float32(3)
    assert workers == [center] * 2


# --- misuse ----------------------------------------------------------------------------------------------


def refusals(size, make):
    """What each rank is told when all open `make(rank)` and train; None if it was told nothing."""

    def program(world):
        algorithm, arrays, options = make(world.rank)
        try:
            with Participant(algorithm, arrays, **{"optimizer": SGD(0.1), **options}, world=world) as me:
                train(me, 4)
        except ConfigurationError as error:
            return str(error)
        return None

    with ranks(size) as cluster:
        return cluster.run(program, TIMEOUT_S)


REFUSED_BY_ALL = {
    "model": (
        lambda rank: (Downpour(), ones(3 + (rank == 2)), {"names": ["kernel"]}),
        ["'kernel' float32[3] here and 'kernel' float32[4] there, on rank 2 (host memory)", "all 4 ranks"],
    ),
    "names": (
        lambda rank: (Downpour(), ones(), {"names": ["ab"[rank == 3]]}),
        ["'a' float32[3] here and 'b' float32[3] there, on rank 3"],
    ),
    "number of arrays": (
        lambda rank: (Downpour(), ones(*[3] * (1 + (rank == 1))), {}),
        ["1 parameters here and 2 there, on rank 1"],
    ),
    "algorithm": (
        lambda rank: (EASGD() if rank == 2 else Downpour(), ones(), {}),
        ["is Downpour(", "on rank 0 but EASGD(", "on rank 2 (host memory)"],
    ),
    "option": (
        lambda rank: (Downpour(n_push=1 + (rank == 1)), ones(), {}),
        ["Downpour() on rank 0 but Downpour(n_push=2), ", "on rank 1"],
    ),
    "servers": (
        lambda rank: (Downpour(), ones(3, 3), {"servers": 1 + (rank == 3)}),
        ["servers=1 on rank 0 but 2, on rank 3"],
    ),
    "impossible servers of one": (
        lambda rank: (Downpour(), ones(3, 3), {"servers": 1 + 6 * (rank == 3)}),
        ["servers=1 on rank 0 but 7, on rank 3"],
    ),
    "no worker left": (
        lambda rank: (Downpour(), ones(*[1] * 9), {"servers": 4}),
        ["4 - 4 servers = 0 worker ranks", "servers=3"],
    ),
    "more servers than parameters": (
        lambda rank: (Downpour(), ones(3, 3), {"servers": 3}),
        ["cut into 3 parts", "2 non-empty parameters; use at most 2 servers"],
    ),
    "backup of all": (lambda rank: (Synchronous(backup=3), ones(), {}), ["backup=3 of 3 workers", "<= 2"]),
    "backup with servers": (
        lambda rank: (Synchronous(backup=1), ones(3, 3), {"servers": 2}),
        ["backup=1 works with one server, not with 2"],
    ),
}


@pytest.mark.parametrize("what", REFUSED_BY_ALL)
def test_what_cannot_work_is_refused_on_every_rank_alike(what):
    make, words = REFUSED_BY_ALL[what]
    told = refusals(4, make)
    assert told == [told[0]] * 4
    for part in words:
        assert part in told[0]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("algorithm", [Downpour(), EASGD(), Synchronous()], ids=name_of)
def test_a_missing_optimizer_is_refused_wherever_it_is_needed(algorithm, size):
    def program(world):
        with Participant(algorithm, ones(), world=world) as me:
            train(me, 4)

    with ranks(size) as cluster, pytest.raises(ConfigurationError, match="needs an optimizer; pass one"):
        cluster.run(program, TIMEOUT_S)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "algorithm", [GEM(learning_rate=0.1), EAMSGD(learning_rate=0.1, beta=0.5)], ids=name_of
)
def test_algorithms_with_a_step_of_their_own_need_no_optimizer(algorithm, size):
    def program(world):
        with Participant(algorithm, ones(), world=world) as me:
            train(me, 4)
        return me.report().steps

    with ranks(size) as cluster:
        assert sum(cluster.run(program, TIMEOUT_S)) == 4


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("when", ["before", "after", "after an error"])
@pytest.mark.parametrize(
    "use",
    [lambda me: me.step(), lambda me: list(me.batches("ab")), lambda me: me.point],
    ids=["step", "batches", "point"],
)
def test_outside_of_its_block_a_participant_refuses(use, when, size):
    def program(world):
        me = Participant(Downpour(), ones(), optimizer=SGD(0.1), world=world)
        if when == "after":
            with me:
                train(me, 2)
        if when == "after an error" and size == 1:
            with pytest.raises(KeyError), me:
                raise KeyError
        before = me.parameters[0].copy()
        if when == "after an error" and size == 2:
            return
        with pytest.raises(ConfigurationError, match="outside its `with` block; move the call inside"):
            use(me)
        assert np.array_equal(me.parameters[0], before)
        assert len(me.gradients) == 1

    with ranks(size) as cluster:
        cluster.run(program, TIMEOUT_S)


def test_before_its_block_there_is_nothing_to_report_or_say(capsys):
    me = Participant(Downpour(), ones(), optimizer=SGD(0.1))
    with pytest.raises(ConfigurationError, match="move the call inside"):
        me.report()
    me.say("nothing")
    assert capsys.readouterr().out == ""


def test_a_server_makes_no_steps():
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), world=world) as me:
            if me.rank == 0:
                me.step()
            train(me, 4)

    with (
        ranks(2) as cluster,
        pytest.raises((NNLOError, NotImplementedError), match="rank 0 made a step") as error,
    ):
        cluster.run(program, TIMEOUT_S)
    assert not isinstance(error.value, PeerLostError)


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_weights_that_are_no_shares_are_refused(weight):
    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), world=world) as me:
            for _ in me.batches("a"):
                me.step(weight)

    with ranks(2) as cluster, pytest.raises(ConfigurationError, match=r"weight=.* must be a finite number"):
        cluster.run(program, TIMEOUT_S)


def test_an_error_in_the_loop_is_not_taken_for_the_end_of_the_epoch():
    """Nobody may believe that the others have trained to the end; the order of requests is not written."""
    finished = threading.Event()

    def program(world):
        with Participant(Downpour(), ones(), optimizer=SGD(0.1), world=world) as me:
            for batch in me.batches(range(8)):
                if batch == 3:
                    raise ValueError("no such sample")
                me.step()
        if world.rank == 0:
            finished.set()

    with ranks(3) as cluster, pytest.raises(ValueError, match="no such sample"):
        cluster.run(program, TIMEOUT_S)
    assert not finished.is_set()


@pytest.mark.parametrize(("size", "servers"), [(1, 1), (2, 1), (3, 1), (3, 2), (5, 2)])
def test_the_rank_with_the_centre_stops_all(size, servers):
    """Workers ask to stop at once, which does nothing; the centre asks after two epochs."""
    arrays = [np.ones(2, "f4"), np.ones(3, "f4")]
    workers, asked = max(1, size - servers), threading.Event()

    def program(world):
        steps = []
        with Participant(Downpour(), arrays, optimizer=SGD(0.1), servers=servers, world=world) as me:
            for epoch in range(9):
                steps.append(0)
                if epoch == 3 and me.role.startswith("worker"):
                    assert asked.wait(30)  # nobody waits for the others at the end of an epoch
                for _ in me.batches(range(4 * workers)):
                    me.step()
                    steps[-1] += 1
                if epoch == 1 or me.role.startswith("worker"):
                    me.stop()
                if epoch == 1 and me.role.startswith("server 0"):
                    asked.set()
            assert me.stopped
        return steps

    if size == 1:
        assert program(None) == [4, 4, 0, 0, 0, 0, 0, 0, 0]
        return
    with ranks(size) as cluster:
        shares = cluster.run(program)[servers:]
    for steps in shares:
        assert steps[:2] == [4, 4]
        assert steps[-1] == 0
    if (workers, servers) == (1, 1):  # nobody else keeps the server busy between the epochs
        assert sum(shares[0][2:]) == 1  # the step whose exchange brought the word
