"""The README's code runs as it stands, and its commands are the real ones."""

from __future__ import annotations

import os
import re

import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.pages import code
from tests.helpers.paths import EXAMPLES, ROOT

KERAS, TORCH, NUMPY = range(3)  # the blocks of the README
# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
keras_warns = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
on_ranks = [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.slow])]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Blocks may write files where they run."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def back_end(monkeypatch):
    """The environment of what runs Keras: on torch if nothing else is asked for, and quiet."""
    chosen = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    return chosen


def test_the_python_block_runs_alone(capsys):
    exec(compile(code("python")[NUMPY], "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("epoch 4: [ 1.")


@pytest.mark.framework("keras")
@keras_warns
@pytest.mark.parametrize("ranks", on_ranks)
def test_the_keras_block_trains(ranks, tmp_path, capsys, back_end):
    block = code("python")[KERAS]
    if ranks == 1:
        exec(compile(block, "README.md", "exec"), {})
        told = capsys.readouterr().out
    else:
        told = run(block, tmp_path, back_end)
    losses = [float(value) for value in re.findall(r"val_loss: ([0-9.e-]+)", told)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.framework("keras")
@keras_warns
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.extended])])
def test_the_guide_to_keras_trains(ranks, tmp_path, capsys, back_end):
    block = "\n".join(code("python", "docs/keras.md"))
    if ranks == 1:
        exec(compile(block, "keras.md", "exec"), {})
        told = capsys.readouterr().out
    else:
        told = run(block, tmp_path, back_end)
    (validated,) = re.findall(r"^validated: \[(.*)\]$", told, re.MULTILINE)
    losses = [float(value) for value in validated.split(",")]
    assert min(losses[1:]) < losses[0]
    assert len(re.findall(r"^at the end: [0-9.]+$", told, re.MULTILINE)) == 1


@pytest.mark.framework("keras")
@keras_warns
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated")  # keras-tuner's
@pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning")
def test_the_guide_to_keras_tuner_searches(tmp_path, monkeypatch, capsys):
    pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")
    (block,) = code("python", "docs/searches.md", "With keras-tuner")
    shown = {}
    exec(compile(block, "searches.md", "exec"), shown)
    assert "Showing 1 best trials" in capsys.readouterr().out
    scores = [trial.score for trial in shown["tuner"].oracle.trials.values()]
    assert len(scores) == 4
    loss = shown["model"].evaluate(shown["x"][400:], shown["y"][400:], verbose=0)
    assert loss == pytest.approx(min(scores))


@pytest.mark.extended
@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
def test_the_keras_example_trains(back_end):
    done = mpiexec(3, ROOT / "examples" / "fashion_keras.py", timeout_s=100, env=back_end)
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"val_accuracy: ([0-9.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert max(accuracies) > 0.7
    assert len(re.findall(r"^steady, .* accuracy [0-9.]+", done.stdout, re.MULTILINE)) == 1


def run(block, folder, env):
    """What a block prints on three ranks."""
    program = folder / "train.py"
    program.write_text(block)
    done = mpiexec(3, program, timeout_s=100, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.framework("torch")
def test_the_torch_block_trains():
    shown = {}
    exec(compile(code("python")[TORCH], "README.md", "exec"), shown)
    (inputs, targets) = shown["data"].tensors
    assert float(((shown["model"](inputs) - targets) ** 2).mean().detach()) < 1.0
    assert shown["optimizer"].role == "alone"


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.framework("torch")
def test_the_torch_block_runs_on_three_ranks(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(code("python")[TORCH])
    done = mpiexec(3, program)
    assert done.returncode == 0, done.stderr


def of_pytorch(words, ranks, tmp_path, capsys):
    """What the block of the guide to PyTorch that has these words prints."""
    (block,) = (one for one in code("python", "docs/pytorch.md") if words in one)
    if ranks == 1:
        exec(compile(block, "pytorch.md", "exec"), {})
        return capsys.readouterr().out
    program = tmp_path / "train.py"
    program.write_text(block)
    done = mpiexec(ranks, program)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_the_guide_to_pytorch_trains_two_networks(ranks, tmp_path, capsys):
    told = of_pytorch("of_critic = ", ranks, tmp_path, capsys)
    assert told.startswith("20 averages, {'steps': ")


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_the_guide_to_pytorch_averages_what_is_clipped(ranks, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    told = of_pytorch('"critic.pt"', ranks, tmp_path, capsys)
    assert len(re.findall(r"{'averaged': -?[0-9.e-]+}", told)) == 2
    saved = torch.load(tmp_path / "critic.pt", weights_only=True)
    assert saved["averages"]["n_averaged"] == 20
    assert max(float(weight.abs().max()) for weight in saved["model"].values()) < 0.0501


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=[pytest.mark.mpi, pytest.mark.slow])])
def test_the_guide_to_pytorch_trains(ranks, tmp_path, capsys):
    told = of_pytorch("nt.EarlyStopping(", ranks, tmp_path, capsys)
    losses = [float(value) for value in re.findall(r"epoch \d: {'loss': ([0-9.e-]+)}", told)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]


@pytest.mark.framework("keras")
@keras_warns
def test_the_guide_to_data_trains_with_keras(tmp_path, monkeypatch, back_end):
    files, _, block, *_ = code("python", "docs/data.md")
    shown = {}
    exec(compile(files + block, "data.md", "exec"), shown)
    losses = shown["history"].history["val_loss"]
    assert losses[-1] < losses[0]


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", on_ranks)
def test_the_guide_to_data_trains_with_torch(ranks, tmp_path, monkeypatch):
    files, _, _, block, *_ = code("python", "docs/data.md")
    shown = {}
    exec(compile(files, "data.md", "exec"), shown)
    if ranks == 1:
        exec(compile(block, "data.md", "exec"), shown)
        assert shown["optimizer"].report().samples == 3 * 800
    else:
        end = "optimizer.close()\nprint(optimizer.report().samples)"
        told = run(f"{block}\n{end}\n", tmp_path, {})
        *workers, center = sorted(map(int, told.split()))
        assert sum(workers) == center >= 3 * 800  # passes until the progress of an epoch is made


@pytest.mark.framework("torch")
def test_the_guide_to_data_makes_indices_of_categories():
    (block,) = (one for one in code("python", "docs/data.md") if "Vocabulary.measured" in one)
    shown = {}
    exec(compile(block, "data.md", "exec"), shown)
    kinds = [kind.tolist() for (kind, _), _ in shown["batches"]]
    shown["batches"].close()
    assert sorted(kinds[0]) == [1, 1, 2, 3]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_python_block_runs_on_three_ranks(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(code("python")[NUMPY])
    done = mpiexec(3, program)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [f"epoch {n}" for n in range(5)]


@pytest.mark.mpi
@pytest.mark.slow
def test_the_numpy_example_trains():
    done = mpiexec(3, EXAMPLES / "fashion_numpy.py")
    assert done.returncode == 0, done.stderr
    accuracies = [float(value) for value in re.findall(r"test accuracy ([0-9.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert max(accuracies) > 0.7
