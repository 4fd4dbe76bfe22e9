"""Memory that is used up in the middle of a run, as a process: checkpoints fail, the training goes on."""

from __future__ import annotations

import re

import pytest

from nnlo_common.training.checkpoint import Store
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.extended, pytest.mark.framework("torch")]


@pytest.mark.parametrize("limited", [0, 1])
def test_a_rank_without_memory_for_a_checkpoint_is_named_once_and_the_training_goes_on(limited, tmp_path):
    done = mpiexec(3, PROGRAMS / "troubled_memory.py", str(tmp_path / "run"), str(limited), timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained 7") == 3
    warned = re.findall(
        r"no checkpoint could be written to .*?/run: rank (\d) on host \S+: (.*?);", done.stderr
    )
    assert warned == [(str(limited), "Out of memory")]  # once, though three checkpoints failed
    # What epochs 0 to 2 have left was there until the last epoch, in which there was memory again.
    assert "epoch 6: checkpoint-000001 checkpoint-000002 checkpoint-000003\n" in done.stdout
    newest = Store(tmp_path / "run").newest()
    assert newest.manifest.number == 7  # those of checkpoints that were given up are not used again
    assert newest.manifest.facts["epoch"] == 7
