"""Ranks that never come to a training: who waits names them, who leaves says so, and the job ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.cluster import _start_watch
from nnlo_common.cluster._connecting import start_limit_s
from nnlo_common.cluster._start_watch import listed
from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

ENDS = "This rank ends after 4 s of waiting; NNLO_START_LIMIT_S changes that"
ADVICE = "no `if rank == 0:` around a training"


@pytest.fixture(autouse=True)
def _cold_starts(monkeypatch):
    """A rank knows the others of its host by the environment that they were started with."""
    monkeypatch.setenv("NNLO_TEST_STARTS", "cold")


def run(case, trains, folder, *, limit="4", **options):
    env = {"NNLO_START_LIMIT_S": limit}
    return mpiexec(3, PROGRAMS / "absent.py", case, str(trains), str(folder), env=env, **options)


def spoke(done, words):
    return [line for line in done.stderr.splitlines() if line.startswith("nnlo: ") and words in line]


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize("trains", [0, 2])
def test_ranks_that_stay_away_are_named_by_the_one_that_waits(trains, tmp_path):
    done = run("stay", trains, tmp_path)
    assert done.returncode != 0
    others = listed({0, 1, 2} - {trains})
    (line,) = spoke(done, "has waited 4 s for the other ranks")
    assert line.startswith(f"nnlo: rank {trains} of 3 on ")
    assert f"R{others[1:]} of this host have not begun" in line
    assert ADVICE in line
    assert ENDS in line
    (end,) = spoke(done, "ends: the other ranks have not come within 4 s")
    assert end.startswith(f"nnlo: rank {trains} of 3 on ")
    assert "trained" not in done.stdout


@pytest.mark.mpi
def test_ranks_that_have_left_say_so_and_are_named(tmp_path):
    done = run("leave", 0, tmp_path)
    assert done.returncode != 0
    left = spoke(
        done, "ends without having taken part in a training; ranks that wait for it in theirs end within 4 s"
    )
    assert sorted(line.split(" of 3")[0] for line in left) == ["nnlo: rank 1", "nnlo: rank 2"]
    (line,) = spoke(done, "has waited 4 s for the other ranks")
    assert "Ranks 1 and 2 have ended, or run on other hosts" in line


@pytest.mark.mpi
def test_who_has_left_the_host_is_not_waited_for_to_the_limit(tmp_path):
    done = run("leave", 0, tmp_path, limit="200", timeout_s=60)
    assert done.returncode != 0
    (end,) = spoke(done, "nnlo: rank 0 of 3 on")
    assert "ends: ranks 1 and 2 of this host have ended before MPI began, which waits for all" in end
    assert ADVICE in end


@pytest.mark.mpi
def test_who_was_here_and_dies_is_not_waited_for(tmp_path):
    if running_mpi() != "Open MPI":
        pytest.skip("only Open MPI's launcher tolerates deaths")
    done = run("die later", 1, tmp_path, limit="200", timeout_s=60, options=["--with-ft", "ulfm"])
    assert done.returncode != 0
    (end,) = spoke(done, "")
    assert end.startswith("nnlo: rank 1 of 3 on")
    assert "ends: ranks 0 and 2 of this host have ended before MPI began, which waits for all" in end


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize("trains", [0, 1, 2])
def test_a_program_that_has_begun_mpi_itself_is_told_the_same(trains, tmp_path):
    """MPI waits for nobody then, but the first call of all ranks does."""
    done = run("own mpi", trains, tmp_path)
    assert done.returncode != 0
    others = listed({0, 1, 2} - {trains})
    (line,) = spoke(done, "has waited 4 s for the other ranks")
    assert f"R{others[1:]} have not come" in line
    assert f"StartupError: the other ranks have not come within 4 s: {others} did not come." in done.stderr
    assert len(spoke(done, "ends without having taken part")) == 2


@pytest.mark.mpi
def test_ranks_that_die_before_mpi_begins_are_not_waited_for_for_ever(tmp_path):
    """Only a launcher that tolerates deaths lets the others wait."""
    if running_mpi() != "Open MPI":
        pytest.skip("only Open MPI's launcher tolerates deaths")
    done = run("die", 0, tmp_path, options=["--with-ft", "ulfm"])
    assert done.returncode != 0
    assert spoke(done, "Ranks 1 and 2 have ended, or run on other hosts")
    assert spoke(done, "ends: the other ranks have not come within 4 s")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="/proc is not there")
def test_the_watch_knows_the_ranks_of_its_job_also_behind_shells_and_who_has_ended():
    """This process is their daemon; one rank is another job's, one is started by a shell."""
    waits = [sys.executable, "-c", "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"]
    behind_a_shell = ["bash", "-c", f"{shlex.join(waits)}; true"]
    jobs = [("here", 0, waits), ("here", 1, behind_a_shell), ("other", 7, waits), ("here", 2, waits)]
    with contextlib.ExitStack() as stack:
        ranks, pids = [], []
        for job, rank, words in jobs:
            env = {**os.environ, "PMIX_NAMESPACE": job, "SOME_RANK": str(rank)}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            ranks.append(stack.enter_context(subprocess.Popen(words, env=env, **pipes)))
            stack.callback(ranks[-1].stdin.close)
            pids.append(int(ranks[-1].stdout.readline()))
        assert pids[1] != ranks[1].pid
        for pid in pids[:2]:
            watch = _start_watch._Host(pid, "SOME_RANK", 3)
            watch.look()
            assert set(watch.begun()) == {0, 1, 2}
        ranks[3].stdin.close()
        ranks[3].wait()
        watch.look()
        assert not watch.lost, "perhaps MPI has begun, and it has ended since"
        watch.look()
        assert watch.lost == {2}
        assert watch.ended(3) == "rank 2 of this host has ended"
        assert watch.unseen == 0


@pytest.mark.mpi
@pytest.mark.parametrize("patient", [False, True])
def test_a_rank_that_others_wait_for_with_patience_is_not_reported(patient, tmp_path):
    """Such as one that writes the report of a search."""
    done = mpiexec(2, PROGRAMS / "late.py", "patient" if patient else "plain", tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("for the other ranks. Rank 0 has not come." in done.stderr) is not patient, done.stderr


@pytest.mark.mpi
def test_a_wrong_limit_is_refused_at_once(tmp_path):
    done = run("leave", 0, tmp_path, limit="soon")
    assert done.returncode != 0
    assert "ConfigurationError: NNLO_START_LIMIT_S='soon' must be a number of seconds above 0" in done.stderr


@pytest.mark.parametrize("text", ["soon", "0", "-3", "nan", "inf"])
def test_a_limit_is_a_positive_number(text):
    with pytest.raises(ConfigurationError, match="NNLO_START_LIMIT_S="):
        start_limit_s({"NNLO_START_LIMIT_S": text})
    assert start_limit_s({"NNLO_START_LIMIT_S": " 7.5 "}) == 7.5
    assert start_limit_s({}) == 300


def test_many_ranks_are_named_shortly():
    assert listed({3}) == "rank 3"
    assert listed({3, 1}) == "ranks 1 and 3"
    assert listed(range(9)) == "ranks 0, 1, 2, 3, 4, 5 and 3 more"
