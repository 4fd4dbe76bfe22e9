"""Ranks that are stopped, as real processes: they are named, and the job goes on or is ended.

A limit is a second here, so that a rank is killed within a few.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

import pytest

from tests.helpers.jobs import running, running_mpi
from tests.helpers.paths import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.extended]
NAMES = {
    0: r"nnlo: rank 0 on \S+, a server, has not answered for \d+\.\d s \(a step\); longer than usual",
    1: r"nnlo: rank 1 on \S+, last heard \d+\.\d s ago: EXCHANGE after step \d+; longer than usual",
}


def started(process, times=2):
    """Return the process ids of the ranks, once so many have said that they train."""
    pids, ready = {}, 0
    while ready < times:
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


# -- an heir ----------------------------------------------------------------------------------------------

ULFM = ("--with-ft", "ulfm")
needs_ulfm = pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies")
HEIR = PROGRAMS / "stopped_heir.py"


@contextlib.contextmanager
def stopped(rank, tmp_path, *, limit_s, words=()):
    """Stop a rank of a training; at the end wake it, let the training end, and check the status."""
    arguments = str(tmp_path / "end"), str(limit_s), *words
    with running(4, HEIR, *arguments, timeout_s=120, options=ULFM) as process:
        pid = started(process, 1)[rank]
        os.kill(pid, signal.SIGSTOP)
        yield process
        with contextlib.suppress(ProcessLookupError):  # it is dead
            os.kill(pid, signal.SIGCONT)
        time.sleep(1)  # what it would do now
        (tmp_path / "end").touch()
        process.lines = process.stdout.read().splitlines()
        process.said = process.complaints()
        assert process.wait(60) == 0, process.said


def states(process):
    """Return the role and the losses of each rank at its end."""
    found = [re.fullmatch(r"done (\d), (.+): (\(.*\))", line) for line in process.lines]
    return {int(one[1]): one.groups()[1:] for one in found if one is not None}


@needs_ulfm
def test_a_stopped_server_is_killed_and_the_heir_serves(tmp_path):
    with stopped(0, tmp_path, limit_s=1) as process:
        wait_for(process, r"nnlo: rank 0 on \S+, the server, has died; rank 1 serves in its place")
    found = states(process)
    assert {rank: one[0] for rank, one in found.items()} == {1: "server 0", 2: "worker 1", 3: "worker 2"}


@needs_ulfm
def test_a_stopped_heir_is_killed_and_the_others_go_on(tmp_path):
    with stopped(1, tmp_path, limit_s=1) as process:
        wait_for(process, r"nnlo: rank 1 on .*; dropped after \d+ s of silence. Workers left: 2")
        wait_for(process, "nnlo: rank 1 would have served in the server's place; rank 2 now would")
    assert {rank: one[0] for rank, one in states(process).items()} == {
        0: "server 0",
        2: "worker 1",
        3: "worker 2",
    }


@needs_ulfm
def test_a_stopped_server_that_cannot_be_killed_goes_on_when_it_is_woken(tmp_path):
    """All wait for it; the heir does not serve meanwhile, as two would then do the same."""
    with stopped(0, tmp_path, limit_s=2.5, words=["unkillable"]) as process:
        wait_for(process, "rank 0 on .* has not answered for")
        time.sleep(3)
    found = states(process)
    assert sorted(found) == [0, 1, 2, 3]
    assert {lost for _, lost in found.values()} == {"()"}
