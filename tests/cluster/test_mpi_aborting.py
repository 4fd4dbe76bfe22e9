"""What goes wrong on one rank ends the job and says who, where and what to do."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

# Without an abort the job would last until the test's limit, which fails it: the others wait for ever.
PROGRAM = PROGRAMS / "misuse.py"

ENDS = {
    "exit": ["rank 1 of 3", "ended in the middle of a training"],
    "server_exits": ["rank 0 of 3", "ended in the middle of a training"],
    "exception": ["rank 1 of 3", "failed", "ValueError: no such sample", "in raises"],
    "swallowed": ["rank 1 of 3", "ended in the middle of a training"],
    "other_model": ["'kernel' float32[3] here and 'kernel' float32[4] there", "rank 2", "same script"],
    "other_algorithm": ["Downpour(", "EASGD(", "on rank 2", "same script"],
    "too_many_servers": ["3 - 3 servers = 0 worker ranks", "servers=2"],
    "unusable_array": ["array 0 is float64[3]", "allow_narrowing=True"],
}


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_a_failure_on_one_rank_ends_all_and_says_why(what):
    done = mpiexec(3, PROGRAM, what, timeout_s=30)
    assert done.returncode != 0
    for words in ENDS[what]:
        assert words in done.stderr
    assert "done" not in done.stdout


@pytest.mark.mpi
@pytest.mark.slow
def test_the_death_of_a_rank_ends_all_and_names_it():
    done = mpiexec(3, PROGRAM, "killed", timeout_s=30)
    assert done.returncode != 0
    assert "done" not in done.stdout
    if running_mpi() == "Open MPI":  # whose mpiexec names it as well; MPICH's leaves nobody the time to
        assert "rank 1" in done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_workers_without_batches_are_no_trouble():
    done = mpiexec(5, PROGRAM, "no_batches")
    assert (done.returncode, done.stdout.strip()) == (0, "done")


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "rank", "words"),
    [
        ("raises", 1, "ValueError: no data file on this node"),
        ("float64", 1, "array 0 is float64[3]"),
        ("no_optimizer", 2, "it needs an optimizer"),
    ],
)
def test_a_failure_before_joining_ends_all_as_well(what, rank, words):
    done = mpiexec(3, PROGRAM.with_name("early.py"), what, timeout_s=30)
    assert done.returncode != 0
    assert f"rank {rank} of 3" in done.stderr
    assert words in done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_a_collective_of_the_users_own_is_no_trouble_after_joining():
    done = mpiexec(3, PROGRAM.with_name("early.py"), "barrier", timeout_s=30)
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


@pytest.mark.mpi
@pytest.mark.slow
def test_a_mistake_that_all_ranks_make_is_reported_once():
    done = mpiexec(5, PROGRAM.with_name("early.py"), "alike", timeout_s=60)
    assert done.returncode == 1
    assert done.stderr.count("failed; ending the job") == done.stderr.count("KeyError: ") == 1, done.stderr
    if running_mpi() == "MPICH":  # whose mpiexec prints nothing about an abort; Open MPI's always does
        assert done.stderr.startswith("nnlo: rank ")
        assert "KeyError: " in done.stderr.splitlines()[-1], done.stderr
