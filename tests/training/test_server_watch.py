"""Server watch: a silent server is named once, and ends the job where a limit is set."""

from __future__ import annotations

import pytest

from nnlo_common import PeerLostError
from nnlo_common.training._stall_detector import ServerWatch


class Waiting:
    """A worker of two servers, whose clock is the test's."""

    def __init__(self, awaited=(0,), **options):
        self.now_s, self.awaited = 100.0, list(awaited)
        self.watch = ServerWatch(
            {0: "node1", 4: "node2"}, lambda: self.awaited, clock=lambda: self.now_s, **options
        )

    def wait(self, seconds, what="a step", *, answered=True):
        self.watch.begin(what)
        for _ in range(round(2 * seconds)):
            self.now_s += 0.5
            self.watch.look()
        if answered:
            self.watch.heard()


def test_a_silent_server_is_named_once_and_once_more_when_it_is_back(caplog):
    waiting = Waiting()
    for _ in range(3):
        waiting.wait(0)
    waiting.wait(30)
    named, back = caplog.messages
    assert named.startswith(
        "nnlo: rank 0 on node1, a server, has not answered for 5.5 s (a step); longer than usual"
    )
    assert "hangs, is stopped or is cut off" in named
    assert back == "nnlo: rank 0 on node1 is back after 30.0 s"


def test_only_the_server_that_must_answer_is_named(caplog):
    waiting = Waiting([4])
    waiting.wait(0)
    waiting.wait(6)
    assert "rank 4 on node2" in caplog.messages[0]
    waiting.awaited = []
    waiting.wait(60)
    assert len(caplog.messages) == 2


def test_the_limit_is_twice_the_longest_earlier_wait_for_the_same(caplog):
    waiting = Waiting()
    waiting.wait(0)
    waiting.wait(20, "the end of an epoch")
    waiting.wait(39, "the end of an epoch")
    assert caplog.messages == []
    waiting.wait(6)
    assert len(caplog.messages) == 2
    waiting.wait(80, "the end of an epoch")
    assert len(caplog.messages) == 4


def test_a_first_wait_may_take_a_minute(caplog):
    """The first step compiles, the first epoch ends with a validation."""
    waiting = Waiting()
    waiting.wait(60)
    assert caplog.messages == []
    waiting.wait(61, "the first step of an epoch")
    assert len(caplog.messages) == 2


def test_a_worker_that_was_stopped_itself_blames_nobody(caplog):
    waiting = Waiting(stall_timeout_s=10)
    waiting.wait(0)
    waiting.wait(2, answered=False)
    waiting.now_s += 60
    waiting.watch.look()
    waiting.now_s += 0.5
    waiting.watch.look()
    assert caplog.messages == []


def test_others_say_nothing(caplog):
    caplog.set_level("INFO")
    waiting = Waiting(tells=False)
    waiting.wait(0)
    waiting.wait(30)
    assert caplog.messages == []


def test_a_server_that_is_silent_twice_as_long_as_the_limit_ends_the_job(caplog):
    waiting = Waiting(stall_timeout_s=10)
    waiting.wait(0)
    waiting.wait(20)
    assert caplog.messages[0].endswith("; the job will end after 20 s")
    with pytest.raises(
        PeerLostError, match=r"rank 0.* has not answered for 20.5 s \(a step\), longer than twice"
    ):
        waiting.wait(21)
