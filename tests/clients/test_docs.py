"""The examples of docs/clients.md run as they stand, alone and on three ranks."""

from __future__ import annotations

import re

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.pages import code

BLOCKS = code("python", "docs/clients.md")
NAMES = ["lightning", "huggingface", "accelerate"]


def test_there_is_an_example_of_each():
    assert len(BLOCKS) == len(NAMES)
    assert all(name in block for name, block in zip(NAMES, BLOCKS, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.extended])])
@pytest.mark.parametrize("block", BLOCKS, ids=NAMES)
def test_an_example_trains(block, ranks, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(block)
    env = {"HF_HUB_OFFLINE": "1"}
    run = (
        alone(script, env=env, timeout_s=100)
        if ranks == 1
        else mpiexec(ranks, script, env=env, timeout_s=110)
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"^(?:val_|eval_)?loss ([\d.]+)$", run.stdout, re.MULTILINE)]
    assert losses, run.stdout
    assert max(losses) < 1.5
