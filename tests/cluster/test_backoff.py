"""Waiting: at once at first, then ever less often, and never for long."""

from __future__ import annotations

import time

import pytest

from nnlo_common.cluster.transport import _backoff
from nnlo_common.cluster.transport._backoff import Backoff


class Time:
    """A clock that stands still but for the pauses, and for `look_s` at each reading."""

    def __init__(self, look_s: float = 0.0) -> None:
        self.now_s, self.look_s = 1e6, look_s
        self.pauses: list[float] = []

    def clock(self) -> float:
        self.now_s += self.look_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


def waited(seconds: float) -> tuple[Time, Backoff]:
    """A wait that began so long ago."""
    watch = Time()
    backoff = Backoff(600e-6, clock=watch.clock, sleep=watch.sleep)
    watch.now_s += seconds
    return watch, backoff


@pytest.mark.parametrize(
    ("waited_s", "pauses"),
    [
        (0, []),
        (299e-6, []),
        (301e-6, [30.1e-6]),
        (1e-3, [100e-6]),
        (5e-3, [500e-6]),
        (6.1e-3, [600e-6]),
        (1.0, [600e-6]),
        (86400 * 30, [600e-6]),
    ],
)
def test_a_pause_is_a_tenth_of_the_wait_so_far_within_bounds(waited_s, pauses):
    watch, backoff = waited(waited_s)
    assert backoff.pause() is (not pauses)  # many looks in a row until the pauses begin
    assert watch.pauses == pytest.approx(pauses)
    assert backoff.waited_s == pytest.approx(waited_s + sum(pauses))


def test_the_shortest_pause_is_not_shorter(monkeypatch):
    monkeypatch.setattr(_backoff, "_SPIN_S", 0.0)
    watch, backoff = waited(1e-6)
    backoff.pause()
    assert watch.pauses == [20e-6]


@pytest.mark.parametrize("waited_s", [0.0, 1.0])
def test_in_a_hurry_it_does_not_sleep_however_long_it_has_waited(waited_s):
    watch, backoff = waited(waited_s)
    assert [backoff.pause(lambda hurry=hurry: hurry) for hurry in (True, True)] == [True, True]
    assert watch.pauses == []
    assert backoff.pause(lambda: False) is (waited_s == 0)


@pytest.mark.parametrize("waited_s", [0.0, 1e-4, 1e-3, 1.0])
def test_where_cores_are_shared_it_sleeps_from_the_start_and_briefly_in_a_hurry(waited_s):
    for hurries, longest_s in ((False, 500e-6), (True, 50e-6)):
        watch = Time()
        backoff = Backoff(clock=watch.clock, sleep=watch.sleep, naps=True)
        watch.now_s += waited_s
        assert backoff.pause(lambda hurries=hurries: hurries) is hurries  # then many looks in a row
        assert watch.pauses == pytest.approx([min(max(waited_s / 10, 20e-6), longest_s)])


def test_while_it_does_not_sleep_it_gives_its_core_away(monkeypatch):
    yields = []
    monkeypatch.setattr("os.sched_yield", lambda: yields.append(1))
    _, early = waited(0)
    _, late = waited(1)
    for backoff in (early, early, late):
        backoff.pause()
    assert len(yields) == 2


@pytest.mark.parametrize("until_s", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_little_is_lost_and_little_is_burnt_whenever_the_message_comes(until_s):
    """Each look takes 1 us: the message is seen a tenth late at most, and long waits cost few looks."""
    watch = Time(look_s=1e-6)
    backoff = Backoff(clock=watch.clock, sleep=watch.sleep)
    start_s, looks = watch.now_s, 0
    while watch.now_s - start_s < until_s:
        backoff.pause()
        looks += 1
    late_s = watch.now_s - start_s - until_s
    assert late_s <= min(0.11 * until_s, 0.7e-3) + 2e-6
    assert looks <= 350 + until_s / 0.5e-3


def test_each_wait_begins_anew():
    watch, first = waited(1.0)
    second = Backoff(clock=watch.clock, sleep=watch.sleep)
    assert (first.waited_s, second.waited_s) == (1.0, 0.0)


def test_by_default_it_sleeps_in_real_time():
    backoff = Backoff()
    start = time.perf_counter()
    while backoff.waited_s < 3e-3:
        backoff.pause()
    assert time.perf_counter() - start >= 3e-3
