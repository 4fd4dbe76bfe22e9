"""Elastic tree over real MPI: the same numbers as with threads as ranks; deaths."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.trees import assert_as_replayed

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.extended]


@pytest.mark.parametrize("times", [1, 100_000])
def test_all_numbers_are_those_of_the_reference(tmp_path: Path, times: int) -> None:
    done = mpiexec(8, PROGRAMS / "tree.py", str(tmp_path), "-1", str(times), timeout_s=100)
    assert done.returncode == 0, done.stderr
    assert_as_replayed(tmp_path, times)


@pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies")
def test_a_killed_worker_costs_only_itself(tmp_path: Path) -> None:
    options = ["--with-ft", "ulfm"]
    done = mpiexec(8, PROGRAMS / "tree.py", str(tmp_path), "6", "1", options=options, timeout_s=100)
    found = {path.stem for path in tmp_path.glob("*.npz")}
    assert found == {"0", "1", "2", "3", "4", "5", "7"}, done.stderr
    assert np.load(tmp_path / "4.npz")["commits"].tolist().count(6) == 20 // 3


@pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies")
def test_a_killed_sub_server_ends_the_job(tmp_path: Path) -> None:
    options = ["--with-ft", "ulfm"]
    done = mpiexec(8, PROGRAMS / "tree.py", str(tmp_path), "4", "1", options=options, timeout_s=100)
    assert done.returncode != 0
    assert not (tmp_path / "0.npz").exists()
    assert "the sub-server of the workers 5, 6, 7 has died" in done.stderr or "a server of the" in done.stderr
