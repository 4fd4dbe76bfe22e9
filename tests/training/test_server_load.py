"""A run says once that its server is the bottleneck, and what to do."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from nnlo_common import SGD, Downpour, Participant
from nnlo_common.testing import MemoryCluster
from nnlo_common.training import _server_load
from nnlo_common.training._server_load import Bottleneck


def epochs(caplog, *, busy, waited, seconds, times=3, **options):
    """Serve epochs with a clock of our own; return what was said."""
    now_s = 100.0
    watch = Bottleneck(servers=3, clock=lambda: now_s, **options)
    with caplog.at_level(logging.WARNING):
        for _ in range(times):
            watch.begin()
            now_s += seconds * (1 - busy)
            watch.begin_work()
            now_s += seconds * busy
            watch.end_work()
            watch.end(waited)
            watch.begin_work()  # between epochs nothing counts
            now_s += 1000.0
            watch.end_work()
    return [record.getMessage() for record in caplog.records]


def test_a_busy_server_with_waiting_workers_is_named_once(caplog):
    (line,) = epochs(caplog, busy=0.75, waited=[0.25, 0.5, 0.75], seconds=40.0)
    assert line == (
        "nnlo: workers wait 50 % of their time, and a server works 75 % of its own: use servers=4, a larger "
        "every, or groups of ranks"
    )


@pytest.mark.parametrize(
    "case",
    [
        {"busy": 0.45, "waited": [0.9, 0.9], "seconds": 40.0},  # it idles: the way to it is long
        {"busy": 0.9, "waited": [0.1, 0.3], "seconds": 40.0},  # it works while nobody waits
        {"busy": 0.9, "waited": [0.9, 0.9], "seconds": 3.0},  # nine seconds in all
        {"busy": 0.9, "waited": [], "seconds": 40.0},  # all workers have died
        {"busy": 0.9, "waited": [0.9], "seconds": 40.0, "tells": False},  # another server tells
    ],
)
def test_other_servers_are_left_in_peace(caplog, case):
    assert epochs(caplog, **case) == []


def test_short_epochs_add_up(caplog):
    assert len(epochs(caplog, busy=0.75, waited=[0.5], seconds=3.0, times=4)) == 1


def test_the_server_hears_of_the_waits_of_its_workers(caplog, monkeypatch):
    """Any share will do here; only the first of two servers tells, after the first epoch."""
    for name in ("WAITED", "BUSY", "_LEAST_S"):
        monkeypatch.setattr(_server_load, name, 0.0)

    def program(world):
        arrays = [np.zeros(3, np.float32) for _ in range(2)]
        with Participant(Downpour(), arrays, optimizer=SGD(0.1), servers=2, world=world) as me:
            for _ in range(2):
                for _ in me.batches(range(9)):
                    me.step()

    with caplog.at_level(logging.WARNING), MemoryCluster(5) as cluster:
        cluster.run(program)
    (line,) = [one.getMessage() for one in caplog.records]
    assert "use servers=3, a larger every, or groups of ranks" in line
    assert "workers wait 0 %" not in line
