"""One Slurm for all tests of a file; a test that breaks a node starts one of its own."""

from __future__ import annotations

import pytest

from tests.helpers.jobs import running_mpi
from tests.helpers.slurm import slurm


@pytest.fixture(scope="module")
def batch(tmp_path_factory):
    if running_mpi() != "Open MPI":
        pytest.skip("Slurm starts the ranks by PMIx, which MPICH's wheel does not have")
    with slurm(tmp_path_factory.mktemp("slurm")) as started:
        yield started
