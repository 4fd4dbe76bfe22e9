"""Trainings and searches on three hosts that share one folder: they compute what they compute on one host."""

from __future__ import annotations

import ast
import json
import re
import signal
import time
from collections import Counter

import numpy as np
import pytest

from nnlo_common.base._signals import EXIT_CODE
from tests.helpers.hosts import hosts
from tests.helpers.jobs import running_mpi
from tests.helpers.paths import PROGRAMS

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.timeout(500),
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="started by PRRTE, the launcher of Open MPI"),
]
LIMIT_S = 180
NET = """
import torch

def get_model(width=4):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
"""


@pytest.fixture
def cluster(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    with hosts(3, shared) as cluster:
        yield cluster


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


def samples(text):
    """What each rank prints of its samples and of the centre, in any order."""
    return sorted(re.findall("samples .*", text))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("torch_hosts.py", marks=pytest.mark.framework("torch")),
        pytest.param("keras_hosts.py", marks=pytest.mark.framework("keras")),
    ],
)
def test_a_synchronous_training_equals_one_on_one_host_bit_for_bit_also_over_a_slow_link(cluster, program):
    found = []
    for places in ([3], [1, 1, 1], [1, 1, 1]):
        status, text = cluster.run(places, PROGRAMS / program, timeout_s=LIMIT_S)
        assert status == 0, text
        found.append(samples(text))
        cluster.slow(2, "100mbit")  # for the last
    here, there, slowly = found
    assert len(here) == 3
    assert there == here
    assert slowly == here


@pytest.mark.framework("torch")
def test_each_host_copies_each_file_once_and_all_samples_come(cluster, h5py):
    folder, lengths = cluster.shared, (11, 25, 40)
    first = np.cumsum([0, *lengths])
    for number, length in enumerate(lengths):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = np.ones((length, 1), "f4")
            file["y"] = first[number] + np.arange(length)
    status, text = cluster.run([3, 2, 2], PROGRAMS / "staged_hosts.py", str(folder), timeout_s=LIMIT_S)
    assert status == 0, text
    copies = Counter((folder / "copies").read_text().splitlines())
    assert copies == {f"{name} {number}.h5": 1 for name in cluster.names for number in range(3)}
    seen = Counter(one for line in samples(text) for one in ast.literal_eval(line.removeprefix("samples ")))
    assert seen == dict.fromkeys(range(first[-1]), 2)


@pytest.mark.framework("torch")
def test_a_training_is_resumed_on_other_hosts_from_the_shared_folder(cluster):
    folder = cluster.shared
    begin = f"import os, runpy; os.chdir({str(folder)!r}); "
    begin += f"runpy.run_path({str(PROGRAMS / 'batch_torch.py')!r}, run_name='__main__')"

    def used():
        return Counter(word for path in folder.glob("used*") for word in path.read_text().split())

    with cluster.running([1, 1, 1], "-c", begin) as job:
        end_s = time.monotonic() + LIMIT_S
        while not used():
            assert time.monotonic() < end_s, job.text()
            time.sleep(0.05)
        for rank in cluster.ranks():
            rank.send_signal(signal.SIGUSR1)
        assert job.wait(LIMIT_S) == EXIT_CODE, job.text()
    assert list(folder.glob("run/checkpoint-*/manifest.json"))
    options = {"SLURM_RESTART_COUNT": "1"}
    status, text = cluster.run([1, 2], "-c", begin, env=options, timeout_s=LIMIT_S)
    assert status == 0, text
    assert Counter(used().values()) == {3: 1200}


@pytest.mark.framework("torch")
def test_a_search_over_blocks_on_several_hosts(cluster, h5py):
    pytest.importorskip("optuna")
    folder = cluster.shared
    (folder / "net.py").write_text(NET)
    (folder / "space.toml").write_text("[width]\nlow = 2\nhigh = 9\n")
    with h5py.File(folder / "train.h5", "w") as file:
        file["features"] = np.random.default_rng(1).normal(size=(120, 3)).astype("f4")
        file["labels"] = file["features"][:, :1]
    words = f"--model {folder}/net.py --train {folder}/train.h5 --loss mse_loss --batch 10 --epochs 2"
    words += f" --space {folder}/space.toml --num-iterations 5 --block-size 2 --run {folder}/searched"
    status, text = cluster.run([1, 3, 3], "-m", "nnlo_common", "tune", *words.split(), timeout_s=LIMIT_S)
    assert status == 0, text
    trials = json.loads((folder / "searched" / "search.json").read_text())["trials"]
    assert [trial["state"] for trial in trials] == ["complete"] * 5
