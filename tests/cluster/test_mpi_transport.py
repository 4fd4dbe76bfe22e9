"""Doors over real MPI, on both wheels: order, memory, closing, time limits, and strangers."""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

PROGRAM = PROGRAMS / "endpoint_all.py"
CHECKS = re.search(r"^CHECKS = \[([^]]*)\]", PROGRAM.read_text(), re.MULTILINE)[1].replace(",", "").split()


@pytest.fixture(scope="module", params=[2, 3])
def done(request, tmp_path_factory):
    """One job that makes all checks, one after another; the first that fails ends it."""

    def run(folder):
        job = mpiexec(request.param, PROGRAM)
        (folder / "job.json").write_text(json.dumps([job.returncode, job.stdout, job.stderr]))

    folder = written_once(tmp_path_factory, f"doors-{request.param}", run)
    return json.loads((folder / "job.json").read_text())


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_doors(done, check):
    _, printed, said = done
    assert f"<{check}>" in printed, said[-3000:]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_job_ends_in_good_order(done):
    status, _, said = done
    # On a busy machine ranks may be late, and are named.
    beside = [line for line in said.splitlines() if not re.search("(has|have) not come", line)]
    assert (status, beside) == (0, [])
    assert len(CHECKS) == 13
