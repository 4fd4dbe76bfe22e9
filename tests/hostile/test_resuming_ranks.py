"""Several ranks agree on the newest checkpoint that all of them can load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nnlo_common.training.checkpoint import Entry, Manifest
from nnlo_common.training.checkpoint._manifest import MANIFEST
from tests.helpers.jobs import mpiexec

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

from nnlo_torch._checkpoint import packed, unpacked  # noqa: E402
from tests.programs import torch_checkpoint  # noqa: E402

PROGRAM = Path(torch_checkpoint.__file__)


def run(tmp_path: Path, name: str) -> Any:
    (tmp_path / name).mkdir()
    folders = [str(tmp_path / "run"), str(tmp_path / name)]
    return mpiexec(3, PROGRAM, *folders, "0", "raise", "wrapper=Synchronous", timeout_s=100)


def change(folder: Path, rank: int, *path: Any, value: Any) -> None:
    """Exchange a part of a rank's state, with correct checksums."""
    manifest, file = Manifest.read((folder / MANIFEST).read_bytes()), f"rank{rank}.pt"
    tree = unpacked((folder / file).read_bytes())
    part: Any = tree
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    data = packed(tree)
    (folder / file).write_bytes(data)
    files = {**manifest.files, file: Entry.of(data)}
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).written())


def weights(folder: Path) -> list[np.ndarray]:
    return [np.load(folder / f"rank{rank}.npz")["weights"] for rank in range(3)]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.framework("torch")
def test_a_part_that_one_rank_cannot_load_makes_all_ranks_go_back(tmp_path: Path) -> None:
    done = run(tmp_path, "straight")
    assert done.returncode == 0, done.stderr
    earlier, newest = sorted((tmp_path / "run").glob("checkpoint-*"))[-2:]
    change(newest, 1, "position", 0, value=-5)
    center = unpacked((earlier / "rank0.pt").read_bytes())["team"]["part"]["server"]["rule"]["center"]
    change(
        earlier, 0, "team", "part", "server", "rule", "center", value=np.full_like(center, np.float32("nan"))
    )
    again = run(tmp_path, "again")
    assert again.returncode == 0, again.stderr
    for told in (
        f"{newest.name} is damaged: rank 1: rank1.pt: its epoch is -5, not a count",
        f"{earlier.name} is damaged: rank 0: rank0.pt: its weights are NaN",
        "which is undamaged",
    ):
        assert again.stderr.count(told) == 1, again.stderr
    for one, other in zip(weights(tmp_path / "again"), weights(tmp_path / "straight"), strict=True):
        assert np.array_equal(one, other)
