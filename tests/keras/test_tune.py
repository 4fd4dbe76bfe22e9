"""`nnlo tune` with Keras: alone in this process, then over blocks of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec
from tests.helpers.train_command import told, write_files

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
NET = """
import keras

def get_model(width=8):
    hidden = keras.layers.Dense(width, "relu")
    return keras.Sequential([keras.layers.Input((3,)), hidden, keras.layers.Dense(2)])

def get_space():
    return {"width": (2, 8), "optimizer": ["sgd", "adam"]}

def get_figure_of_merit(model):
    return sum(abs(weights).sum() for weights in model.get_weights())

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
WORDS = ["--model", "net.py", "--train", "a.h5", "b.h5", "--loss", "loss", "--batch", "10", "--epochs", "2"]
WORDS += ["--n-fold", "2", "--num-iterations", "2", "--hyper-opt", "random"]
# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.slow,
    pytest.mark.extended,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    Path("net.py").write_text(NET)


def test_trials_of_a_keras_model_train_again():
    assert main(["tune", *WORDS, "--objective", "val_loss", "--run", "s"]) == 0
    best = json.loads(Path("s/search.json").read_text())["best"]
    fold = Path("s/trials", best["folder"], "fold2")
    assert (fold / "model.keras").exists()
    assert main(["train", "--config", str(fold / "config.toml"), "--run", "again"]) == 0
    assert told("again") == told(fold)
    assert told(fold)["center"]["val_loss"][-1] == best["folds"][1]


@pytest.mark.mpi
def test_idle_blocks_go_on_with_the_last_trial():
    words = [*WORDS[:7], "--batch", "10", "--epochs", "5", "--objective", "loss", "--num-iterations", "1"]
    words += ["--block-size", "2", "--checkpoint", "s", "--elastic"]
    done = mpiexec(5, "-m", "nnlo_common", "tune", *words, timeout_s=150, framework="keras")
    assert done.returncode == 0, done.stderr
    (trial,) = json.loads(Path("s/search.json").read_text())["trials"]
    assert [block for block, _ in trial["helpers"]] == [1]
    assert [step for step, _ in trial["steps"]] == [*range(5)]
    assert len(json.loads(Path("s/trials/0000/run.json").read_text())["ranks"]) == 4


@pytest.mark.mpi
def test_blocks_search_by_a_function_of_the_keras_model():
    done = mpiexec(
        7,
        "-m",
        "nnlo_common",
        "tune",
        *WORDS,
        "--block-size",
        "3",
        "--run",
        "s",
        timeout_s=110,
        framework="keras",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(Path("s/search.json").read_text())
    assert found["objective"] == "figure of merit"
    assert [len(trial["folds"]) for trial in found["trials"]] == [2, 2]
    assert found["best"]["value"] == min(trial["value"] for trial in found["trials"]) > 0
