"""Who has been heard when: stalls are named once, the dead are named with what they did last."""

import logging

import pytest

from nnlo_common import ConfigurationError, Downpour, Participant
from nnlo_common.protocol import Kind, Message
from nnlo_common.training._stall_detector import StallDetector


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Table:
    """An stall_detector of ranks 1 and 2, looked at twice a second."""

    def __init__(self, **options):
        self.clock = Clock()
        self.stall_detector = StallDetector({1: "node1", 2: "node2"}, clock=self.clock, **options)

    def hear(self, rank, kind=Kind.EXCHANGE, step=1):
        self.stall_detector.heard(Message(kind, sender=rank, sequence=1, clock=step))

    def pass_time(self, seconds, awaited=lambda _: True):
        given_up = []
        for _ in range(round(2 * seconds)):
            self.clock.now_s += 0.5
            given_up = self.stall_detector.look(awaited)
        return given_up

    def usual_steps(self, rank):
        for step in range(3):
            self.hear(rank, step=step)
            self.pass_time(1, lambda other: other == rank)


def test_a_silent_rank_is_named_once_and_once_more_when_it_is_back(caplog):
    table = Table()
    table.usual_steps(2)
    table.pass_time(30, lambda rank: rank == 2)
    (named,) = caplog.messages
    assert "rank 2 on node2, last heard 5.5 s ago: EXCHANGE after step 2; longer than usual" in named
    table.hear(2)
    assert caplog.messages[1:] == ["nnlo: rank 2 on node2 is back after 31.0 s"]


def test_the_deadline_follows_what_is_usual_after_the_same_message(caplog):
    table = Table()
    for _ in range(2):
        table.hear(1)
        table.pass_time(1, lambda rank: rank == 1)
        table.hear(1, Kind.EPOCH)
        table.pass_time(20, lambda rank: rank == 1)  # it validates
    table.hear(1, Kind.EPOCH)
    table.pass_time(35, lambda rank: rank == 1)
    assert caplog.messages == []
    table.pass_time(10, lambda rank: rank == 1)
    assert len(caplog.messages) == 1


def test_who_waits_for_others_is_not_silent(caplog):
    table = Table(stall_timeout_s=10)
    table.usual_steps(2)
    assert table.pass_time(40, lambda _: False) == []
    assert caplog.messages == []


def test_a_server_that_was_away_does_not_blame_the_workers(caplog):
    table = Table(stall_timeout_s=10)
    table.usual_steps(2)
    table.clock.now_s += 60
    assert table.stall_detector.look(lambda _: True) == []
    table.stall_detector.begin()
    assert table.pass_time(4) == []
    assert caplog.messages == []


def test_who_is_silent_for_the_timeout_is_given_up():
    table = Table(stall_timeout_s=10, tells=False)
    table.usual_steps(2)
    assert table.pass_time(9, lambda rank: rank == 2) == []
    assert table.pass_time(2, lambda rank: rank == 2) == [2]


def test_only_one_rank_tells(caplog):
    caplog.set_level(logging.INFO)
    table = Table(tells=False)
    table.usual_steps(2)
    table.pass_time(30)
    table.stall_detector.report_death(2, 1)
    assert caplog.messages == []


def test_the_dead_are_named_with_what_they_did_last(caplog):
    table = Table()
    table.hear(1, Kind.LOCK, step=7)
    table.clock.now_s += 0.25
    report = table.stall_detector.report_death(1, 1)
    said = "rank 1 on node1, last heard 0.2 s ago: LOCK after step 7"
    assert caplog.messages == [f"nnlo: {said}; it has died. Workers left: 1"]
    assert report.startswith(f"{said}; died at 2")


def test_a_dropped_rank_is_named_with_its_silence(caplog):
    table = Table()
    table.hear(1, Kind.LOCK, step=7)
    table.pass_time(30)
    silence_s, report = table.stall_detector.report_drop(1, 1)
    said = "rank 1 on node1, last heard 30.0 s ago: LOCK after step 7; dropped after 30 s of silence"
    assert caplog.messages[-1] == f"nnlo: {said}. Workers left: 1"
    assert report.startswith(f"{said} at 2")
    assert silence_s == 30.0


@pytest.mark.parametrize("wrong", [0, -1, True, "10", float("nan")])
def test_impossible_timeouts_are_refused(wrong):
    with pytest.raises(
        ConfigurationError, match=r"stall_timeout_s=.* is not possible: it must be above 0, finite, or None"
    ):
        Participant(Downpour(), [], stall_timeout_s=wrong)


def test_messages_that_count_something_else_leave_the_number_of_steps():
    stall_detector = StallDetector({1: "node7"}, tells=False, clock=lambda: 0.0)
    stall_detector.heard(Message(Kind.EXCHANGE, sender=1, sequence=1, clock=500))
    for others in (
        Message(Kind.PAUSE, sender=1, sequence=1, clock=3),
        Message(Kind.JOIN, sender=1, sequence=0, clock=2, stop=True),
        Message(Kind.ROUND, sender=1, sequence=1, clock=40),
    ):
        stall_detector.heard(others)
        assert stall_detector.last(1).endswith(f"{others.kind.name} after step 500")
