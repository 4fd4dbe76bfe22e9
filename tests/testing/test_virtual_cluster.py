"""The virtual cluster and its schedules: the same bits every time, in the order and time asked for."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from nnlo_common import (
    EAMSGD,
    EASGD,
    GEM,
    SGD,
    ConfigurationError,
    DiLoCo,
    Downpour,
    FlatVector,
    LocalSGD,
    PeerLostError,
    ProtocolError,
    Synchronous,
)
from nnlo_common.protocol import Activity, Kind, Send, Server, Shard, Wait, Worker
from nnlo_common.testing import (
    ByTime,
    Interleaved,
    PendingRequest,
    RandomOrder,
    Replay,
    RoundRobin,
    VirtualCluster,
    train_virtually,
)

DOWNPOUR = Downpour()


def run(algorithm=DOWNPOUR, workers=3, steps=4, servers=1, **options):
    """A training whose numbers tell every order from every other."""
    center = SGD(0.1) if algorithm.optimizer_runs == "center" else None
    options = {"optimizer": center, "local": lambda: SGD(0.05), **options}
    return train_virtually(
        algorithm,
        lambda x, rank: x * rank - 1,
        [np.ones(2, "f4") for _ in range(servers)],
        workers=workers,
        steps=steps,
        servers=servers,
        **options,
    )


def bits(result):
    return [vector.tobytes() for vector in (result.center, *result.parameters)]


SCHEDULES = {
    "turns": RoundRobin,
    "random": lambda: RandomOrder(5),
    "interleaved": lambda: Interleaved(5),
    "time": lambda: ByTime(seed=5, compute_s=lambda draw, rank: draw.uniform(0.5, 2)),
}
ALGORITHMS = {
    "downpour": DOWNPOUR,
    "dean": Downpour(n_push=3, n_fetch=2, local_learning_rate=0.05),
    "lag": Downpour(lag=2),
    "easgd": EASGD(every=2, beta=0.5),
    "gem": GEM(learning_rate=0.1),
    "synchronous": Synchronous(),
}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_same_schedule_gives_the_same_bits_and_so_does_its_replay(schedule, name, servers):
    one, two = (run(ALGORITHMS[name], servers=servers, schedule=SCHEDULES[schedule]()) for _ in range(2))
    assert one.trace == two.trace
    assert bits(one) == bits(two)
    replayed = run(ALGORITHMS[name], servers=servers, schedule=Replay(one.trace))
    assert replayed.trace == one.trace
    assert bits(replayed) == bits(one)
    if name == "synchronous" and schedule != "interleaved":
        assert bits(one) == bits(run(ALGORITHMS[name], servers=servers))


def test_other_seeds_give_other_orders_and_other_bits():
    for make in (RandomOrder, Interleaved):
        runs = [run(schedule=make(seed)) for seed in range(4)]
        assert len({tuple(each.trace[0]) for each in runs}) == 4
        assert len({bits(each)[0] for each in runs}) == 4


def test_the_invariants_are_checked_without_changing_anything():
    assert bits(run(check=True)) == bits(run(check=False))


# --- one choice ------------------------------------------------------------------------------------------


def waiting(*items):
    """Requests as (shard, worker, kind, arrival); sorted, as the cluster gives them."""
    return [
        PendingRequest(shard, worker, kind, float(arrival)) for shard, worker, kind, arrival in sorted(items)
    ]


def chosen(schedule, *items):
    item = schedule.choose(waiting(*items))
    return item.shard, item.worker


def exchanges(*workers, shard=0):
    return [(shard, worker, Kind.EXCHANGE, 0) for worker in workers]


def test_round_robin_goes_on_after_the_last_one_and_around():
    schedule = RoundRobin()
    order = [
        chosen(schedule, *exchanges(*there)) for there in [(1, 2, 5), (1, 2, 5), (1, 2, 5), (1, 2, 5), (1, 5)]
    ]
    assert [worker for _, worker in order] == [1, 2, 5, 1, 5]


def test_round_robin_keeps_a_turn_for_each_shard():
    schedule = RoundRobin()
    for there in ((1, 2, 3), (1, 3), (1, 2, 3)):
        left = [*exchanges(*there), *exchanges(*there, shard=1)]
        order = []
        while left:
            order.append(chosen(schedule, *left))
            left.remove((*order[-1], Kind.EXCHANGE, 0))
        assert [worker for shard, worker in order if shard == 0] == list(there)
        assert [worker for shard, worker in order if shard == 1] == list(there)


@pytest.mark.parametrize("make", [RoundRobin, lambda: RandomOrder(3)], ids=["RoundRobin", "RandomOrder"])
def test_turns_begin_with_joins_and_do_not_split_a_lock_from_its_commit(make):
    there = [(0, 1, Kind.LOCK, 0), (0, 2, Kind.JOIN, 0), (0, 3, Kind.COMMIT, 0)]
    schedule = make()
    assert chosen(schedule, *there) == (0, 3)
    assert chosen(schedule, *there[:2]) == (0, 2)
    assert chosen(schedule, *there[:1]) == (0, 1)


@pytest.mark.parametrize("make", [RandomOrder, Interleaved])
def test_random_choices_are_uniform(make):
    schedule = make(7)
    counts = Counter(chosen(schedule, *exchanges(1, 2, 3)) for _ in range(3000))
    assert sorted(counts) == [(0, 1), (0, 2), (0, 3)]
    assert all(abs(count - 1000) < 5 * (1000 * 2 / 3) ** 0.5 for count in counts.values())  # 5 sigma


def test_interleaved_may_choose_anything():
    there = [(0, 1, Kind.LOCK, 0), (0, 2, Kind.JOIN, 0), (0, 3, Kind.COMMIT, 0)]
    schedule = Interleaved(3)
    assert {chosen(schedule, *there) for _ in range(100)} == {(0, 1), (0, 2), (0, 3)}


@pytest.mark.parametrize(
    ("there", "first"),
    [
        ([(0, 1, Kind.PULL, 2), (0, 2, Kind.PULL, 1), (1, 3, Kind.PULL, 3)], (0, 2)),
        ([(0, 1, Kind.PULL, 2), (1, 1, Kind.JOIN, 1)], (1, 1)),
        ([(0, 2, Kind.PULL, 1), (0, 1, Kind.LEAVE, 1)], (0, 1)),
        ([(1, 1, Kind.PULL, 1), (0, 2, Kind.PULL, 1)], (0, 2)),
    ],
    ids=["earliest", "of any shard and kind", "tie: lower rank", "tie: lower shard"],
)
def test_by_time_serves_who_came_first(there, first):
    assert chosen(ByTime(seed=0), *there) == first


# --- time, by hand ---------------------------------------------------------------------------------------


def by_hand(**changes):
    """Rank 1 computes 3 s and rank 2 1 s; a message takes 0.25 s, 1 s with a vector; serving takes 0.5 s."""
    times = {
        "compute_s": lambda draw, rank: {1: 3.0, 2: 1.0}[rank],
        "communicate_s": lambda draw, size: 1.0 if size else 0.25,
        "serve_s": lambda draw, size: 0.5,
    }
    return ByTime(seed=0, **{**times, **changes})


def test_the_time_of_a_tiny_training_is_what_one_derives_by_hand():
    r"""One step each of Downpour.

    JOIN of both arrives at 0.25; 1 is served until 0.75, 2 until 1.25; their centres come at 1.75 and 2.25.
    1 has its gradient at 4.75 and it arrives at 5.75; 2 at 3.25, arriving at 4.25.
    2 is served 4.25 to 4.75, replied at 5.75 and leaves: arrives 6.0. 1 is served 5.75 to 6.25.
    LEAVE of 2 waits from 6.0 to 6.25 and is served until 6.75. 1 has its reply at 7.25, its LEAVE arrives
    at 7.5 and is served until 8.0.
    """
    result = run(workers=2, steps=1, schedule=by_hand())
    assert result.trace == {0: [1, 2, 2, 1, 2, 1]}
    assert result.seconds == 8.0


def test_two_servers_work_at_the_same_time():
    r"""One worker, one step, two servers: both halves take the time of one.

    JOINs arrive at 0.25, are served until 0.75, the centres come at 1.75; the gradient is ready at 4.75 and
    arrives at 5.75; served until 6.25, replied at 7.25, left at 7.5, served until 8.0.
    """
    result = run(workers=1, steps=1, servers=2, schedule=by_hand(compute_s=lambda draw, rank: 3.0))
    assert result.trace == {0: [2, 2, 2], 1: [2, 2, 2]}
    assert result.seconds == 8.0


def test_a_lag_hides_the_round_trip_behind_the_next_gradient():
    """Joined at 1.75; without lag 4 x (3 + 1 + 0.5 + 1) more, and 0.75 to leave; with lag 1 only 4 x 3."""
    schedule = {"compute_s": lambda draw, rank: 3.0}
    plain = run(workers=1, steps=4, schedule=by_hand(**schedule))
    late = run(Downpour(lag=1), workers=1, steps=4, schedule=by_hand(**schedule))
    assert plain.seconds == 1.75 + 4 * 5.5 + 0.75
    assert late.seconds == 1.75 + 4 * 3 + 2.5 + 0.75


def test_a_busy_server_makes_workers_queue():
    """Gradients cost nothing: after the start the server works without a pause, 0.5 s for each request."""
    result = run(
        workers=8,
        steps=5,
        schedule=by_hand(compute_s=lambda draw, rank: 0.0, communicate_s=lambda draw, size: 0.0),
    )
    assert result.seconds == 0.5 * 8 * (1 + 5 + 1)


def test_messages_of_one_pair_do_not_overtake_each_other():
    """GEM's COMMIT holds a vector and is slow, the LEAVE behind it is not."""
    result = run(GEM(learning_rate=0.1), workers=1, steps=1, schedule=by_hand())
    # JOIN 0.25, 0.75, 1.75; LOCK 4.75 + 0.25, 5.5, 6.5; COMMIT 7.5, 8.0; LEAVE there at 7.5, not at 6.75.
    assert result.seconds == 8.5


def test_times_are_drawn_from_the_seed_only():
    def drawn(seed):
        return run(schedule=ByTime(seed=seed, compute_s=lambda draw, rank: draw.expovariate(1.0))).seconds

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(5)}) == 5


def test_without_times_no_time_passes():
    assert run().seconds == 0.0


def test_a_vector_takes_longer_the_longer_it_is():
    sizes = []

    def communicate_s(draw, size):
        sizes.append(size)
        return 1.0

    run(workers=1, steps=1, schedule=by_hand(communicate_s=communicate_s, compute_s=lambda *_: 1.0))
    assert sizes == [0, 8, 8, 8, 0]  # JOIN, CENTER, EXCHANGE, CENTER, LEAVE: bytes of the vector


# --- replays that do not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda order: [9, *order], r"continues with \{0: \[9, 1, 2, 3, 1\]\}"),
        (lambda order: [1, 1, *order[2:]], r"but waiting are \[\(0, 2\), \(0, 3\)"),
        (lambda order: [*order, 3], None),
        (lambda order: [*order[:-1], 2], r"continues with \{0: \[2\]\}.*waiting are \[\(0, 3\)\]"),
    ],
)
def test_a_log_of_another_run_is_refused(change, problem):
    order = run().trace[0]
    assert order[:3] == [1, 2, 3]
    if problem is None:  # nothing is left to be handled, so nobody asks the schedule
        assert run(schedule=Replay({0: change(order)})).trace[0] == order
        return
    with pytest.raises(ProtocolError, match=problem) as refusal:
        run(schedule=Replay({0: change(order)}))
    assert "replay it with the program, options and number of ranks that it was recorded with" in str(
        refusal.value
    )


def test_where_the_log_ends_the_run_ends():
    """All workers have joined and the first has made one step; the rest waits for ever, on purpose."""
    result = run(schedule=Replay({0: [1, 2, 3, 1]}))
    assert result.trace == {0: [1, 2, 3, 1]}
    assert result.servers[0].rule.clock == 1


def test_shards_keep_their_own_orders_in_a_replay():
    """Reversed at one of the two servers: their orders have nothing to do with each other."""
    order = [1 + 1, 2 + 1, 3 + 1]
    trace = {0: order * 6, 1: [*order, *(order[::-1] * 4), *order]}
    result = run(servers=2, schedule=Replay(trace))
    assert result.trace == trace
    first, second = result.center.reshape(2, 2)
    assert not np.array_equal(first, second)


# --- losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("handled", "commits"), [(0, 0), (1, 0), (2, 1), (4, 3), (99, 4)])
def test_a_lost_worker_is_heard_exactly_so_often(handled, commits):
    result = run(losses={2: handled}, check=True)
    server = result.servers[0]
    assert result.trace[0].count(2) == min(handled, 6)
    assert server.peers[2].commits == commits
    assert server.peers[2].standing.name == ("LEFT" if handled == 99 else "LOST")
    assert [server.peers[rank].commits for rank in (1, 3)] == [4, 4]
    assert server.finished


@pytest.mark.parametrize("handled", range(7))
def test_a_lost_worker_leaves_synchronous_rounds_that_go_on(handled):
    """Also amid a round; join, four steps and leave are six requests."""
    server = run(Synchronous(), losses={1: handled}).servers[0]
    assert server.rule.clock == 4
    # Its last request is dropped with it if the round that it was for was not yet complete.
    assert server.peers[1].commits == min(4, max(0, handled - 2))
    assert server.staleness == {0: 8 + server.peers[1].commits}


@pytest.mark.parametrize("handled", range(10))
def test_a_lost_lock_is_given_on(handled):
    """Join, four pairs of lock and commit, and leave."""
    server = run(GEM(learning_rate=0.1), losses={2: handled}).servers[0]
    assert server.peers[2].commits == max(0, (handled - 1) // 2)
    assert server.finished


def test_everybody_may_be_lost():
    result = run(losses={1: 0, 2: 1, 3: 3})
    assert sorted(result.trace[0]) == [2, 3, 3, 3]
    assert result.servers[0].finished


# --- hangs -----------------------------------------------------------------------------------------------


def cluster_of(program, **options):
    shard = Shard(0, 0, slice(0, 1))
    start = [np.ones(1, "f4")]
    worker = Worker(1, DOWNPOUR, FlatVector.of(start), FlatVector.of(start), [shard], workers=1)
    server = Server(DOWNPOUR.center(np.ones(1, "f4"), 1, SGD(1.0)), [1])
    return VirtualCluster([server], {1: worker}, {1: program(worker)}, check=True, **options)


def waits_for_nothing(worker: Worker) -> Activity:
    yield from worker.join()
    yield Wait()


def never_sends(worker: Worker) -> Activity:
    for action in worker.join():
        if not isinstance(action, Send):
            yield action


def joins_only(worker: Worker) -> Activity:
    yield from worker.join()


@pytest.mark.parametrize("program", [waits_for_nothing, never_sends])
def test_who_waits_for_what_nobody_sends_hangs(program):
    with pytest.raises(PeerLostError, match="rank 1: waits for a reply that no server will send") as hang:
        cluster_of(program).run()
    assert hang.value.rank == 1


def test_who_ends_without_leaving_does_not_hang():
    cluster = cluster_of(joins_only)
    cluster.run()
    assert cluster.trace == {0: [1]}
    assert not cluster.servers[0].finished


def test_the_rank_that_hangs_is_named_among_others():
    """The last of three workers goes on alone; where a rule keeps its quorum it would wait for ever."""
    result = run(Synchronous(), steps=[1, 2, 5])
    assert result.servers[0].rule.clock == 5
    with pytest.raises(PeerLostError, match="rank 1"):
        quorum_of_two_for_ever().run()


def quorum_of_two_for_ever():
    rule = Synchronous().center(np.ones(1, "f4"), 2, SGD(1.0))
    rule.quorum = lambda awaited: 2
    server, shard = Server(rule, [1, 2]), Shard(0, 0, slice(0, 1))
    workers = {
        rank: Worker(
            rank, Synchronous(), *(FlatVector.of([np.ones(1, "f4")]) for _ in "xg"), [shard], workers=2
        )
        for rank in (1, 2)
    }

    def program(worker, steps):
        yield from worker.join()
        for _ in range(steps):
            yield from worker.step()
        yield from worker.leave()

    return VirtualCluster([server], workers, {1: program(workers[1], 2), 2: program(workers[2], 1)})


# --- many ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [RoundRobin, lambda: RandomOrder(1), lambda: ByTime(seed=1)])
def test_64_workers_add_up(make):
    """Each gradient is a 1 in the worker's own coordinate, so the centre counts them all."""
    unit = np.eye(64, dtype="f4")
    result = train_virtually(
        DOWNPOUR,
        lambda x, rank: -unit[rank - 1],
        np.zeros(64),
        workers=64,
        steps=list(range(1, 65)),
        optimizer=SGD(1.0),
        schedule=make(),
        check=False,
    )
    assert result.center.tolist() == list(range(1, 65))
    assert Counter(result.trace[0]) == {rank: rank + 2 for rank in range(1, 65)}
    assert result.servers[0].rule.clock == 64 * 65 // 2


def test_in_turn_the_staleness_of_64_workers_is_63():
    server = run(workers=64, steps=3).servers[0]
    # The first turn's contributions were all taken at clock 0, the later ones a turn ago.
    assert server.staleness == Counter(dict.fromkeys(range(63), 1)) + Counter({63: 1 + 64 * 2})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"workers": 0}, "workers=0: must be a whole number of at least 1"),
        ({"workers": -1}, "workers=-1: must be a whole number of at least 1"),
        ({"workers": 2.0}, "workers=2.0: must be a whole number"),
        ({"workers": True}, "workers=True: must be a whole number"),
        ({"workers": None}, "workers=None: must be a whole number"),
        ({"servers": 0}, "servers=0: must be a whole number of at least 1"),
        ({"steps": [1, 2]}, "steps has 2 entries, but there are 3 workers; give one number, or one for each"),
        ({"steps": np.ones(4, int)}, "steps has 4 entries, but there are 3 workers"),
        ({"steps": -1}, "steps=-1: must be a whole number of at least 0"),
        ({"steps": 2.5}, "steps=2.5: must be a whole number"),
        ({"steps": None}, "steps=None: must be a whole number"),
        ({"steps": [1, -2, 1]}, r"steps\[1\]=-2: must be a whole number of at least 0"),
        ({"begin": [np.zeros(2)]}, "begin has 1 entries, but there are 3 workers; give one start for each"),
        ({"losses": {0: 1}}, "losses={0: 1}: 0 is not the rank of a worker; these have the ranks 1 to 3"),
        ({"losses": {2: 1, 4: 1}}, "4 is not the rank of a worker"),
        ({"losses": {2: -1}}, r"losses\[2\]=-1: must be a whole number of at least 0"),
        ({"losses": {2: 0.5}}, r"losses\[2\]=0.5: must be a whole number"),
        ({"resume": {"servers": []}}, r"resume=.* has \['servers'\]; pass what state\(\) of an earlier run"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_what_was_found_and_what_is_expected(options, problem):
    with pytest.raises(ConfigurationError, match=problem):
        run(**{"servers": 1, **options})


def test_a_gradient_that_is_not_returned_is_refused():
    with pytest.raises(ConfigurationError, match=r"gradient\(x, 1\) returned None; return the gradient"):
        train_virtually(Downpour(), lambda x, rank: None, [1.0], workers=2, steps=1, optimizer=SGD(1.0))


def test_numbers_may_be_those_of_numpy():
    plain = run(workers=3, steps=[4, 4, 4])
    for steps in (np.int64(4), np.full(3, 4), np.array(4)[()], [np.int32(4)] * 3, range(4, 5)):
        options = {"workers": 1} if isinstance(steps, range) else {"workers": np.int64(3)}
        result = run(steps=steps, servers=np.int64(1), losses={1: np.int64(99)}, **options)
        assert isinstance(steps, range) or bits(result) == bits(plain)


@pytest.mark.parametrize(
    ("algorithm", "problem"),
    [
        (EASGD(), "with EASGD each worker steps by itself, so it would not be used; pass local= instead"),
        (LocalSGD(), "with LocalSGD each worker steps by itself, .* pass local= instead"),
        (GEM(), "with GEM the algorithm steps by itself, .* leave it out"),
        (EAMSGD(learning_rate=0.1), "with EAMSGD the algorithm steps by itself, .* leave it out"),
    ],
)
def test_an_optimizer_that_would_not_be_used_is_refused(algorithm, problem):
    with pytest.raises(ConfigurationError, match=r"optimizer=SGD\(.*\) steps the centre, but " + problem):
        run(algorithm, optimizer=SGD(0.1))
    run(algorithm)


def test_the_optimizer_of_diloco_is_the_outer_one():
    """Two workers one inner step of 0.5 apart from 1: their mean displacement 0.5 is taken whole."""
    result = train_virtually(
        DiLoCo(every=1), lambda x, rank: x, [1.0], workers=2, steps=1, optimizer=SGD(1.0), local=SGD(0.5)
    )
    assert result.center == [0.5]


def test_the_workers_optimizer_may_be_given_or_made():
    """Each worker has one of its own in either case; momentum would show if they shared one."""
    given = SGD(0.05, momentum=0.9)
    runs = [run(LocalSGD(every=2), local=local) for local in (given, lambda: SGD(0.05, momentum=0.9))]
    assert bits(runs[0]) == bits(runs[1])
    assert len({id(worker.local) for worker in runs[0].workers} | {id(given)}) == 4
    assert given.state()["steps"] == 0


def test_no_request_is_handled_twice_or_never():
    """Join, four exchanges and leave of each worker at each server, under every schedule."""
    for make, servers in itertools.product(SCHEDULES.values(), (1, 2)):
        trace = run(servers=servers, schedule=make()).trace
        assert [Counter(order) for order in trace.values()] == [
            {servers + worker: 6 for worker in range(3)}
        ] * servers
