"""The job scripts of docs/clusters.md as they stand: signal, exit 75, requeue, nodes that fail, the end."""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter

import numpy as np
import pytest

from tests.helpers.paths import DOCS, PROGRAMS
from tests.helpers.slurm import page_script, slurm

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.framework("torch"),
    pytest.mark.timeout(600),
]
EPOCHS, SAMPLES = 3, 1200
# The slowest of these takes a minute where nothing else runs.
LIMIT_S = 400
NET = """
import os
import time

import torch


def get_model(width=4):
    if "SLURM_RESTART_COUNT" not in os.environ and os.environ.get("SLURM_ARRAY_TASK_ID") == "3":
        time.sleep(2)  # the search lasts until it gets the signal
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))


def get_space():
    return {"width": {"low": 2, "high": 9}}
"""
OPTIONS = """
model = "net.py"
train = "train.h5"
loss = "mse_loss"
batch = 10
epochs = 1
num_iterations = 4
"""


def used(home):
    """How often each sample was trained with."""
    return Counter(word for path in home.glob("used*") for word in path.read_text().split())


def await_that(met, limit_s=LIMIT_S):
    """Return once something is so, or fail after the limit."""
    end_s = time.monotonic() + limit_s
    while not met():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def prepare_search(home, names):
    """Leave a model, data and options in the home folder."""
    (home / "net.py").write_text(NET)
    for name in names:
        (home / name).write_text(OPTIONS)
    h5py = pytest.importorskip("h5py")
    with h5py.File(home / "train.h5", "w") as file:
        file["features"] = np.random.default_rng(1).normal(size=(120, 3)).astype("f4")
        file["labels"] = file["features"][:, :1]


def journal(home, name):
    """The finished trials of a search."""
    path = home / name / "journal.jsonl"
    return path.read_text().count('"state"') if path.exists() else 0


def test_a_training_saves_at_its_time_limit_and_goes_on_after_it(batch):
    shutil.copy(PROGRAMS / "batch_torch.py", batch.home / "train.py")
    job = batch.submit(page_script("training"), "--time=1", "--signal=USR1@50")
    ended = batch.wait(job, LIMIT_S)
    text = (batch.home / f"training-{job}.out").read_text()
    assert ended["JobState"] == "COMPLETED", text
    assert int(ended["Restarts"]) >= 1, text
    saved, killed = text.count("Exited with exit code 75"), text.count("User defined signal 1")
    assert saved >= 3, text
    # On a busy machine the signal may come to a later start, too, also when its training is over.
    assert saved + killed == 3 * int(ended["Restarts"]), text
    assert text.count("finished on 3 ranks") == 1 + killed // 3, text
    assert Counter(used(batch.home).values()) == {EPOCHS: SAMPLES}


def test_a_search(batch):
    pytest.importorskip("optuna")
    prepare_search(batch.home, ["search.toml"])
    job = batch.submit(page_script("search"))
    assert batch.wait(job, LIMIT_S)["JobState"] == "COMPLETED", batch.output()
    assert journal(batch.home, "search") == 4


def test_a_search_of_an_array_is_interrupted_and_only_this_one_is_put_back(batch):
    pytest.importorskip("optuna")
    prepare_search(batch.home, [f"search-{number}.toml" for number in (1, 2, 3)])
    job = batch.submit(page_script("searches"))
    await_that(lambda: journal(batch.home, "search-3") > 0)
    batch.call("scancel", "--signal=USR1", f"{job}_3")
    for number, restarts in ((1, "0"), (2, "0"), (3, "1")):
        ended = batch.wait(f"{job}_{number}", LIMIT_S)
        assert ended["JobState"] == "COMPLETED", batch.output()
        assert ended["Restarts"] == restarts, batch.output()
        assert journal(batch.home, f"search-{number}") == 4


def test_a_search_that_ends_with_its_job(batch):
    pytest.importorskip("optuna")
    prepare_search(batch.home, ["search.toml"])
    shutil.rmtree(batch.home / "search", ignore_errors=True)
    (line,) = re.findall(r"^export SLURM_JOB_END_TIME=.*\n", (DOCS / "clusters.md").read_text(), re.MULTILINE)
    script = page_script("search").replace("srun ", f"{line}srun ", 1)
    assert line in script
    job = batch.submit(script.replace("--run search", "--run search --until slurm"), "--time=20")
    assert batch.wait(job, LIMIT_S)["JobState"] == "COMPLETED", batch.output()
    assert journal(batch.home, "search") == 4


@pytest.mark.parametrize(
    ("node", "happens"), [(2, "kill"), (1, "kill"), (2, "cut")], ids=["killed", "first killed", "cut off"]
)
def test_a_training_goes_on_without_a_node_that_fails(tmp_path, node, happens):
    with slurm(tmp_path, silence_s=15) as own:
        shutil.copy(PROGRAMS / "batch_torch.py", own.home / "train.py")
        job = own.submit(page_script("training"), "--nodes=2")
        await_that(lambda: used(own.home))
        getattr(own.cluster, happens)(node)
        ended = own.wait(job, LIMIT_S)
        text = own.output()
        assert ended["JobState"] == "COMPLETED", text
        assert int(ended["Restarts"]) >= 1, text
        assert own.nodes[node - 1] not in ended["NodeList"], ended
        assert "finished on 2 ranks" in text
        times = used(own.home)  # no checkpoint was there yet, so the epoch began anew
        assert len(times) == SAMPLES
        assert min(times.values()) == EPOCHS


def test_a_training_of_mpiexec_goes_on_without_a_dead_worker_and_is_resumed_with_all(tmp_path):
    with slurm(tmp_path) as own:
        shutil.copy(PROGRAMS / "batch_torch.py", own.home / "train.py")
        job = own.submit(page_script("surviving"))
        await_that(lambda: used(own.home))
        own.cluster.rank(2).kill()
        await_that(lambda: "it has died. Workers left: 1" in own.output())
        own.call("scancel", "--batch", "--signal=USR1", job)
        ended = own.wait(job, LIMIT_S)
        text = own.output()
        assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), text
        assert "finished on 3 ranks" in text
        assert len(used(own.home)) == SAMPLES
        assert min(used(own.home).values()) == EPOCHS


def test_a_training_of_mpiexec_goes_on_without_a_node_that_fails(tmp_path):
    with slurm(tmp_path, silence_s=15) as own:
        shutil.copy(PROGRAMS / "batch_torch.py", own.home / "train.py")
        job = own.submit(page_script("surviving"), "--nodes=2")
        await_that(lambda: used(own.home))
        own.cluster.kill(2)
        ended = own.wait(job, LIMIT_S)
        text = own.output()
        assert ended["JobState"] == "COMPLETED", text
        assert int(ended["Restarts"]) >= 1, text
        assert "PRTE has lost communication with a remote daemon" in text
        assert "finished on 2 ranks" in text
        assert min(used(own.home).values()) == EPOCHS
