"""What tests of `nnlo train` share: files to train on, and ways to start it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec

__all__ = ["ADAM", "refused", "started", "told", "train", "write_files"]

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
