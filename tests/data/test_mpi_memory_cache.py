"""Ranks of a host have one copy of the decoded samples, and a killed job leaves nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")
pytestmark = [pytest.mark.mpi, pytest.mark.slow]

SAMPLES, MB = 4000, 4000 * 1000 * 4 / 1e6


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_all_ranks_have_one_copy(ends, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        x = np.arange(SAMPLES * 1000, dtype="f4").reshape(SAMPLES, 1000)
        file.create_dataset("x", data=x, chunks=(100, 1000), compression="lzf")
    before = set(Path("/dev/shm").glob("*nnlo*"))
    done = mpiexec(3, PROGRAMS / "cached_ranks.py", tmp_path, *(["kill"] if ends == "killed" else []))
    assert (done.returncode == 0) == (ends != "killed"), done.stderr
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert [sum(epoch) for epoch in zip(*(one["seen"] for one in ranks), strict=True)] == [SAMPLES] * 3
    assert sum(one["decoded"] for one in ranks) == SAMPLES  # each by one of them, once
    assert all(one["cached_mb"] == pytest.approx(MB) for one in ranks)
    assert 0.9 * MB < sum(one["pss_mb"] for one in ranks) < 1.3 * MB
    assert set(Path("/dev/shm").glob("*nnlo*")) == before
    assert not _left()


def _left() -> list[str]:
    """Processes of nobody that still have such memory open."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if "memfd:nnlo-samples" in text and "cached_ranks" in path.with_name("cmdline").read_text():
            found.append(str(path))
    return found
