"""The README's code runs as it stands, and its commands are the real ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import mpiexec

ROOT = Path(__file__).parent.parent


def code(language, page="README.md"):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_python_block_runs_alone(capsys):
    block, _ = code("python")
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("epoch 4: [ 1.")


@pytest.mark.framework("torch")
def test_the_torch_block_trains():
    shown = {}
    exec(compile(code("python")[1], "README.md", "exec"), shown)
    (inputs, targets) = shown["data"].tensors
    assert float(((shown["model"](inputs) - targets) ** 2).mean().detach()) < 1.0
    assert shown["optimizer"].role == "alone"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.framework("torch")
def test_the_torch_block_runs_on_three_ranks(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(code("python")[1])
    done = mpiexec(3, program)
    assert done.returncode == 0, done.stderr


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_the_guide_to_pytorch_trains(ranks, tmp_path, capsys):
    (block,) = code("python", "docs/pytorch.md")
    if ranks == 1:
        exec(compile(block, "pytorch.md", "exec"), {})
        told = capsys.readouterr().out
    else:
        program = tmp_path / "train.py"
        program.write_text(block)
        done = mpiexec(ranks, program)
        assert done.returncode == 0, done.stderr
        told = done.stdout
    losses = [float(value) for value in re.findall(r"epoch \d: {'loss': ([0-9.e-]+)}", told)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_python_block_runs_on_three_ranks(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(code("python")[0])
    done = mpiexec(3, program)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"epoch {n}" for n in range(5)]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_numpy_example_trains():
    done = mpiexec(3, Path(__file__).parent.with_name("examples") / "fashion_numpy.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"test accuracy ([0-9.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert max(accuracies) > 0.7
