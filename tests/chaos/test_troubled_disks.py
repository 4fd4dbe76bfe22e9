"""Disks that refuse in the middle of a run, as processes on a small disk: the training goes on."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers.jobs import launcher, mpiexec, starting
from tests.helpers.paths import PROGRAMS

pytestmark = pytest.mark.mpi
PROGRAM = PROGRAMS / "troubled_disk.py"
KEPT = ["checkpoint-000001", "checkpoint-000002"]


@pytest.fixture
def own_mounts():
    """A way to start a command with mounts of its own, which go with it."""
    unshare = shutil.which("unshare")
    tried = unshare and subprocess.run([unshare, "--mount", "true"], check=False, capture_output=True)
    if not tried or tried.returncode:
        pytest.skip("this user may not mount a disk for a process")
    return [unshare, "--mount"]


@pytest.mark.framework("torch")
@pytest.mark.extended
@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        ("full", "No space left on device"),
        ("read-only", "Read-only file system"),
        ("descriptors", "Too many open files"),
        ("quota", "File too large"),
    ],
)
def test_a_disk_that_refuses_is_named_once_and_the_training_goes_on(trouble, words, own_mounts, tmp_path):
    (tmp_path / "disk").mkdir()
    inside = [sys.executable, str(PROGRAM), trouble, str(tmp_path / "disk")]
    mount = [sys.executable, str(PROGRAM), "mount", str(tmp_path / "disk"), str(launcher()), "-n", "3"]
    with (tmp_path / "said").open("w+") as output:
        with starting([*own_mounts, *mount, *inside], output) as process:
            assert process.wait(90) == 0, (tmp_path / "said").read_text()
        said = (tmp_path / "said").read_text()
    assert said.count("trained 6") == 3
    warned = re.findall(r"no checkpoint could be written to .*?/run: (rank \d on host \S+: )?(.*?);", said)
    assert warned, said
    assert len(warned) == len(set(warned)), said  # each problem once, though three checkpoints failed
    assert {problem for _, problem in warned} == {words}
    (after,) = re.findall(r"^after (.*)$", said, re.MULTILINE)
    names = [name for name in after.split() if not name.endswith(".part") and name != "ranks"]
    assert names == [*KEPT, "in-use"]


def test_a_rank_that_can_open_no_file_still_reports_its_failure():
    done = mpiexec(3, PROGRAMS / "no_descriptors.py")
    assert done.returncode != 0
    assert "nnlo: rank 1 of 3" in done.stderr
    assert "ValueError: no such sample" in done.stderr
    assert "sys.excepthook" not in done.stderr
