"""Ranks that are stopped for 20 s, as real processes: they are named, and the job goes on or is ended."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.helpers.jobs import running
from tests.helpers.paths import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.extended]
NAMES = {
    0: r"nnlo: rank 0 on \S+, a server, has not answered for \d+\.\d s \(a step\); longer than usual",
    1: r"nnlo: rank 1 on \S+, last heard \d+\.\d s ago: EXCHANGE after step \d+; longer than usual",
}


def started(process):
    """Return the process ids of the ranks, once all train."""
    pids, ready = {}, 0
    while ready < 2:
        words = process.stdout.readline().split()
        if words == ["ready"]:
            ready += 1
        else:
            pids[int(words[0])] = int(words[1])
    return pids


def wait_for(process, pattern, limit_s=40):
    end_s = time.monotonic() + limit_s
    while not re.search(pattern, process.complaints()):
        assert time.monotonic() < end_s, process.complaints()
        time.sleep(0.1)


@pytest.mark.parametrize("rank", NAMES)
def test_a_stopped_rank_is_named_and_goes_on_when_it_is_woken(rank, tmp_path):
    with running(3, PROGRAMS / "stopped.py", str(tmp_path / "end"), "0", timeout_s=120) as process:
        pid = started(process)[rank]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(20)
        assert len(re.findall(NAMES[rank], process.complaints())) == 1, process.complaints()
        os.kill(pid, signal.SIGCONT)
        wait_for(process, rf"nnlo: rank {rank} on \S+ is back after \d+\.\d s")
        (tmp_path / "end").touch()
        assert process.stdout.read().count("done") == 3
        assert process.wait(30) == 0


@pytest.mark.parametrize(("rank", "words"), [(0, "has not answered for"), (1, "was silent longer than")])
def test_a_rank_that_stays_stopped_ends_the_job_where_a_limit_is_set(rank, words, tmp_path):
    with running(3, PROGRAMS / "stopped.py", str(tmp_path / "end"), "8", timeout_s=120) as process:
        pid = started(process)[rank]
        os.kill(pid, signal.SIGSTOP)
        assert process.wait(40) != 0
        assert re.search(rf"PeerLostError: rank {rank}: {words}", process.complaints()), process.complaints()
