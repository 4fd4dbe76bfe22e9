"""The simulator against closed forms of queues, and against what must hold for any training."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from nnlo_common import AGN, EASGD, GEM, ConfigurationError, DiLoCo, Downpour, LocalSGD, Steady, Synchronous
from nnlo_common.simulation import Costs, Durations, Forecast, Ranks, _simulator, simulate
from nnlo_common.simulation._simulator import _COLD, _NAP_S, _POLLED_S, _SharedCores, gain_of

pytestmark = pytest.mark.sampled(2)

FREE = {"parameters": 1000, "latency_s": 0.0, "bytes_per_s": 1e15}


def name_of(algorithm):
    return type(algorithm).__name__


def exponential(mean_s):
    return Durations(lambda draws: draws.expovariate(1 / mean_s))


def repairmen(workers, think_s, serve_s):
    """Exchanges in a second of workers that each compute, then queue for one server (M/M/1//N)."""
    load = serve_s / think_s
    ways = [math.factorial(workers) / math.factorial(workers - n) * load**n for n in range(workers + 1)]
    return (1 - 1 / sum(ways)) / serve_s


@pytest.mark.parametrize("workers", [1, 4, 12])
def test_a_queue_at_the_server_is_that_of_the_machine_repairman(workers):
    costs = Costs(step=exponential(1.0), commit=exponential(0.1), **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=workers), costs, steps=6000 // workers)
    assert run.batches_per_s == pytest.approx(repairmen(workers, 1.0, 0.1), rel=0.04)


def test_steps_between_exchanges_are_one_longer_thought():
    # The repairman's pace depends on the mean of the thought only, not on how it is spread.
    costs = Costs(step=exponential(0.1), commit=exponential(0.1), **FREE)
    run = simulate(Ranks(algorithm=EASGD(every=10), workers=8), costs, steps=6000)
    assert run.batches_per_s == pytest.approx(10 * repairmen(8, 1.0, 0.1), rel=0.04)


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (8, 1), (8, 2), (64, 1), (64, 4)])
def test_equal_durations_give_the_bound_of_the_slower_one(workers, servers):
    costs = Costs(step=0.05, parameters=1_000_000, commit=0.001, latency_s=1e-4, bytes_per_s=8e9)
    run = simulate(Ranks(algorithm=Downpour(), workers=workers, servers=servers), costs, steps=60)
    served_s = (0.001 + 4e6 / 8e9) / servers  # the worker receives the reply meanwhile
    cycle_s = 0.05 + 2e-4 + served_s
    assert run.batches_per_s == pytest.approx(min(workers / cycle_s, 1 / served_s), rel=0.03)
    assert run.busy == pytest.approx(min(1.0, run.batches_per_s * served_s), abs=0.03)


@pytest.mark.parametrize("algorithm", [Downpour(), Steady(), Synchronous(), EASGD(every=1)], ids=name_of)
def test_a_full_centre_is_twice_as_fast_on_two_servers(algorithm):
    costs = Costs(step=0.05, parameters=5_000_000, commit=0.004, bytes_per_s=5e9, latency_s=0)
    one, two = (
        simulate(Ranks(algorithm=algorithm, workers=32, servers=servers), costs, steps=20).batches_per_s
        for servers in (1, 2)
    )
    together = 0.05 if isinstance(algorithm, Synchronous) else 0.0  # all compute, then all are served
    together += 0.004 if together else 0.0  # and all receive the centre
    assert one == pytest.approx(32 / (32 * 0.008 + together), rel=0.03)
    assert two == pytest.approx(32 / (32 * 0.004 + together), rel=0.03)


@pytest.mark.parametrize(
    ("algorithm", "waits_s"),
    [
        (Downpour(), 0.03 + 0.01),  # the reply comes while the server steps
        (Synchronous(), 0.03 + 0.02),  # and here once it has
        (Downpour(lag=1), 0.0),  # a thread receives it
    ],
)
def test_who_receives_a_message_takes_its_time(algorithm, waits_s):
    costs = Costs(step=0.06, parameters=1_000_000, commit=0.01, latency_s=0, bytes_per_s=4e6 / 0.02)
    run = simulate(Ranks(algorithm=algorithm, workers=1), costs)
    assert 1 / run.batches_per_s == pytest.approx(0.06 + waits_s, rel=1e-6)


@pytest.mark.parametrize("cores", [None, 1, 2])
@pytest.mark.parametrize(("algorithm", "spared_s"), [(Synchronous(), 0.01), (EASGD(every=1), 0.0)])
def test_a_reply_that_is_the_centre_is_copied_where_cores_are_short(algorithm, spared_s, cores, monkeypatch):
    monkeypatch.setattr(_simulator, "_NAP_S", 0.0)
    monkeypatch.setattr(_simulator, "_POLLED_S", 1e-12)
    costs = Costs(step=0.06, commit=0.03, copied_s=0.01, cores=cores, **FREE)
    run = simulate(Ranks(algorithm=algorithm, workers=1), costs)
    assert 1 / run.batches_per_s == pytest.approx(0.09 - (0.0 if cores == 1 else spared_s), rel=1e-6)


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_what_an_exchange_takes_at_least_comes_with_each_server(servers):
    costs = Costs(step=0.05, commit=0.01, commit_least_s=0.002, handle=0.008, handle_least_s=0.004, **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=1, servers=servers), costs)
    served_s, handled_s = 0.002 + 0.008 / servers, 0.004 + 0.004 * servers
    assert 1 / run.batches_per_s == pytest.approx(0.05 + served_s + handled_s, rel=0.02)


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_a_step_together_lasts_as_long_as_the_slowest(workers):
    # The mean of the largest of W exponential durations is the harmonic number of W.
    harmonic = sum(1 / n for n in range(1, workers + 1))
    costs = Costs(step=exponential(1.0), **FREE)
    run = simulate(Ranks(algorithm=Synchronous(), workers=workers), costs, steps=4000 // workers)
    assert run.batches_per_s == pytest.approx(workers / harmonic, rel=0.05)
    alone = simulate(Ranks.of(Steady(), workers, servers=0), costs, steps=1500)
    assert alone.batches_per_s == pytest.approx(workers / harmonic, rel=0.05)
    assert alone.efficiency == pytest.approx(1 / harmonic, rel=0.05)


def test_groups_wait_for_their_slowest_and_for_the_sum():
    costs = Costs(step=exponential(1.0), reduce_s=lambda ranks: 0.1 * ranks, **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=4, group_size=3), costs, steps=1500)
    assert run.batches_per_s == pytest.approx(12 / (1 + 1 / 2 + 1 / 3 + 0.3), rel=0.05)


def test_a_ring_moves_each_part_twice():
    costs = Costs(step=1.0, parameters=1000, latency_s=0.01, bytes_per_s=4000)
    assert costs.reduced_s(4) == pytest.approx(6 * (0.01 + 0.25))
    assert costs.reduced_s(1) == 0


def test_a_lag_hides_the_way_to_the_server():
    costs = Costs(step=0.05, commit=0.0, parameters=1000, latency_s=0.02, bytes_per_s=1e15)
    waits = simulate(Ranks(algorithm=Downpour(), workers=4), costs)
    hides = simulate(Ranks(algorithm=Downpour(lag=1), workers=4), costs)
    assert waits.batches_per_s == pytest.approx(4 / 0.09, rel=0.01)
    assert hides.batches_per_s == pytest.approx(4 / 0.05, rel=0.01)


def test_a_straggler_slows_those_who_wait_for_it_only():
    costs = Costs(step=1.0, slow={0: 3.0}, **FREE)
    free = simulate(Ranks(algorithm=Downpour(), workers=4), costs, steps=100)
    tied = simulate(Ranks(algorithm=Synchronous(), workers=4), costs, steps=100)
    backed = simulate(Ranks(algorithm=Synchronous(backup=1), workers=4), costs, steps=100)
    assert free.batches_per_s == pytest.approx(3 + 1 / 3, rel=0.03)
    assert tied.batches_per_s == pytest.approx(4 / 3, rel=0.03)
    assert backed.batches_per_s > 2.8


@pytest.mark.parametrize("steps", [5, 60])
def test_a_worker_that_hardly_moves_takes_nothing_from_the_others(steps):
    costs = Costs(step=1.0, slow={0: 1000.0}, **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=3), costs, steps=steps)
    assert run.batches_per_s == pytest.approx(2.001, rel=1e-3)
    assert run.spread == pytest.approx((2.001, 2.001), rel=1e-3)


def test_reading_counts_where_it_takes_longer():
    fast = Costs(step=0.05, read=0.02, **FREE)
    slow = Costs(step=0.05, read=0.2, **FREE)
    ranks = Ranks(algorithm=EASGD(every=5), workers=2)
    assert simulate(ranks, fast).batches_per_s == pytest.approx(40, rel=0.01)
    assert simulate(ranks, slow).batches_per_s == pytest.approx(10, rel=0.01)


def test_narrower_numbers_take_less_time_on_the_way():
    costs = {"step": 0.001, "parameters": 1_000_000, "latency_s": 0.0, "bytes_per_s": 1e9}
    ranks = Ranks(algorithm=Downpour(), workers=8)
    whole, half = (simulate(ranks, Costs(**costs, wire_bytes=size)).batches_per_s for size in (4, 2))
    assert half == pytest.approx(2 * whole, rel=0.02)


ALGORITHMS = [
    *(
        Downpour(),
        Downpour(lag=2),
        Steady(),
        Steady(every=4),
        AGN(every=4, local_learning_rate=0.1),
        EASGD(every=10),
        GEM(),
    ),
    *(LocalSGD(every=8), DiLoCo(every=8), Synchronous()),
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
def test_no_training_is_faster_than_its_workers_or_than_its_servers(algorithm):
    costs = Costs(step=exponential(0.05), parameters=1_000_000, commit=0.002)
    paces = []
    for servers in (1, 2):
        run = simulate(Ranks(algorithm=algorithm, workers=6, servers=servers), costs, steps=40)
        paces.append(run.batches_per_s)
        assert 0 < run.efficiency <= 1
        assert 0 <= run.busy <= 1
        assert run.batches_per_s <= 6 / 0.05 * 1.25  # of the durations as they were drawn
        assert run.spread[0] <= run.batches_per_s * 1.000001
        assert run.spread[1] >= run.batches_per_s * 0.999999
    assert paces[1] > 0.9 * paces[0]


def test_the_same_seed_gives_the_same_course():
    costs = Costs(step=[0.04, 0.05, 0.09], parameters=1000)
    runs = [simulate(Ranks(algorithm=Steady(), workers=5), costs, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] or runs[0].batches_per_s == runs[1].batches_per_s
    assert runs[0].batches_per_s != runs[2].batches_per_s


def test_more_workers_are_never_slower_until_the_server_is_full():
    costs = Costs(step=exponential(0.05), parameters=1_000_000, commit=0.001, bytes_per_s=8e9)
    counts = (1, 2, 4, 8, 16, 32, 64)
    paces = [simulate(Ranks(algorithm=Downpour(), workers=n), costs, steps=30).batches_per_s for n in counts]
    assert all(after > 0.95 * before for before, after in pairwise(paces))
    assert paces[-1] == pytest.approx(1 / 0.0015, rel=0.05)  # it commits, and receives 4 MB


# The time to a loss.


def test_the_gain_is_adascales():
    for workers, noise in ((1, 3.0), (4, 0.5), (32, 20.0)):
        assert gain_of(workers, noise) == pytest.approx((noise + 1) / (noise / workers + 1))
    assert gain_of(8, 0.0) == 1
    assert gain_of(8, math.inf) == 8


def test_time_to_a_loss_follows_from_pace_and_gain():
    costs = Costs(step=0.05, **FREE)
    one = simulate(Ranks(algorithm=Steady(), workers=1), costs)
    many = simulate(Ranks(algorithm=Steady(), workers=16), costs)
    # Examples and steps of McCandlish et al.: S = 1 + B / b at W workers, S / S_1 = (1 + B/Wb) / (1 + B/b).
    for noise in (0.1, 5.0, 1e9):
        steps = (1 + noise / 16) / (1 + noise)
        assert many.seconds_to(1000, noise) == pytest.approx(1000 * steps * 0.05, rel=0.01)
        assert one.seconds_to(1000, noise) == pytest.approx(50, rel=0.01)


def test_a_lag_and_long_steps_count_as_more_workers():
    assert Ranks(algorithm=Steady(lag=1, every=2), workers=4).together == 16
    assert Ranks(algorithm=LocalSGD(every=8), workers=4).together == 4
    assert Ranks.of(Steady(), 8, servers=0).together == 8
    assert isinstance(simulate(Ranks(algorithm=Steady(lag=1), workers=2), Costs(step=1, **FREE)), Forecast)


# What it refuses.


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Durations([]), "there is none"),
        (lambda: Durations([0.1, -1.0]), "there is -1.0"),
        (lambda: Durations(float("nan")), "there is nan"),
        (lambda: Costs(step="0.1", parameters=1), "there is"),
        (lambda: Costs(step=0.1, parameters=0), "parameters=0"),
        (lambda: Costs(step=0.1, parameters=1, bytes_per_s=0), "bytes_per_s=0"),
        (lambda: Costs(step=0.1, parameters=1, slow={0: 0.0}), r"slow\[0\]=0.0"),
        (lambda: Ranks(algorithm=Downpour(), workers=0), "workers=0"),
        (lambda: Ranks(algorithm=Downpour(), workers=2, servers=0), "servers=0 with workers=2"),
        (lambda: Ranks.of(Downpour(), 8, group_size=4), "leave 7 to train"),
        (lambda: Ranks(algorithm=Synchronous(backup=3), workers=2), "backup=3"),
        (
            lambda: simulate(Ranks(algorithm=EASGD(sub_servers=2), workers=4), Costs(step=0.1, parameters=1)),
            "sub-servers",
        ),
        (lambda: simulate(Ranks(algorithm=Downpour()), Costs(step=0.1, parameters=1), steps=0), "steps=0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(call, text):
    with pytest.raises(ConfigurationError, match=text):
        call()


# -- ranks that share cores -------------------------------------------------------------------------------


@pytest.fixture
def warm(monkeypatch):
    """Workers find their caches as they left them."""
    monkeypatch.setattr(_simulator, "_COLD", 0.0)


def crowded_repairmen(workers, cores, think_s, serve_s):
    """Exchanges in a second, as above, of ranks that share cores: a chain of births and deaths."""

    def pace(waiting):
        working = workers - waiting + min(waiting, 1)
        return min(1.0, cores / working)

    ways = [1.0]
    for waiting in range(workers):
        comes = (workers - waiting) / think_s * pace(waiting)
        ways.append(ways[-1] * comes * serve_s / pace(waiting + 1))
    return sum(way * pace(waiting) / serve_s for waiting, way in enumerate(ways) if waiting) / sum(ways)


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize(("workers", "serve_s"), [(1, 0.5), (2, 0.1), (4, 0.25)])
def test_ranks_that_share_cores_hold_up_each_other(workers, serve_s, cores):
    costs = Costs(step=exponential(1.0), commit=exponential(serve_s), cores=cores, **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=workers), costs, steps=2000 // workers)
    assert run.batches_per_s == pytest.approx(crowded_repairmen(workers, cores, 1.0, serve_s), rel=0.06)
    assert run.batches_per_s * (1 + serve_s) <= 1.06 * cores  # no more work than the cores can do


def test_ranks_that_share_cores_nap_until_they_see_a_message(warm):
    costs = Costs(step=1e-3, commit=5e-4, cores=1, **FREE)
    run = simulate(Ranks(algorithm=Downpour(), workers=1), costs)
    # For each of two messages a nap, and the polls before it of the rank that waits for it.
    assert 1 / run.batches_per_s == pytest.approx(1.5e-3 + 2 * (_NAP_S + _POLLED_S), rel=1e-6)
    roomy = simulate(Ranks(algorithm=Downpour(), workers=1), replace(costs, cores=2))
    assert 1 / roomy.batches_per_s == pytest.approx(1.5e-3, rel=1e-6)


def test_what_wraps_the_optimizer_takes_its_time_in_each_step_but_of_a_process_alone():
    costs = Costs(step=1e-3, wrapped_s=2e-4, reduce_s=lambda ranks: 0.0, **FREE)
    layouts = Ranks(algorithm=EASGD(every=5), workers=1), *(Ranks.of(Steady(), n, servers=0) for n in (2, 1))
    taken = [ranks.training / simulate(ranks, costs).batches_per_s for ranks in layouts]
    assert taken == pytest.approx([1.2e-3, 1.2e-3, 1e-3], rel=1e-6)


@pytest.mark.parametrize("ranks", [Ranks.of(Downpour(), 5), Ranks.of(Synchronous(), 4, servers=0)], ids=repr)
def test_batches_that_devices_compute_take_no_core(ranks):
    costs = Costs(step=0.1, reduce_s=lambda ranks: 0.0, cores=2, **FREE)
    shared, own = (simulate(ranks, replace(costs, apart=apart)).batches_per_s for apart in (False, True))
    assert own == pytest.approx(4 / 0.1, rel=0.01)
    assert shared == pytest.approx(2 / 0.1, rel=0.03)


def test_a_worker_finds_its_caches_used_where_cores_are_busy():
    costs = Costs(step=exponential(0.05), handle=0.01, cores=2, apart=True, **FREE)
    full = simulate(Ranks(algorithm=Downpour(), workers=40), costs, steps=50).batches_per_s
    assert 0.8 < full / (2 / (0.01 * (1 + _COLD))) <= 1.05
    seldom = replace(costs, step=exponential(1.0))
    assert simulate(Ranks(algorithm=Downpour(), workers=4), seldom, steps=500).batches_per_s == pytest.approx(
        4 / 1.01, rel=0.04
    )


@pytest.mark.parametrize(("ranks", "share"), [(2, 0.0), (3, 0.5), (4, 1.0), (9, 1.0)])
def test_caches_are_used_by_others_as_far_as_ranks_share_a_core(ranks, share):
    cores = _SharedCores()
    for number in range(ranks):
        cores.note("worker" if number else "server", number, 0.0, 1.0)
    cores.share(2)
    assert cores.cold == pytest.approx(1 + _COLD * share)
    assert cores.crowded["worker"] == pytest.approx(max(ranks / 2, 1))


def test_what_ranks_do_beside_their_devices_takes_cores(warm):
    costs = Costs(step=0.1, handle=0.04, cores=1, apart=True, **FREE)
    assert simulate(Ranks.of(Downpour(), 2), costs).batches_per_s == pytest.approx(1 / 0.14, rel=0.01)
    uneven = replace(costs, step=[0.06, 0.08, 0.1, 0.12, 0.14], handle=0.01)
    seldom = simulate(Ranks.of(Downpour(), 5), uneven).batches_per_s
    assert seldom == pytest.approx(4 / 0.11, rel=0.08)  # beside batches, which take no core
    crowd = simulate(Ranks.of(Downpour(), 11), costs).batches_per_s
    assert 0.75 / 0.04 < crowd <= 1 / 0.04  # not more than one core can handle, and most of that
    reduced = replace(costs, handle=0.0, reduce_s=lambda ranks: 0.02)
    together = simulate(Ranks.of(Synchronous(), 4, servers=0), reduced).batches_per_s
    assert together == pytest.approx(4 / (0.1 + 4 * (0.02 + 8 * _POLLED_S)), rel=0.01)


def test_who_sends_gradients_collects_each():
    costs = Costs(step=1e-3, collect_s=2e-4, reduce_s=lambda ranks: 0.0, **FREE)
    layouts = {
        Ranks(algorithm=Downpour(), workers=1): 1.2e-3,
        Ranks(algorithm=Steady(every=3), workers=2): 1.2e-3,
        Ranks(algorithm=EASGD(every=3), workers=2): 1e-3,  # each worker steps by itself
        Ranks(algorithm=EASGD(every=3), workers=1, group_size=2): 1.2e-3,
        Ranks.of(Steady(), 2, servers=0): 1.2e-3,
        Ranks.of(Steady(), 1, servers=0): 1e-3,
    }
    taken = [ranks.training / simulate(ranks, costs).batches_per_s for ranks in layouts]
    assert taken == pytest.approx([*layouts.values()], rel=1e-6)


def test_a_lag_hides_no_work_from_the_cores(warm):
    costs = Costs(step=0.1, commit=0.05, handle=0.02, **FREE)
    hidden = simulate(Ranks(algorithm=Downpour(lag=1), workers=1), costs)
    assert hidden.batches_per_s == pytest.approx(1 / 0.12, rel=0.02)  # the worker's part is never hidden
    crowded = simulate(Ranks(algorithm=Downpour(lag=1), workers=1), replace(costs, cores=1))
    assert crowded.batches_per_s == pytest.approx(1 / 0.17, rel=0.03)
    pair = simulate(Ranks(algorithm=Downpour(lag=1), workers=2), replace(costs, cores=2))
    assert pair.batches_per_s == pytest.approx(2 / 0.17, rel=0.03)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_a_step_together_on_few_cores(cores):
    costs = Costs(step=0.1, reduce_s=lambda ranks: 0.03, slow={0: 2.0}, cores=cores, **FREE)
    run = simulate(Ranks.of(Steady(), 3, servers=0), costs)
    polled_s = 6 * _POLLED_S if cores < 3 else 0.0  # in four messages around a ring, before it and after it
    work_s = {1: 0.4, 2: 0.25, 3: 0.2, 4: 0.2}[cores] + (0.03 + polled_s) * max(3 / cores, 1)
    assert run.batches_per_s == pytest.approx(3 / work_s)


@pytest.mark.parametrize("algorithm", [Downpour(), Synchronous(), EASGD(every=3), Steady(lag=1)], ids=name_of)
def test_as_many_cores_as_ranks_change_nothing(algorithm):
    costs = Costs(step=exponential(0.05), parameters=100_000, commit=0.002)
    ranks = Ranks(algorithm=algorithm, workers=3)
    assert simulate(ranks, costs) == simulate(ranks, replace(costs, cores=4))
    fewer = [simulate(ranks, replace(costs, cores=cores)).batches_per_s for cores in (1, 2, 3, 4)]
    assert all(one <= 1.02 * other for one, other in pairwise(fewer))
    with pytest.raises(ConfigurationError, match="cores=0"):
        replace(costs, cores=0)
