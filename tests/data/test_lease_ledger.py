"""Leases: no position is lost, or leased twice without a death, and no worker waits in vain."""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nnlo_common import ConfigurationError, ProtocolError
from nnlo_common.data import WAIT, Lease, Leases
from nnlo_common.data._ledger import Ranges


def used_up(leases: Leases, rank: int, epoch: int) -> list[Lease]:
    """Return all leases that `rank` gets if it is alone from now on."""
    got = []
    while isinstance(lease := leases.ask(rank, epoch), Lease):
        leases.validate()
        got.append(lease)
    assert lease is None
    return got


# --- one rule after the other ----------------------------------------------------------------------------


def test_leases_double_from_one_unit_and_shrink_towards_the_end() -> None:
    leases = Leases(1030, [1, 2], unit=10)
    sizes: list[int] = []
    while isinstance(lease := leases.ask(1 + len(sizes) % 2, 0), Lease):
        sizes.append(lease.size)
    grow = [10, 10, 10, 10, 20, 20, 40, 40, 80, 80, 160]
    assert sizes == [*grow, 130, 140, 60, 60, 30, 30, 10, 20, *[10] * 7]


def test_only_the_last_lease_of_an_epoch_is_no_multiple_of_the_unit() -> None:
    sizes = [lease.size for lease in used_up(Leases(1034, [1], unit=100), 1, 0)]
    assert sizes == [100, 100, 200, 300, 100, 100, 100, 34]


def test_the_share_of_the_slow_shows_in_its_first_lease() -> None:
    leases = Leases(1000, [1, 2, 3, 4], unit=5)
    assert leases.ask(4, 0) == Lease(0, 0, 5)
    for rank in (1, 2, 3) * 6:
        leases.ask(rank, 0)
    assert leases.held(1) == (Lease(0, 245, 325),)
    assert leases.ask(4, 0) == Lease(0, 485, 490)


def test_each_epoch_begins_with_a_lease_of_one_unit() -> None:
    leases = Leases(100, [1], unit=10)
    first = [lease.size for lease in used_up(leases, 1, 0)]
    assert first == [lease.size for lease in used_up(leases, 1, 1)] == [10, 10, 20, 30, 10, 10, 10]


def test_the_shares_of_the_dead_fall_to_the_living() -> None:
    leases = Leases(400, [1, 2, 3, 4])
    for rank in (1, 2, 3, 4) * 5:
        leases.ask(rank, 0)
    for rank in (2, 3, 4):
        leases.leave(rank, 12)
    assert leases.unfinished(0) == [(44, 56), (92, 400)]
    sizes = [lease.size for lease in used_up(leases, 1, 0)]
    assert sizes[:5] == [24, 48, 95, 66, 36]  # of the first its share was a quarter


def test_what_the_dead_held_is_given_out_first() -> None:
    leases = Leases(12, [1, 2, 3], unit=2)
    assert [leases.ask(rank, 0) for rank in (1, 2, 3)] == [Lease(0, 0, 2), Lease(0, 2, 4), Lease(0, 4, 6)]
    leases.lost(1)
    assert leases.ask(3, 0) == Lease(0, 0, 2)
    assert leases.unfinished(0) == [(0, 4), (6, 12)]


def test_a_patient_book_has_the_fast_wait_for_what_the_slow_may_leave_behind() -> None:
    leases = Leases(3, [1, 2, 3])
    assert [leases.ask(rank, 0) for rank in (1, 2, 3)] == [Lease(0, 0, 1), Lease(0, 1, 2), Lease(0, 2, 3)]
    assert leases.ask(3, 0) is WAIT
    assert leases.ask(2, 0) is WAIT
    assert (leases.waiting, leases.answers()) == ((3, 2), [])
    leases.lost(1)
    assert leases.answers() == [(3, Lease(0, 0, 1))]  # who asked first
    assert leases.waiting == (2,)
    assert leases.ask(3, 0) is None
    assert leases.answers() == [(2, None)]
    assert leases.unfinished(0) == []


def test_an_impatient_book_makes_up_for_the_dead_at_the_end_of_a_later_epoch() -> None:
    leases = Leases(4, [1, 2], patient=False)
    assert leases.ask(1, 0) == Lease(0, 0, 1)
    assert [lease.size for lease in used_up(leases, 2, 0)] == [1, 1, 1]
    assert leases.ask(2, 1) == Lease(1, 0, 1)
    leases.lost(1)
    assert leases.unfinished(0) == [(0, 1)]
    assert used_up(leases, 2, 1) == [Lease(1, 1, 2), Lease(1, 2, 3), Lease(1, 3, 4), Lease(0, 0, 1)]
    assert leases.unfinished(0) == leases.unfinished(1) == []


def test_what_the_dead_held_of_an_earlier_epoch_stays_owed_until_it_is_used() -> None:
    leases = Leases(2, [1, 2, 3, 4], patient=False)
    assert leases.ask(1, 0) == Lease(0, 0, 1)
    assert used_up(leases, 2, 0) == [Lease(0, 1, 2)]
    leases.lost(1)
    for rank in (2, 3):  # each gets it last, and one breaks off, the other dies
        while (lease := leases.ask(rank, 1)) != Lease(0, 0, 1):
            assert isinstance(lease, Lease)
        leases.give_back(rank) if rank == 2 else leases.lost(rank)
        leases.validate()
    assert used_up(leases, 4, 7) == [Lease(7, 0, 1), Lease(7, 1, 2), Lease(0, 0, 1)]


def test_who_reads_ahead_asks_early_and_has_two_leases() -> None:
    leases = Leases(20, [1, 2], unit=2)
    assert leases.ask(1, 0) == Lease(0, 0, 2)
    assert leases.ask(1, 0, unused=2) == Lease(0, 2, 4)
    assert leases.held(1) == (Lease(0, 0, 2), Lease(0, 2, 4))
    assert leases.ask(1, 0, unused=1) == Lease(0, 4, 8)
    assert leases.held(1) == (Lease(0, 3, 4), Lease(0, 4, 8))
    assert leases.unfinished(0) == [(3, 20)]
    leases.validate()
    leases.lost(1)
    assert sorted(n for one in used_up(leases, 2, 0) for n in range(one.start, one.stop)) == [*range(3, 20)]


def test_who_has_some_left_never_waits_for_itself() -> None:
    leases = Leases(2, [1, 2], unit=2)
    assert leases.ask(1, 0) == Lease(0, 0, 2)
    assert leases.ask(1, 0, unused=1) is None
    assert (leases.held(1), leases.waiting) == ((Lease(0, 1, 2),), ())
    assert leases.ask(2, 0) is WAIT
    assert leases.ask(1, 0) is None
    assert leases.answers() == [(2, None)]
    assert leases.unfinished(0) == []


def test_a_worker_may_begin_the_next_epoch_while_others_are_in_this_one() -> None:
    leases = Leases(8, [1, 2], patient=False)
    assert leases.ask(1, 0) == Lease(0, 0, 1)
    assert used_up(leases, 2, 0)[-1] == Lease(0, 7, 8)
    assert leases.ask(2, 1) == Lease(1, 0, 1)
    assert leases.ask(1, 0) is None
    assert leases.ask(1, 1) == Lease(1, 1, 2)
    assert leases.unfinished(0) == []


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("used", [None, 0, 3])
def test_who_breaks_off_leaves_the_rest_to_those_who_are_still_there(gone: bool, used: int | None) -> None:
    leases = Leases(20, [1, 2], unit=5)
    assert leases.ask(1, 0) == Lease(0, 0, 5)
    (leases.leave if gone else leases.give_back)(1, used)
    leases.validate()
    assert leases.living == ((2,) if gone else (1, 2))
    got = used_up(leases, 2, 0)
    assert got[0].start == (used or 0)
    assert all(lease.size % 5 == 0 for lease in got[:-1])
    assert sum(lease.size for lease in got) == 20 - (used or 0)
    assert leases.unfinished(0) == []


def test_an_epoch_that_all_have_broken_off_is_not_made_up_for_later() -> None:
    leases = Leases(20, [1, 2], unit=5)
    for rank in (1, 2):
        assert isinstance(leases.ask(rank, 0), Lease)
    leases.give_back(1, 5)
    assert [leases.ask(rank, 1) for rank in (1, 2)] == [Lease(1, 0, 5), Lease(1, 5, 10)]
    leases.lost(1)
    assert [lease.epoch for lease in used_up(leases, 2, 1)] == [1, 1, 1]
    assert (leases.unfinished(0), leases.unfinished(1)) == ([(5, 20)], [])
    assert leases.unfinished(5) == [(0, 20)]


def test_who_waits_may_leave_and_die() -> None:
    leases = Leases(1, [1, 2, 3, 4])
    assert leases.ask(1, 0) == Lease(0, 0, 1)
    assert [leases.ask(rank, 0) for rank in (2, 3, 4)] == [WAIT] * 3
    leases.leave(2)
    leases.lost(3)
    leases.lost(1)
    assert leases.answers() == [(4, Lease(0, 0, 1))]
    leases.lost(1)  # who is gone cannot die again
    leases.validate()


def test_who_waits_may_break_off_and_turn_to_another_epoch() -> None:
    leases = Leases(1, [1, 2])
    assert (leases.ask(1, 0), leases.ask(2, 0)) == (Lease(0, 0, 1), WAIT)
    leases.give_back(2)
    leases.lost(1)
    assert leases.answers() == []
    assert used_up(leases, 2, 1) == [Lease(1, 0, 1), Lease(0, 0, 1)]


def test_an_epoch_of_nothing_is_over_at_once() -> None:
    leases = Leases(0, [1])
    assert leases.ask(1, 0) is None
    assert leases.unfinished(0) == []
    leases.validate()


def test_a_lease_is_frozen_and_slotted() -> None:
    lease = Lease(0, 1, 3)
    assert not hasattr(lease, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        lease.start = 0  # type: ignore[misc]


MISUSE: dict[str, tuple[Callable[[Leases], object], str]] = {
    "unknown": (
        lambda ledger: ledger.ask(9, 0),
        r"rank 9 asked about epoch 0; expected one of its workers \[1,",
    ),
    "unknown is lost": (lambda ledger: ledger.lost(9), r"rank 9 was lost; expected one of .*\[1, 2, 4\]"),
    "unknown leaves": (lambda ledger: ledger.leave(9), "rank 9 gave its lease back; expected one of"),
    "backwards": (lambda ledger: ledger.ask(1, 0), "rank 1 asked about epoch 0 after epoch 1; expected 1 or"),
    "before the first": (lambda ledger: ledger.ask(2, -1), "rank 2 asked about epoch -1 after epoch 0"),
    "after leaving": (lambda ledger: ledger.ask(3, 0), "rank 3 asked about epoch 0 after it left; expected"),
    "left twice": (lambda ledger: ledger.leave(3), "rank 3 gave its lease back after it left"),
    "after death": (lambda ledger: ledger.ask(5, 0), "rank 5 asked about epoch 0 after it was lost"),
    "waits": (
        lambda ledger: ledger.ask(4, 1),
        "rank 4 asked about epoch 1, but it still waits .* about epoch 1",
    ),
    "used too much": (
        lambda ledger: ledger.leave(1, 3),
        r"used 3 positions of \[Lease\(.*\)\]; expected 0 to 2",
    ),
    "used less than none": (lambda ledger: ledger.leave(1, -1), "used -1 positions of .* expected 0 to 2"),
    "left more than it has": (lambda ledger: ledger.ask(1, 1, 3), r"used -1 positions of .* expected 0 to 2"),
    "left of another epoch": (lambda ledger: ledger.ask(1, 2, 1), r"used -1 positions of .* expected 0 to 2"),
    "used without lease": (
        lambda ledger: ledger.give_back(2, 1),
        r"rank 2 .* 1 positions of \[\]; expected 0 to",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_refused_and_changes_nothing(name: str) -> None:
    leases = Leases(2, [1, 2, 3, 4, 5], unit=2)
    leases.leave(3)
    leases.lost(5)
    assert (leases.ask(1, 1), leases.ask(4, 1)) == (Lease(1, 0, 2), WAIT)
    misuse, problem = MISUSE[name]
    before = leases.state()
    with pytest.raises(ProtocolError, match=problem):
        misuse(leases)
    assert leases.state() == before
    leases.validate()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"size": -1}, "size=-1: must be a whole number of at least 0"),
        ({"unit": 0}, "unit=0: must be a whole number of at least 1"),
        ({"unit": 2.0}, r"unit=2\.0: must be"),
        ({"workers": [1, -2]}, "a rank of workers=-2: must be"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        Leases(**{"size": 3, "workers": [1], **options})


# --- saved and loaded ------------------------------------------------------------------------------------


def in_the_middle() -> Leases:
    """Rank 1 has a lease, 2 has given one back, 3 has died with one, 4 has left."""
    leases = Leases(40, [1, 2, 3, 4], unit=3, order="seed 7")
    for rank in (1, 2, 3, 2):
        leases.ask(rank, 0)
    leases.give_back(2, 1)
    leases.lost(3)
    leases.leave(4)
    return leases


def test_a_loaded_book_goes_on_in_mid_epoch_as_the_saved_one() -> None:
    saved = in_the_middle()
    loaded = Leases(40, [2, 1], unit=3, order="seed 7")
    loaded.load(json.loads(json.dumps(saved.state())))
    assert loaded.held(1) == saved.held(1) == (Lease(0, 0, 3),)
    for rank in (2, 1, 1, 2, 1):
        assert loaded.ask(rank, 0) == saved.ask(rank, 0)
        assert loaded.state() == saved.state()


def test_a_loaded_book_measures_leases_as_the_saved_one() -> None:
    saved, loaded = (Leases(5000, [1, 2, 3]) for _ in range(2))
    turns = [1, 2, 1, 1, 3, 1, 2, 1]
    for rank in turns:
        saved.ask(rank, 0)
    loaded.load(json.loads(json.dumps(saved.state())))
    for rank in turns:
        assert loaded.ask(rank, 0) == saved.ask(rank, 0)
        assert loaded.state() == saved.state()
    assert saved.held(1) == (Lease(0, 396, 780),)


def test_a_book_with_other_workers_gives_out_again_what_was_leased() -> None:
    loaded = Leases(40, [2, 7, 8], unit=3, order="seed 7")
    loaded.load(in_the_middle().state())
    loaded.validate()
    assert (loaded.living, loaded.waiting) == ((2, 7, 8), ())
    assert loaded.unfinished(0) == in_the_middle().unfinished(0)
    assert loaded.ask(7, 0) == Lease(0, 0, 3)
    loaded.lost(2)
    loaded.lost(7)
    assert used_up(loaded, 8, 0)
    assert loaded.unfinished(0) == []


def test_who_comes_besides_the_others_takes_nothing_from_them() -> None:
    saved = Leases(100, [1, 2, 3], unit=10)
    assert [saved.ask(rank, 0) for rank in (1, 2, 3)] == [Lease(0, 0, 10), Lease(0, 10, 20), Lease(0, 20, 30)]
    saved.lost(2)
    loaded = Leases(100, [1, 2, 3], unit=10)
    loaded.load(saved.state())
    loaded.validate()
    assert [loaded.held(rank) for rank in (1, 2, 3)] == [(Lease(0, 0, 10),), (), (Lease(0, 20, 30),)]
    assert loaded.ask(2, 0) == Lease(0, 10, 20)


def test_who_waited_is_forgotten_where_the_workers_are_others() -> None:
    saved = Leases(1, [1, 2])
    assert (saved.ask(1, 0), saved.ask(2, 0)) == (Lease(0, 0, 1), WAIT)
    loaded = Leases(1, [2])
    loaded.load(saved.state())
    assert (loaded.waiting, loaded.answers()) == ((), [])
    assert loaded.ask(2, 0) == Lease(0, 0, 1)


NEW = {"used": 0, "seen": 0}  # nothing is known of a worker's speed
HOLDS = {"epoch": 0, "leases": [[0, 0, 3]], **NEW}


def with_page(**parts: Any) -> dict[str, Any]:
    return {"epochs": {"0": {"free": [[3, 40]], "owed": [], "used": [], **parts}}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"size": 41}, "size in the saved state of the leases must be 40, but it is 41"),
        ({"unit": 4}, "unit in .* must be 3, but it is 4"),
        ({"order": "seed 8"}, "order in .* must be 'seed 7', but it is 'seed 8'"),
        ({"surplus": 1}, "must have"),
        ({"waiting": ["1"]}, "waiting in .* a list, each item a int"),
        ({"waiting": [9]}, "damaged: broken invariant: only living workers wait; resume from an earlier"),
        ({"waiting": [1]}, "damaged: broken invariant: a waiting worker holds no lease"),
        ({"complete": [[0, 1]]}, "damaged: broken invariant: no epoch is both open and complete"),
        ({"complete": [[0, 1, 2]]}, "damaged"),
        ({"complete": [[3, 1]]}, "damaged: .*runs backwards"),
        ({"workers": {"x": {"epoch": 0, "leases": [], **NEW}}}, "damaged"),
        ({"workers": {"1": {"epoch": 0, "leases": [[0, 1]], **NEW}}}, "damaged"),
        (
            {"workers": {"1": {"epoch": 0, "leases": [[1, 0, 3]], **NEW}}},
            "damaged: broken invariant: every lease is of an open epoch",
        ),
        (
            {"workers": {"1": {"epoch": -1, "leases": [[0, 0, 3]], **NEW}}},
            "damaged: broken invariant: no lease is of a later epoch",
        ),
        ({"workers": {"1": {"epoch": 0}}}, r"the leases, rank 1 must have \['epoch', 'leases', '"),
        (
            {"workers": {"1": {**HOLDS, "used": 2, "seen": 1}}},
            "damaged: broken invariant: used is at most seen",
        ),
        ({"workers": {"1": {**HOLDS, "used": -1}}}, "damaged: broken invariant: used is at most seen"),
        ({"workers": {"1": {**HOLDS, "seen": 1.5}}}, "seen in .*, rank 1 must be a int"),
        ({"workers": {}}, "damaged: broken invariant: .* have each of 40 positions once"),
        (with_page(free=[[4, 40]]), "damaged: broken invariant: .* have each of 40 positions once"),
        (with_page(free=[[2, 40]]), "have each of 40 positions once"),
        (with_page(free=[[3, 41]]), "have each of 40 positions once"),
        (with_page(used=[[5, 6]]), "have each of 40 positions once"),
        (with_page(free=[[3, 40], [5, 6]]), "damaged: .*is in already"),
        (with_page(free=[3, 40]), "free in the saved state of the leases, epoch 0 must be a list"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    change: dict[str, Any], problem: str
) -> None:
    target = Leases(40, [1, 2], unit=3, order="seed 7")
    target.ask(2, 0)
    before = target.state()
    good = in_the_middle().state() | {"workers": {"1": HOLDS}} | with_page()
    with pytest.raises(ConfigurationError, match=problem):
        target.load(good | change)
    assert target.state() == before
    target.load(good)


# --- how long it takes -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Simulated:
    """Result of a simulated epoch in which only the workers' speeds matter.

    Attributes:
        used: how many positions each worker used.
        ends: when it ended.
        leases: how many leases there were.
    """

    used: Counter[int] = dataclasses.field(default_factory=Counter)
    ends: dict[int, float] = dataclasses.field(default_factory=dict)
    leases: int = 0


def simulate(
    leases: Leases,
    speeds: dict[int, float],
    epoch: int = 0,
    changes: dict[int, tuple[float, float]] | None = None,
) -> Simulated:
    """Use up an epoch; `changes` are, by rank, the time and the value of a change of speed."""
    events = [(0.0, rank) for rank in speeds]
    run = Simulated(ends=dict.fromkeys(speeds, 0.0))
    while events:
        now, rank = heapq.heappop(events)
        answers = [(rank, leases.ask(rank, epoch)), *leases.answers()]
        leases.validate()
        for other, lease in answers:
            if isinstance(lease, Lease):
                then, speed = (changes or {}).get(other, (0.0, speeds[other]))
                before = min(lease.size, max(then - now, 0.0) * speeds[other])
                run.used[other] += lease.size
                run.leases += 1
                run.ends[other] = now + before / speeds[other] + (lease.size - before) / speed
                heapq.heappush(events, (run.ends[other], other))
    assert not leases.waiting
    return run


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("size", [2000, 1999, 12345])
@pytest.mark.parametrize("unit", [1, 10, 64])
def test_shares_follow_the_speeds_and_all_end_together(size: int, unit: int, patient: bool) -> None:
    run = simulate(Leases(size, [1, 2], unit=unit, patient=patient), {1: 1.0, 2: 3.0})
    assert sum(run.used.values()) == size
    assert abs(run.used[1] - size / 4) <= unit
    assert abs(run.ends[1] - run.ends[2]) <= unit / 1.0  # what the slower one takes for a unit


def test_workers_of_many_speeds_end_together() -> None:
    speeds = {rank: 1 + rank / 2 for rank in range(8)}
    run = simulate(Leases(10_000, speeds, unit=10), speeds)
    assert max(run.ends.values()) - min(run.ends.values()) <= 10
    for rank, speed in speeds.items():
        assert abs(run.used[rank] - 10_000 * speed / sum(speeds.values())) <= 2 * 10


@pytest.mark.parametrize("unit", [1, 10])
@pytest.mark.parametrize("speed", [1, 1 / 2, 1 / 3, 1 / 10, 1 / 30])
@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_no_worker_is_so_slow_that_the_others_wait_long_for_it(workers: int, speed: float, unit: int) -> None:
    size = 400 * workers * unit
    for slow in {0, workers - 1}:  # who asks first, who asks last
        speeds = {rank: speed if rank == slow else 1.0 for rank in range(workers)}
        ledger = Leases(size, speeds, unit=unit)
        for epoch in (0, 1):
            run = simulate(ledger, speeds, epoch)
            ideal, last_unit = size / sum(speeds.values()), unit / speed
            assert max(run.ends.values()) <= 1.04 * ideal + last_unit
            assert run.leases <= 3 * workers * math.log2(400)


@pytest.mark.parametrize("when", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_who_becomes_slow_is_late_alone_and_in_one_epoch_alone(workers: int, when: float) -> None:
    size, slow = 400 * 10 * workers, workers - 1
    speeds, then = dict.fromkeys(range(workers), 1.0), when * 400 * 10
    ledger = Leases(size, speeds, unit=10)
    run = simulate(ledger, speeds, changes={slow: (then, 0.2)})
    ideal = then + (size - then * workers) / (workers - 0.8)
    assert run.ends.pop(slow) <= 2.2 * ideal  # a lease is for the speed that it was measured at
    assert max(run.ends.values()) <= 1.04 * ideal
    speeds[slow] = 0.2
    run = simulate(ledger, speeds, 1)
    assert max(run.ends.values()) <= 1.04 * size / sum(speeds.values()) + 10 / 0.2


# --- whatever happens in whatever order ------------------------------------------------------------------


@settings(max_examples=100)
@given(st.permutations(range(8)), st.lists(st.integers(1, 9), max_size=8))
def test_ranges_are_sets(pieces: list[int], bites: list[int]) -> None:
    ranges, model = Ranges(), set[int]()
    for piece in pieces:
        ranges.add(3 * piece, 3 * piece + 2 + piece % 2)
        model |= set(range(3 * piece, 3 * piece + 2 + piece % 2))
        assert [number for part in ranges for number in range(*part)] == sorted(model)
        with pytest.raises(ValueError, match="is in already"):
            ranges.add(3 * piece + 1, 3 * piece + 2)
    for bite in bites:
        part = ranges.take(bite)
        assert part is None or part[1] - part[0] <= bite
        model -= set(range(*part or (0, 0)))
        assert [number for part in ranges for number in range(*part)] == sorted(model)
        assert ranges.total == len(model)
        assert all((number in ranges) == (number in model) for number in range(30))


class Interleavings(RuleBasedStateMachine):
    """Workers ask, die, leave, stop early and are saved in any order; a model counts the positions."""

    @initialize(
        size=st.integers(0, 9),
        workers=st.integers(1, 4),
        unit=st.integers(1, 4),
        patient=st.booleans(),
        breaks=st.booleans(),
    )
    def begin(self, size: int, workers: int, unit: int, patient: bool, breaks: bool) -> None:
        self.options: dict[str, Any] = {"unit": unit, "patient": patient, "order": "o"}
        self.size, self.unit, self.breaks = size, unit, breaks
        self.ledger = Leases(size, range(workers), **self.options)
        self.enter(range(workers))
        self.taken: dict[int, set[int]] = defaultdict(set)  # by epoch: leased or used
        self.used: dict[int, set[int]] = defaultdict(set)
        self.owed: dict[int, set[int]] = defaultdict(set)  # the dead had them
        self.ragged = False  # something came back in mid-unit

    def enter(self, ranks: Any) -> None:
        self.epoch = dict.fromkeys(ranks, 0)
        self.leases: dict[int, list[Lease]] = {}  # of those who have any
        self.waits: list[int] = []
        self.over: set[int] = set()  # were told None in their epoch

    def pick(self, data: st.DataObject, *, waiting: bool = True) -> int:
        ranks = [rank for rank in self.epoch if waiting or rank not in self.waits]
        rank: int = data.draw(st.sampled_from(ranks))
        return rank

    def hear(self, rank: int, answer: Lease | None) -> None:
        if answer is None:
            self.over.add(rank)
            return
        positions = set(range(answer.start, answer.stop))
        assert positions
        assert not positions & self.taken[answer.epoch], "given out twice"
        assert positions <= set(range(self.size))
        assert answer.epoch == self.epoch[rank] or positions <= self.owed[answer.epoch]
        assert answer.size % self.unit == 0 or answer.stop == self.size or self.ragged
        self.taken[answer.epoch] |= positions
        self.owed[answer.epoch] -= positions
        self.leases.setdefault(rank, []).append(answer)

    def hear_answers(self) -> None:
        answers = self.ledger.answers()
        assert [rank for rank in self.waits if rank in dict(answers)] == [rank for rank, _ in answers]
        for rank, answer in answers:
            self.waits.remove(rank)
            self.hear(rank, answer)

    def held(self, rank: int) -> int:
        return sum(lease.size for lease in self.leases.get(rank, []))

    def put(self, rank: int, used: int, *, died: bool = False, keeps: bool = False) -> None:
        """End leases in the model after `used` positions, or keep the rest."""
        for lease in self.leases.pop(rank, []):
            mine = min(used, lease.size)
            used -= mine
            rest = set(range(lease.start + mine, lease.stop))
            self.used[lease.epoch] |= set(range(lease.start, lease.start + mine))
            # What is kept may come back later: with the worker's death, say.
            self.ragged |= bool(mine % self.unit) and bool(rest)
            if keeps:
                if rest:
                    kept = Lease(lease.epoch, lease.start + mine, lease.stop)
                    self.leases.setdefault(rank, []).append(kept)
                continue
            self.taken[lease.epoch] -= rest
            if died or lease.epoch < self.epoch[rank]:
                self.owed[lease.epoch] |= rest

    def ask(self, rank: int, epoch: int, unused: int = 0) -> None:
        self.put(rank, self.held(rank) - unused if epoch == self.epoch[rank] else 0, keeps=unused > 0)
        self.over.discard(rank)
        self.epoch[rank] = epoch
        answer = self.ledger.ask(rank, epoch, unused)
        if answer is WAIT:
            assert self.options["patient"]
            assert not unused
            self.waits.append(rank)
        elif answer is None and unused:
            pass  # it has some left
        else:
            assert answer is None or isinstance(answer, Lease)
            self.hear(rank, answer)
        self.hear_answers()

    def gone(self, rank: int) -> None:
        del self.epoch[rank]
        if rank in self.waits:
            self.waits.remove(rank)
        self.hear_answers()

    @precondition(lambda self: len(self.epoch) > len(self.waits))
    @rule(data=st.data())
    def a_worker_goes_on(self, data: st.DataObject) -> None:
        rank = self.pick(data, waiting=False)
        self.ask(rank, self.epoch[rank] + (rank in self.over))

    @precondition(lambda self: len(self.epoch) > len(self.waits))
    @rule(data=st.data())
    def a_worker_asks_before_it_has_used_up_all(self, data: st.DataObject) -> None:
        rank = self.pick(data, waiting=False)
        if self.leases.get(rank):
            self.ask(rank, self.epoch[rank], data.draw(st.integers(1, self.held(rank))))

    @precondition(lambda self: self.breaks and len(self.epoch) > len(self.waits))
    @rule(data=st.data(), ahead=st.integers(1, 2))
    def a_worker_turns_to_a_later_epoch(self, data: st.DataObject, ahead: int) -> None:
        rank = self.pick(data, waiting=False)
        self.ask(rank, self.epoch[rank] + ahead)

    @precondition(lambda self: self.breaks and self.epoch)
    @rule(data=st.data(), leaves=st.booleans())
    def a_worker_breaks_off(self, data: st.DataObject, leaves: bool) -> None:
        rank = self.pick(data)
        used = data.draw(st.none() | st.integers(0, self.held(rank)))
        self.put(rank, used or 0)
        if leaves and len(self.epoch) > 1:
            self.ledger.leave(rank, used)
            self.gone(rank)
        else:
            self.ledger.give_back(rank, used)
            self.waits = [other for other in self.waits if other != rank]
            self.hear_answers()

    @precondition(lambda self: len(self.epoch) > 1)
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        rank = self.pick(data)
        self.put(rank, 0, died=True)
        self.ledger.lost(rank)
        self.gone(rank)

    @rule(others=st.booleans(), workers=st.integers(1, 4))
    def it_is_saved_and_loaded(self, others: bool, workers: int) -> None:
        state = json.loads(json.dumps(self.ledger.state()))
        if others:
            for rank in list(self.leases):
                self.put(rank, 0, died=True)
            first = max(self.epoch) + 1
            self.enter(range(first, first + workers))
        self.ledger = Leases(self.size, self.epoch, **self.options)
        self.ledger.load(state)
        assert others or self.ledger.state() == state

    @invariant()
    def the_book_agrees_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        self.ledger.validate()
        assert self.ledger.waiting == tuple(self.waits)
        assert self.ledger.living == tuple(sorted(self.epoch))
        for rank in self.epoch:
            assert self.ledger.held(rank) == tuple(self.leases.get(rank, ()))
        for epoch in range(max(self.epoch.values()) + 2):
            left = [position for part in self.ledger.unfinished(epoch) for position in range(*part)]
            # Of epochs that all have broken off the ledger keeps the last eight.
            forgotten = epoch + 8 < max(self.epoch.values()) and left == list(range(self.size))
            assert forgotten or left == sorted(set(range(self.size)) - self.used[epoch])
        for rank in self.waits:  # somebody who lives and does not wait
            held = [lease for leases in self.leases.values() for lease in leases]
            assert any(lease.epoch <= self.epoch[rank] for lease in held)
        assert not set(self.leases) & set(self.waits)

    def teardown(self) -> None:
        """Let all living workers finish one last epoch."""
        if not hasattr(self, "ledger"):
            return
        last = max(self.epoch.values()) + 1
        while active := [r for r in sorted(self.epoch) if r not in self.waits]:
            behind = [r for r in active if r not in self.over or self.epoch[r] < last]
            if not behind:
                break
            rank = min(behind, key=lambda r: self.epoch[r])
            self.ask(rank, self.epoch[rank] + (rank in self.over))
            self.the_book_agrees_with_the_model()
        assert not self.waits, "somebody waits for nobody"
        everything = set(range(self.size))
        assert self.used[last] == everything
        for epoch in range(last):
            assert not self.owed[epoch]
            assert self.breaks or self.used[epoch] == everything


Interleavings.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
test_nothing_is_lost_or_doubled_in_any_order = pytest.mark.slow(Interleavings.TestCase)
