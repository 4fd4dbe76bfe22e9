"""The progress thread over real MPI: that exchanges pass beside the computing, by counting them."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

PROGRAM = PROGRAMS / "overlap.py"
# Short messages leave at once; long ones move only while somebody calls MPI.
SIZES = [10, 3_000_000]

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", ["overlap", "without", "granted_less", "too_long", "fork"])
def test_it_goes_well(check, size):
    done = mpiexec(2, PROGRAM, check, str(size), timeout_s=60)
    assert (done.returncode, done.stdout.count(f"<{check}>")) == (0, 2), done.stderr[-3000:]


def test_ranks_that_share_a_core_leave_it_to_each_other():
    done = mpiexec(2, PROGRAM, "shares_a_core", "10", timeout_s=60)
    assert (done.returncode, done.stdout.count("<shares_a_core>")) == (0, 2), done.stderr[-3000:]


@pytest.mark.parametrize("size", [10, 250_000])
def test_short_replies_need_no_thread(size):
    done = mpiexec(2, PROGRAM, "reads_late", str(size), timeout_s=60)
    assert (done.returncode, done.stdout.count("<reads_late>")) == (0, 2), done.stderr[-3000:]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("check", "said"), [("fails", "RuntimeError: no more data"), ("leaves", "ended in the middle")]
)
def test_the_job_ends_with_the_worker(check, size, said):
    done = mpiexec(2, PROGRAM, check, str(size), timeout_s=60)
    assert done.returncode != 0
    assert said in done.stderr
