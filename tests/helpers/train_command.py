"""What tests of `nnlo train` share: files to train on, and ways to start it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec

__all__ = [
    "ADAM",
    "SCHEDULES",
    "check_another_data_set",
    "check_early_stopping",
    "check_early_stopping_on_three_ranks",
    "check_schedule",
    "check_tree",
    "refused",
    "started",
    "told",
    "train",
    "write_files",
]

ADAM = ["--optimizer", "adam", "--learning-rate", "0.02"]


def write_files(tmp_path, monkeypatch):
    """Two files to train on and one to validate with, of what a small network learns."""
    h5py = pytest.importorskip("h5py", reason="the files are HDF5")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    draw = np.random.default_rng(0)
    for name, samples in [("a", 80), ("b", 60), ("val", 40)]:
        x = draw.standard_normal((samples, 3)).astype("f4")
        kind = (x.sum(axis=1) > 0).astype("i4")
        with h5py.File(f"{name}.h5", "w") as file:
            file["features"], file["labels"] = x, kind
            file["one_hot"] = np.eye(2, dtype="f4")[kind]
            file["three"] = np.zeros((samples, 3), "f4")


def train(*words, data=("--train", "a.h5", "b.h5", "--val", "val.h5")):
    return main(["train", *data, "--batch", "10", *words])


def told(folder):
    return json.loads(Path(folder, "history.json").read_text())


def refused(capsys, *words):
    assert train(*words) == 2
    said = capsys.readouterr()
    assert said.err.startswith("nnlo train: ")
    assert len(said.err.splitlines()) <= 20
    assert not Path("runs").exists()
    return said.err


def started(*words, ranks=3, **options):
    return mpiexec(ranks, "-m", "nnlo_common", "train", *words, **options)


def check_another_data_set(net, framework):
    """Files that have got more samples are refused on another number of workers."""
    import h5py

    words = [*net, "--train", "a.h5", "b.h5", "--batch", "10", "--mode", "downpour", "--run", "r"]
    words += ["--checkpoint", *ADAM]
    done = started(*words, "--epochs", "1", ranks=3, framework=framework)
    assert done.returncode == 0, done.stderr
    with h5py.File("a.h5") as file:
        columns = {name: np.concatenate([file[name][:], file[name][:5]]) for name in file}
    with h5py.File("a.h5", "w") as file:
        file.update(columns)
    done = started(*words, "--epochs", "2", ranks=2, framework=framework)
    assert done.returncode != 0
    told_of = (
        "belongs to another training: its data set has 140 samples, but this one has 145; choose another"
    )
    assert done.stderr.count(told_of) == 1
    assert "Traceback" not in done.stderr


def check_early_stopping_on_three_ranks(net, framework):
    """Three ranks stop early together, refuse to go on unasked, and go on if asked."""
    words = [
        *net,
        "--train",
        "a.h5",
        "b.h5",
        "--val",
        "val.h5",
        "--batch",
        "35",
        "--run",
        "r",
        "--checkpoint",
    ]
    words += ["--optimizer", "adam", "--learning-rate", "0.4", "--mode", "synchronous"]
    stopped = started(*words, "--epochs", "9", "--early-stopping", "1", framework=framework)
    assert stopped.returncode == 0, stopped.stderr
    done = len(told("r")["center"]["val_loss"])
    assert done < 9
    assert stopped.stdout.count(f"nnlo train: ended after epoch {done} of 9: val_loss has not fallen") == 1
    assert stopped.stdout.count(f"nnlo train: kept the weights of epoch {done - 1}, ") == 1
    refusal = started(*words, "--epochs", "9", "--early-stopping", "1", framework=framework)
    assert refusal.returncode == 2
    assert refusal.stderr.count(f"which ended after epoch {done} of 9") == 1
    on = started(*words, "--epochs", "9", framework=framework)
    assert on.returncode == 0, on.stderr
    assert len(told("r")["center"]["val_loss"]) == 9


def check_tree(net, framework):
    """Five ranks train in a tree of two sub-servers, and go on in it; its options are kept."""
    words = [*net, *ADAM, "--train", "a.h5", "b.h5", "--val", "val.h5", "--batch", "10", "--mode", "easgd"]
    words += ["--every", "2", "--sub-servers", "2", "--sub-every", "3", "--run", "r", "--checkpoint"]
    for epochs in ("2", "4"):
        done = started(*words, "--epochs", epochs, ranks=5, framework=framework)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("--sub-every 3 --sub-servers 2, 1 + 2 serving, 2 training") == 1
    found = told("r")
    assert [one["role"] for one in found["workers"]] == ["worker 0", "worker 1"]
    losses = found["center"]["val_loss"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    ranks = json.loads(Path("r/run.json").read_text())["ranks"]
    roles = [one["role"] for one in ranks]
    assert roles == ["server 0", "sub-server 0", "worker 0", "sub-server 1", "worker 1"]
    config = Path("r/config.toml").read_text()
    assert "sub_servers = 2\nsub_every = 3\n" in config or "sub_every = 3\nsub_servers = 2\n" in config


#: For each schedule its words and the rates of five epochs that begin at 0.5; None: as the metric has it.
SCHEDULES = {
    "cosine": ("--schedule cosine", [0.25 * (1 + math.cos(math.pi * epoch / 5)) for epoch in range(5)]),
    "step": ("--schedule step --decay 0.3 --decay-every 2", [0.5, 0.5, 0.15, 0.15, 0.045]),
    "exponential": ("--schedule exponential", [0.5 * 0.9**epoch for epoch in range(5)]),
    "linear": ("--schedule linear", [0.5 * (1 - epoch / 5) for epoch in range(5)]),
    "polynomial": ("--schedule polynomial", [0.5 * (1 - epoch / 5) ** 2 for epoch in range(5)]),
    "inverse": ("--schedule inverse --decay 0.8", [0.5 / (1 + epoch / 4) for epoch in range(5)]),
    "plateau": (
        "--batch 5 --schedule plateau --decay 0.2 --decay-every 1 --early-stopping-metric val_accuracy",
        None,
    ),
    "warm-up": ("--warm-up 2 --schedule exponential --decay 0.7", [None, None, 0.5, 0.35, 0.245]),
}


def check_schedule(net, words, rates, weights_of):
    """The rate of each epoch is that of the formula, also if a training is resumed in between."""
    begin = [*net, "--learning-rate", "0.5", "--batch", "35", *words.split()]
    assert train(*begin, "--epochs", "5", "--run", "whole") == 0
    center = told("whole")["center"]
    if rates is None:
        rates, rate, best, waited = [], 0.5, -1.0, 0
        for accuracy in center["val_accuracy"]:
            rates.append(rate)
            best, waited = (accuracy, 0) if accuracy > best else (best, waited + 1)
            rate, waited = (rate * 0.2, 0) if waited == 1 else (rate, waited)
        assert rates[-1] < 0.5, "or this test shows nothing"
    for is_, should in zip(center["learning_rate"], rates, strict=True):
        assert should is None or is_ == pytest.approx(should, rel=1e-6)
    if not any(name in words for name in ("cosine", "linear", "polynomial")):  # those know all epochs
        assert (
            train(*begin, "--epochs", "1" if "--warm" not in words else "3", "--run", "r", "--checkpoint")
            == 0
        )
        assert train(*begin, "--epochs", "5", "--run", "r", "--checkpoint") == 0
        assert (told("r")["center"], weights_of("r")) == (center, weights_of("whole"))


def check_early_stopping(net, weights_of, capsys):
    """A run that stopped early says why, has the best weights, and goes on as if it had not stopped."""
    words = [*net, "--optimizer", "adam", "--learning-rate", "0.3", "--seed", "3", "--batch", "35"]
    by = ["--early-stopping-metric", "val_loss"]
    assert train(*words, "--epochs", "9", "--early-stopping", "5", *by, "--run", "whole") == 0
    whole = told("whole")
    losses = whole["center"]["val_loss"]
    saved = ["--run", "r", "--checkpoint", "2"]
    capsys.readouterr()
    assert train(*words, "--epochs", "9", "--early-stopping", "1", *by, *saved) == 0
    said, stopped = capsys.readouterr().out, told("r")["center"]["val_loss"]
    ended, best = len(stopped), stopped.index(min(stopped)) + 1
    assert 1 < ended < len(losses), "or this test shows nothing"
    assert best == ended - 1
    assert f"nnlo train: ended after epoch {ended} of 9: val_loss has not fallen below " in said
    assert f"of epoch {best}, in 1 epoch (--early-stopping 1)\n" in said
    assert f"nnlo train: kept the weights of epoch {best}, whose val_loss is the best: " in said
    assert train(*words, "--epochs", str(best), "--run", "best") == 0
    assert weights_of("r") == weights_of("best")

    for raised in ("9", "12"):
        assert train(*words, "--epochs", raised, "--early-stopping", "1", *by, *saved) == 2
        refusal = capsys.readouterr().err
        assert f"which ended after epoch {ended} of 9: val_loss has not fallen below" in refusal
        assert "give more than --early-stopping 1, or leave it out" in refusal
    assert told("r")["center"]["val_loss"] == stopped, "a refusal changes nothing"

    assert train(*words, "--epochs", "9", "--early-stopping", "5", *by, *saved) == 0
    assert told("r") == whole
    assert weights_of("r") == weights_of("whole")
    if len(losses) == 9:
        return
    Path("r/history.json").unlink()  # as if killed after the last epoch
    assert train(*words, "--epochs", "9", "--early-stopping", "5", *by, *saved) == 0
    assert (told("r"), weights_of("r")) == (whole, weights_of("whole"))
