"""Trainings and searches that srun starts on three nodes: they compute what mpiexec's compute."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.helpers.paths import PROGRAMS

pytestmark = [pytest.mark.mpi, pytest.mark.extended, pytest.mark.timeout(400)]
SPREAD = ("--mpi=pmix", "--nodes=3", "--ntasks=3")


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("torch_hosts.py", marks=pytest.mark.framework("torch")),
        pytest.param("keras_hosts.py", marks=pytest.mark.framework("keras")),
    ],
)
def test_a_synchronous_training_equals_one_of_mpiexec_on_one_host_bit_for_bit(batch, program):
    printed = {}
    for started in ("mpiexec", "srun"):
        each = batch.home / f"{program}-{started}"  # a file for each rank, for their lines may mix
        each.mkdir()
        if started == "mpiexec":
            separately = ["--output", f"dir={each}"]
            status, text = batch.cluster.run([3], PROGRAMS / program, options=separately, timeout_s=180)
        else:
            separately = ["--output", each / "%t"]
            status, text = batch.srun(*SPREAD, *separately, "python", PROGRAMS / program, timeout_s=180)
        assert status == 0, text
        files = [path.read_text() for path in each.rglob("*") if path.is_file()]
        printed[started] = sorted(re.findall("samples .*", "\n".join(files)))
    assert len(printed["srun"]) == 3
    assert printed["srun"] == printed["mpiexec"]


def test_doctor_sees_three_nodes_and_srun(batch):
    status, text = batch.srun("--mpi=pmix", "--nodes=3", "--ntasks=6", "nnlo", "doctor")
    assert status == 0, text
    assert "6 ranks on 3 hosts" in text
    assert "6 processes, started by srun; MPI knows them all" in text
    for name in batch.nodes:
        assert len(re.findall(rf"^ +\d+ +{name} ", text, re.MULTILINE)) >= 2, text


def test_without_pmix_each_rank_is_alone_and_is_refused(batch):
    status, text = batch.srun("--mpi=none", "--nodes=3", "--ntasks=3", "python", PROGRAMS / "numpy_hosts.py")
    assert status != 0
    assert "--mpi=pmix" in text, text


@pytest.fixture
def given(batch):
    """A network of PyTorch, and a file to train it with, in the home folder."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(batch.home / "train.h5", "w") as file:
        file["features"] = np.random.default_rng(1).normal(size=(120, 3)).astype("f4")
        file["labels"] = file["features"][:, :1]
    model = "import torch\n\ndef get_model(width=4):\n"
    model += "    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))\n"
    (batch.home / "net.py").write_text(model)
    words = [
        "--model",
        "net.py",
        "--train",
        "train.h5",
        "--loss",
        "mse_loss",
        "--batch",
        "10",
        "--epochs",
        "2",
    ]
    return [batch.home, *words, "--epochs", "2"]


@pytest.mark.framework("torch")
def test_nnlo_train(batch, given):
    home, *words = given
    status, text = batch.srun(*SPREAD, f"--chdir={home}", "nnlo", "train", *words, "--run", "trained")
    assert status == 0, text
    facts = json.loads((home / "trained" / "run.json").read_text())
    assert sorted(rank["host"] for rank in facts["ranks"]) == batch.nodes


@pytest.mark.framework("torch")
def test_nnlo_tune(batch, given):
    pytest.importorskip("optuna")
    home, *words = given
    (home / "space.toml").write_text("[width]\nlow = 2\nhigh = 9\n")
    search = ["--space", "space.toml", "--num-iterations", "4", "--block-size", "2", "--run", "searched"]
    spread = ("--mpi=pmix", "--nodes=3", "--ntasks=5", f"--chdir={home}")
    status, text = batch.srun(*spread, "nnlo", "tune", *words, *search)
    assert status == 0, text
    trials = json.loads((home / "searched" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 4
