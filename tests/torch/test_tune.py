"""`nnlo tune` with PyTorch: alone in this process, then over blocks of ranks, as users start it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.pages import code
from tests.helpers.train_command import ADAM, told, write_files

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

NET = """
import torch

def get_model(width=8, fault=False):
    if fault:
        raise ValueError("no such network")
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

def get_space():
    return {"width": (2, 8), "momentum": (0.0, 0.9)}
"""
WORDS = ["--model", "net.py", "--train", "a.h5", "b.h5", "--loss", "cross_entropy", "--metrics", "accuracy"]
WORDS += ["--batch", "10", "--epochs", "2", "--learning-rate", "0.1", "--hyper-opt", "random"]
pytestmark = pytest.mark.framework("torch")


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    Path("net.py").write_text(NET)


def tune(*words):
    return main(["tune", *WORDS, *words])


def searched(folder):
    return json.loads(Path(folder, "search.json").read_text())


def test_a_figure_after_the_last_epoch_cannot_prune(capsys):
    Path("net.py").write_text(f"{NET}\ndef get_figure_of_merit(model):\n    return 1.0\n")
    words = ["--prune", "median", "--val", "b.h5", "--num-iterations", "1", "--run"]
    assert tune(*words, "s") == 2
    said = (
        "--prune median compares trials after each epoch, but get_figure_of_merit() is called after the last"
    )
    assert said in (complaint := capsys.readouterr().err)
    assert "name a metric, e.g. --objective val_loss" in complaint
    assert not Path("s/trials").exists()
    assert tune(*words, "t", "--objective", "val_loss") == 0


@pytest.mark.parametrize("words", [[], ["--checkpoint", "1"]], ids=str)
def test_the_line_to_train_it_again_runs(capsys, words):
    assert (
        tune("--objective", "val_accuracy", "--val", "b.h5", "--run", "s", "--num-iterations", "2", *words)
        == 0
    )
    (line,) = re.findall(r"train it again: nnlo (.*), the only one", capsys.readouterr().out)
    assert main(line.split()) == 0


def test_trials_train_again_and_the_same_command_goes_on(capsys):
    words = ["--n-fold", "2", "--fold-labels", "labels", "--objective", "val_accuracy", "--run", "s"]
    words += ["--export", "dashboard.log"]
    assert tune(*words, "--num-iterations", "2") == 0
    before = searched("s")
    assert [len(trial["folds"]) for trial in before["trials"]] == [2, 2]
    assert before["trials"][0]["params"] == {"width": 8, "momentum": 0}  # what it is by default
    best = before["best"]
    assert best["value"] == max(trial["value"] for trial in before["trials"])
    assert best["value"] == pytest.approx(sum(best["folds"]) / 2)
    assert {path.parts[2] for path in Path("s/trials").rglob("weights.pt")} == {best["folder"]}
    home = Path("s/trials", best["folder"])
    assert main(["train", "--config", str(home / "fold2" / "config.toml"), "--run", "again"]) == 0
    assert told("again") == told(home / "fold2")
    assert 'fold_labels = "labels"' in (home / "fold2" / "config.toml").read_text()
    assert told("again")["center"]["val_accuracy"][-1] == best["folds"][1]
    assert main(["train", "--config", str(home / "config.toml"), "--run", "whole"]) == 0
    assert "val_loss" not in told("whole")["center"]

    assert tune(*words, "--num-iterations", "3") == 0
    after = searched("s")
    assert [trial["value"] for trial in after["trials"][:2]] == [trial["value"] for trial in before["trials"]]
    assert len(after["trials"]) == 3
    storage = JournalStorage(JournalFileBackend("dashboard.log"))
    exported = optuna.load_study(study_name="nnlo tune", storage=storage)
    assert [trial.value for trial in exported.trials] == [trial["value"] for trial in after["trials"]]
    assert "importances need at least 10 complete trials" in capsys.readouterr().out
    assert tune(*words, "--num-iterations", "3", "--momentum", "0") == 2
    assert "'momentum' is both searched and given" in capsys.readouterr().err
    assert tune(*words, "--batch", "20") == 2
    assert "only there is 'batch = 10'" in capsys.readouterr().err


def test_a_search_that_was_killed_goes_on_with_what_its_trials_had(capsys):
    words = ["--n-fold", "2", "--checkpoint", "--run", "s", "--num-iterations", "2"]
    assert tune(*words) == 0
    whole, journal = searched("s"), Path("s/journal.jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    (end,) = (at for at, line in enumerate(lines) if json.loads(line).get("trial") == 1 and '"state"' in line)
    journal.write_text("".join(lines[:end]))  # as if killed in the second fold of the second trial
    shutil.rmtree("s/trials/0001/fold2")
    marked = Path("s/trials/0001/fold1/value.json")
    marked.write_text('{"value": 7}')
    assert tune(*words) == 0
    assert searched("s")["trials"][1]["folds"] == [7, whole["trials"][1]["folds"][1]]
    assert "trial 1" in capsys.readouterr().out


def test_what_was_interrupted_goes_on_once_and_equal_trials_are_trained():
    Path("space.toml").write_text("batch = [10]\n")
    words = ["--space", "space.toml", "--objective", "loss", "--checkpoint", "--run", "s"]
    words = ["tune", *WORDS[: WORDS.index("--batch")], "--hyper-opt", "random", *words, "--num-iterations"]
    assert main([*words, "1"]) == 0
    journal = Path("s/journal.jsonl")
    kept = [line for line in journal.read_text().splitlines(keepends=True) if '"state"' not in line]
    journal.write_text("".join(kept))  # as if killed at the end of the trial
    assert main([*words, "3"]) == 0
    trials = searched("s")["trials"]
    assert [trial["folder"] for trial in trials] == ["0000", "0001", "0002"]
    assert len({trial["value"] for trial in trials}) == 3, "each has its own seed"
    best = min(trials, key=lambda trial: trial["value"])
    assert [path.parts[2] for path in Path("s/trials").rglob("weights.pt")] == [best["folder"]]


def test_a_trial_that_fails_costs_nothing_else(capsys):
    Path("space.toml").write_text("fault = [false, true]\n")
    words = ["--space", "space.toml", "--run", "s", "--num-iterations", "6", "--objective", "loss"]
    assert tune(*words) == 0
    states = {trial["params"]["fault"]: trial["state"] for trial in searched("s")["trials"]}
    assert states == {False: "complete", True: "failed"}
    assert re.search(r"trial \d  failed: ConfigurationError: .*no such network", capsys.readouterr().out)
    Path("space.toml").write_text("fault = [true, false]\n")
    assert tune(*words[:2], "--objective", "loss", "--num-iterations", "1") == 2
    assert "no such network" in capsys.readouterr().err


def test_the_files_in_the_guide_are_searched(capsys):
    Path("net.py").write_text("\n".join(code("python", "docs/searches.md", "Without a script")))
    words = ["--model", "net.py", "--train", "a.h5", "--loss", "cross_entropy", "--num-iterations", "2"]
    assert main(["tune", *words, "--run", "s"]) == 0
    found = searched("s")
    assert found["objective"] == "figure of merit"
    assert found["best"]["value"] > 0
    (table,) = code("toml", "docs/searches.md", "Without a script")
    Path("space.toml").write_text(table)
    assert main(["tune", *words, "--space", "space.toml", "--objective", "loss", "--run", "t"]) == 0
    assert searched("t")["best"]["params"].keys() == {"learning_rate", "batch"}
    assert "report: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--objective", "val_accuracy"], "the metrics are loss, accuracy (val_ needs --val or --n-fold)"),
        (["--labels-name", "three"], "do not fit"),
        (["--metrics", "accuracyy"], "did you mean 'accuracy'?"),
    ],
)
def test_what_no_training_has_is_refused_before_the_first(words, expected, capsys):
    assert tune(*words) == 2
    assert expected in capsys.readouterr().err
    assert not Path("runs").exists()


def started(ranks, *words, timeout_s=60):
    return mpiexec(ranks, "-m", "nnlo_common", "tune", *WORDS, *words, timeout_s=timeout_s, framework="torch")


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("layout", "told_of"),
    [
        (["--group-size", "2"], "2 blocks of 1 serving and 2 training in groups of 2"),
        (["--servers", "0"], "2 blocks of 3 together"),
    ],
)
def test_trials_train_in_groups(layout, told_of):
    words = ["--block-size", "3", "--num-iterations", "3", "--prune", "median", "--run", "s", *layout]
    done = started(7, *words)
    assert done.returncode == 0, done.stderr
    assert told_of in done.stdout
    found = searched("s")
    assert found["blocks"] == [[1, 2, 3], [4, 5, 6]]
    assert {trial["state"] for trial in found["trials"]} <= {"complete", "pruned"}
    assert found["trials"][0]["state"] == "complete"


@pytest.mark.extended
@pytest.mark.mpi
def test_five_ranks_search_in_two_folds_side_by_side():
    done = started(5, "--n-fold", "2", "--num-iterations", "3", "--prune", "median", "--run", "s")
    assert done.returncode == 0, done.stderr
    assert "1 coordinator, 1 block of 2 folds, each 1 serving and 1 training" in done.stdout
    assert len(re.findall(r"^nnlo tune: trial \d  val_loss", done.stdout, re.MULTILINE)) == 3
    found = searched("s")
    assert found["blocks"] == [[1, 2, 3, 4]]
    assert {trial["state"] for trial in found["trials"]} == {"complete"}
    assert len(found["trials"][0]["steps"]) == 2
    ranks = json.loads(Path("s/trials/0000/fold2/run.json").read_text())["ranks"]
    assert [one["role"] for one in ranks] == ["server 0", "worker 0"]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_layouts_are_refused_once_and_blocks_share_the_trials():
    done = started(6, "--block-size", "3")
    assert done.returncode == 2
    assert done.stderr.count("nnlo tune: 6 ranks cannot be cut into blocks: 6 - 1 coordinator = 5 ranks") == 1
    Path("space.toml").write_text("width = [2, 4, 8]\n")
    words = ["--space", "space.toml", "--block-size", "3", "--n-fold", "2", "--num-iterations", "6"]
    done = started(7, *ADAM[:2], *words, "--run", "s", timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert {trial["block"] for trial in searched("s")["trials"]} == {0, 1}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(500)
def test_search_ranks_choose_and_a_search_in_lock_step_repeats():
    words = ["--hyper-opt", "tpe", "--num-iterations", "13"]
    done = started(5, *words, "--block-size", "2", "--search-ranks", "2", "--run", "s", timeout_s=150)
    assert done.returncode == 0, done.stderr
    assert "1 coordinator, 2 choosing, 1 block of 1 serving and 1 training" in done.stdout
    assert {trial["state"] for trial in searched("s")["trials"]} == {"complete"}
    found = []
    for name in ("once", "again"):
        done = started(3, *words, "--block-size", "1", "--lockstep", "--run", name, timeout_s=150)
        assert done.returncode == 0, done.stderr
        found.append([(trial["params"], trial["value"]) for trial in searched(name)["trials"]])
    assert found[0] == found[1]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize(("size", "folds"), [(5, 1), (7, 3)])
def test_idle_blocks_go_on_with_the_last_trial(size, folds):
    words = ["--num-iterations", "1", "--block-size", "2", "--objective", "loss", "--checkpoint", "s"]
    done = started(size, *words, "--elastic", "--epochs", "5", "--n-fold", str(folds), timeout_s=150)
    assert done.returncode == 0, done.stderr
    (trial,) = searched("s")["trials"]
    assert trial["state"] == "complete"
    assert [block for block, _ in trial["helpers"]] == [*range(1, (size - 1) // 2)]
    homes = [Path("s/trials/0000")] if folds == 1 else [*Path("s/trials/0000").glob("fold*")]
    assert [len(told(home)["center"]["loss"]) for home in homes] == [5] * folds
    if folds == 1:
        assert len(json.loads((homes[0] / "run.json").read_text())["ranks"]) == 4


DYING = """
import os, pathlib, signal, threading, time

def kill():
    while not pathlib.Path("s/trials/0003.json").exists():
        time.sleep(1e-3)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    threading.Thread(target=kill, daemon=True).start()
"""


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.mpi
def test_a_spare_writes_the_result_when_the_first_rank_is_killed():
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    Path("net.py").write_text(NET + DYING)
    words = [*WORDS, "--objective", "loss", "--num-iterations", "8", "--block-size", "1", "--spares", "1"]
    command = ["-m", "nnlo_common", "tune", *words, "--run", "s"]
    done = mpiexec(4, *command, timeout_s=180, options=["--with-ft", "ulfm"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nnlo tune: the first rank has died; rank 3 takes over") == 1
    assert done.stdout.count("nnlo tune: best of 8 trials is") == 1
    assert [trial["state"] for trial in searched("s")["trials"]] == ["complete"] * 8
    assert Path("s/report.html").exists()
    assert len([*Path("s/trials").glob("*.json")]) == 8
