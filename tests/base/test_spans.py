"""Spans: each moment counts once, as the kind of the innermost one."""

from __future__ import annotations

import threading

import pytest

from nnlo_common.base._spans import KINDS, Spans, record, recorder, span


class Clock:
    """A clock that a test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def spans():
    clock, told = Clock(), []
    found = Spans(told.append, clock=clock)
    found.clock, found.told = clock, told
    record(found)
    yield found
    record(None)


def passed(spans, seconds):
    spans.clock.now_s += seconds


def test_self_times_add_up_to_the_time_that_passed(spans):
    passed(spans, 3)
    with span("validate", "epoch"):
        passed(spans, 5)
        with span("pack"):
            passed(spans, 7)
            with span("wait"):
                passed(spans, 11)
        passed(spans, 13)
        with span("wait"):
            passed(spans, 17)
    passed(spans, 19)
    with span("read"):
        passed(spans, 23)
        wanted = {"compute": 22, "validate": 18, "pack": 7, "wait": 28, "read": 23}
        assert spans.spent() == dict.fromkeys(KINDS, 0) | wanted
    assert sum(spans.spent().values()) == spans.clock.now_s - spans.began_s == 98
    assert [(one.kind, one.name, one.begin_s, one.end_s) for one in spans.told] == [
        ("compute", "compute", 100, 103),
        ("wait", "wait", 115, 126),
        ("pack", "pack", 108, 126),
        ("wait", "wait", 139, 156),
        ("validate", "epoch", 103, 156),
        ("compute", "compute", 156, 175),
        ("read", "read", 175, 198),
    ]


def test_an_error_ends_the_span(spans):
    def fail():
        with span("apply"):
            passed(spans, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    passed(spans, 5)
    assert (spans.spent()["apply"], spans.spent()["compute"]) == (3, 5)


def test_an_epoch_ends_between_two_pieces_of_computing(spans):
    passed(spans, 3)
    spans.cut()
    passed(spans, 5)
    with span("read"):
        spans.cut()  # within a span there is nothing to cut
    assert [(one.kind, one.begin_s, one.end_s) for one in spans.told] == [
        ("compute", 100, 103),
        ("compute", 103, 108),
        ("read", 108, 108),
    ]


def test_each_thread_has_a_recorder_of_its_own(spans):
    def work():
        assert recorder() is None
        record(spans.beside("reader"))
        with span("read", "ahead"):
            passed(spans, 3)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [(one.track, one.name) for one in spans.told] == [("reader", "ahead")]
    assert spans.spent()["read"] == 0
