"""The commands beside those of NNLO in docs/coming_from.md run, on one process and on three ranks."""

from __future__ import annotations

import json
import re
import shlex

import numpy as np
import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import DOCS, EXAMPLES

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")

pytestmark = [pytest.mark.slow, pytest.mark.extended, pytest.mark.timeout(600)]
SECTION = "### Its commands and examples, one by one"
#: What makes a search short, and fit on three ranks.
SHORT = {"--epochs": "1", "--num-iterations": "2", "--block-size": "2"}
MODES = ["", "--mode easgd", "--mode gem --momentum 0.9"]


def commands_of(text):
    """The whole commands of the middle column."""
    rows = (row.split(" | ") for row in text.partition(SECTION)[2].splitlines() if row.startswith("| "))
    found = [re.findall(r"`mpiexec -n \d+ (nnlo [^`]+)`", row[1]) for row in rows]
    return [command for row in found for command in row if "..." not in command]


COMMANDS = commands_of((DOCS / "coming_from.md").read_text())
STARTS = [("train", mode) for mode in MODES] + [("tune", command) for command in COMMANDS[1:]]


def test_the_page_has_one_training_and_searches():
    assert [shlex.split(command)[1] for command in COMMANDS] == ["train", "tune", "tune"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the page says to make first, and the examples."""
    path = tmp_path_factory.mktemp("checkout")
    (path / "examples").symlink_to(EXAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for script, made in (("toy_images.py", "toy"), ("fashion_files.py", "fashion")):
            done = alone(f"examples/{script}", made, timeout_s=100)
            assert done.returncode == 0, done.stderr
    return path


@pytest.mark.framework("torch")
@pytest.mark.framework("keras")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
@pytest.mark.parametrize(("kind", "words"), STARTS)
def test_a_command_runs_as_the_page_says(folder, kind, words, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    arguments = shlex.split(f"{COMMANDS[0]} {words}" if kind == "train" else words)[1:]
    given = dict(zip(arguments[1::2], arguments[2::2], strict=True)) | SHORT
    if kind == "train":
        given = {
            name: value for name, value in given.items() if name not in ("--num-iterations", "--block-size")
        }
    options = [word for pair in given.items() for word in pair]
    start = ["-m", "nnlo_common", kind, *options, "--run", str(tmp_path / "run")]
    env = {"KERAS_BACKEND": "torch"}
    done = (
        alone(*start, timeout_s=250, env=env)
        if ranks == 1
        else mpiexec(ranks, *start, timeout_s=250, env=env)
    )
    assert done.returncode == 0, done.stderr
    result = {"train": "model.keras", "tune": "search.json"}[kind]
    assert (tmp_path / "run" / result).stat().st_size > 0


OWN = """
import torch

def get_name():
    return "mine"

def get_train():
    return ["0.h5", "1.h5"]

def get_space():
    return {"width": (4, 16)}

def get_model(width=8):
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
"""


@pytest.mark.framework("torch")
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi)])
def test_a_search_of_a_model_with_its_own_lists_runs_with_the_same_options(ranks, tmp_path, monkeypatch):
    text = (DOCS / "coming_from.md").read_text()
    (options, added) = re.search(
        r"^\| `mpirun -np 13 python3 OptimizationDriver.py (--model m.py .*?)` "
        r"\| `mpiexec -n 13 nnlo tune` with the same options and `(.*?)`",
        text,
        re.MULTILINE,
    ).groups()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(OWN)
    draw = np.random.default_rng(0)
    for number in range(2):
        x = draw.standard_normal((60, 6)).astype("f4")
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["features"], file["labels"] = x, (x.sum(axis=1) > 0).astype("i8")
    words = shlex.split(f"{options} {added}")
    given = dict(zip(words[::2], words[1::2], strict=True)) | SHORT
    start = ["-m", "nnlo_common", "tune", *(word for pair in given.items() for word in pair), "--run", "run"]
    done = alone(*start, timeout_s=250) if ranks == 1 else mpiexec(ranks, *start, timeout_s=250)
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "run" / "search.json").read_text())["trials"]) == 2
    assert (tmp_path / "run" / "report.html").stat().st_size > 0
