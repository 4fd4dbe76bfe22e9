"""Our callbacks under mpiexec, on one server and two workers."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

PROGRAM = PROGRAMS / "keras_callbacks.py"

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # TensorFlow takes its time to start
]
pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")


def backend(name, *marks):
    missing = importlib.util.find_spec(name) is None
    return pytest.param(name, marks=[*marks, pytest.mark.skipif(missing, reason=f"{name} is not installed")])


BACKENDS = [
    backend("torch"),
    backend("tensorflow", pytest.mark.extended),
]


def saved(folder):
    """The epochs that the checkpoints in a folder are of."""
    manifests = sorted(folder.glob("checkpoint-*/manifest.json"))
    return [json.loads(path.read_text())["facts"]["epoch"] for path in manifests]


@pytest.fixture(scope="module", params=BACKENDS)
def trainings(request, tmp_path_factory):
    """What each training has left behind, by piece and rank, and the folder it wrote to.

    The first job is killed in the middle of its first training; the same command is then given once more.
    """
    env = {"KERAS_BACKEND": request.param, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def run(folder):
        killed = mpiexec(3, PROGRAM, str(folder), "2", timeout_s=150, env=env)
        assert killed.returncode != 0
        assert not list(folder.glob("rank*.json"))
        assert saved(folder / "here") == [1, 2]
        done = mpiexec(3, PROGRAM, str(folder), timeout_s=250, env=env)
        assert done.returncode == 0, done.stdout + done.stderr

    folder = written_once(tmp_path_factory, f"callbacks-{request.param}", run)
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]
    return {piece: [rank[piece] for rank in ranks] for piece in ranks[0]}, folder


def test_all_ranks_end_with_the_same_weights(trainings):
    for piece, ranks in trainings[0].items():
        assert [rank["role"] for rank in ranks] == ["server 0", "worker 0", "worker 1"]
        assert len({rank["weights"] for rank in ranks}) == 1, piece


def test_a_killed_training_goes_on_on_all_ranks_as_if_it_had_not_been_killed(trainings):
    pieces, folder = trainings
    for again, whole in zip(pieces["checkpoint"], pieces["uninterrupted"], strict=True):
        assert (again["epochs"], whole["epochs"]) == ([2, 3], [0, 1, 2, 3])
        assert again["weights"] == whole["weights"]
        assert again["history"] == whole["history"]
    assert pieces["checkpoint"][0]["optimizer"] == pieces["uninterrupted"][0]["optimizer"]
    assert saved(folder / "workers") == [2, 3]


def test_a_complete_training_returns_at_once(trainings):
    for rank, before in zip(trainings[0]["checkpoint, complete"], trainings[0]["checkpoint"], strict=True):
        assert rank["epochs"] == []
        assert rank["weights"] == before["weights"]


@pytest.mark.parametrize("piece", ["means", "means behind"])
def test_all_ranks_see_the_means_over_the_workers(trainings, piece):
    server, *workers = trainings[0][piece]
    assert set(server["history"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    for worker in workers:
        assert worker["history"] == {name: server["history"][name] for name in ("loss", "accuracy")}
        assert worker["seen"][0]["loss"] == worker["history"]["loss"][0]


def test_the_means_are_weighted_by_samples(trainings):
    _, first, second = trainings[0]["means"]
    for epoch, (a, b) in enumerate(zip(first["own"], second["own"], strict=True)):
        mean = (64 * a["loss"] + 36 * b["loss"]) / 100
        assert first["history"]["loss"][epoch] == pytest.approx(mean, rel=1e-12)


def test_who_stops_earlier_keeps_nobody_waiting(trainings):
    server, first, second = trainings[0]["means, a worker stops"]
    assert [len(rank["epochs"]) for rank in (server, first, second)] == [3, 3, 2]
    assert server["history"]["loss"] == first["history"]["loss"]
    assert server["history"]["loss"][:2] == second["history"]["loss"]
    server, *workers = trainings[0]["means, the server stops"]
    assert len(server["epochs"]) == 2
    for worker in workers:
        assert worker["history"]["loss"][:2] == server["history"]["loss"]


@pytest.mark.parametrize("piece", ["broadcast", "broadcast to workers"])
def test_all_ranks_start_with_everything_that_the_first_has(trainings, piece):
    ranks = trainings[0][piece]
    assert len({rank["start"] for rank in ranks}) == 1
    assert len({rank["frozen"] for rank in ranks}) == 1
    assert ranks[0]["start"] != trainings[0]["means"][0]["start"]


@pytest.mark.parametrize("piece", ["warm-up", "warm-up on workers"])
def test_each_worker_warms_up_by_its_own_batches(trainings, piece):
    server, *workers = trainings[0][piece]
    for worker in workers:
        want = [0.1 * (0.2 + 0.8 * min(1, i / 7.5)) for i in range(15)]
        assert worker["rates"] == pytest.approx(want, rel=1e-6)
    assert server["rate"] == pytest.approx(0.1)
    if piece == "warm-up":  # where the centre's optimizer runs, what it has been told
        assert server["rates"][1] == pytest.approx(0.1 * (0.2 + 0.8 * 4 / 7.5))


def test_other_callbacks_take_over_behind_the_warm_up(trainings):
    for worker in trainings[0]["warm-up, scheduler"][1:]:
        assert worker["rates"][5:] == pytest.approx([*5 * [0.05], *5 * [0.025]])
    # The centre's rate is reduced there, and no worker overrules it.
    assert trainings[0]["warm-up, plateau"][0]["rate"] == pytest.approx(1e-4)


def facts_of(folder, what="epoch"):
    return [
        [
            line
            for line in map(json.loads, (folder / f"ranks/facts.rank{rank}.jsonl").read_text().splitlines())
            if line["what"] == what
        ]
        for rank in range(3)
    ]


def test_each_rank_writes_its_facts(trainings):
    server, *workers = facts_of(trainings[1] / "facts")
    assert [line["epoch"] for line in server] == [0, 1, 2]
    assert sum(line["batches"] for line in server) == server[-1]["exchanges"] == 33
    assert {"mean_staleness", "batches_per_second"} <= server[-1].keys()
    assert [sum(counts.values()) for counts in server[-1]["staleness"].values()] == [21, 12]
    assert all(line["spent"]["apply"] > 0 and line["spent"]["validate"] > 0 for line in server)
    for worker, batches, samples in zip(workers, (7, 4), (64, 36), strict=True):
        assert [(line["batches"], line["samples"]) for line in worker] == 3 * [(batches, samples)]
        assert all(min(line["spent"]["compute"], line["spent"]["wait"]) > 0 for line in worker)
    assert [[line["over"] for line in lines] for lines in facts_of(trainings[1] / "facts", "end")] == [
        [True]
    ] * 3
    behind = facts_of(trainings[1] / "behind")
    counts = [[line["batches"] for line in lines] for lines in behind]
    # A server counts as far as it knows when its epoch ends: a worker may be in the next one by then.
    assert (sum(counts[0]), counts[1:]) == (30, [[5] * 3, [5] * 3])
