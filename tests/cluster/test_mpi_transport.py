"""Doors over real MPI, on both wheels: order, memory, closing, time limits, and strangers."""

from __future__ import annotations

import re

import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

PROGRAM = PROGRAMS / "endpoint_all.py"
CHECKS = re.search(r"^CHECKS = \[([^]]*)\]", PROGRAM.read_text(), re.MULTILINE)[1].replace(",", "").split()


@pytest.fixture(scope="module", params=[2, 3])
def done(request):
    """One job that makes all checks, one after another; the first that fails ends it."""
    return mpiexec(request.param, PROGRAM, timeout_s=60)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_doors(done, check):
    assert f"<{check}>" in done.stdout, done.stderr[-3000:]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_job_ends_in_good_order(done):
    assert (done.returncode, done.stderr) == (0, "")
    assert len(CHECKS) == 13
