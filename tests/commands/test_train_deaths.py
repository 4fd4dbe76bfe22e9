"""`nnlo train` with spares or an heir, as real processes: a rank is killed, the run is whole."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.helpers.jobs import running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.train_command import started, told, write_files

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies"),
    pytest.mark.sampled(2),
]
EPOCHS = 5
FRAMEWORKS = [
    pytest.param("torch", marks=pytest.mark.framework("torch")),
    pytest.param("keras", marks=pytest.mark.framework("keras")),
]
LOSSES = {"torch": "cross_entropy", "keras": "sparse_categorical_crossentropy"}


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)


def trained(framework, ranks, dies, *words, at=()):
    """Train while a rank is killed; return what the command has said, and the roles of the ranks."""
    model = PROGRAMS / f"dying_{framework}_net.py"
    done = started(
        *("--model", str(model), "--model-params", f"dies={dies}", f"folder={Path('r').absolute()}", *at),
        *("--train", "a.h5", "b.h5", "--val", "val.h5", "--batch", "5", "--epochs", str(EPOCHS)),
        *("--loss", LOSSES[framework], "--metrics", "accuracy", "--mode", "downpour"),
        *("--learning-rate", "0.05", "--run", "r", "--checkpoint", *words),
        ranks=ranks,
        framework=framework,
        options=["--with-ft", "ulfm"],
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    center = told("r")["center"]
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert len(center[name]) == EPOCHS, center
        assert all(map(math.isfinite, center[name])), center
    assert len([*Path("r").glob("model.keras"), *Path("r").glob("weights.pt")]) == 1
    roles = {one["rank"]: one["role"] for one in json.loads(Path("r/run.json").read_text())["ranks"]}
    return done, roles


@pytest.mark.framework("torch")
def test_a_spare_trains_in_a_dead_workers_place():
    done, roles = trained("torch", 6, 2, "--spares", "2", at=["step=14"])  # in the second epoch
    assert roles == {0: "server 0", 1: "worker 0", 3: "worker 2", 4: "spare 0", 5: "worker 1"}
    assert re.search(
        r"nnlo: rank 5 on \S+ takes the place of worker 1 \(rank 2\) from epoch 3 on", done.stderr
    )
    (lost,) = [one["lost"] for one in json.loads(Path("r/run.json").read_text())["ranks"] if one["rank"] == 0]
    assert len(lost) == 2
    (placed,) = [one for one in told("r")["workers"] if one["rank"] == 5]
    assert math.isfinite(placed["history"]["loss"][-1])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_spare_serves_in_the_dead_servers_place(framework):
    done, roles = trained(framework, 5, 0, "--spares", "2")
    assert roles == {1: "worker 0", 2: "worker 1", 3: "server 0", 4: "spare 1"}
    assert re.search(r"rank 0 on \S+, the server, has died; rank 3 serves in its place", done.stderr)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_worker_serves_in_the_dead_servers_place(framework):
    done, roles = trained(framework, 4, 0, "--heir")
    assert roles == {1: "server 0", 2: "worker 1", 3: "worker 2"}
    assert re.search(r"rank 0 on \S+, the server, has died; rank 1 serves in its place", done.stderr)
