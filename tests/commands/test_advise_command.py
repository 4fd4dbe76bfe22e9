"""`nnlo advise`: the options of `nnlo train`, a page, and one sentence for what cannot be tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nnlo_common.commands._cli import main
from nnlo_common.simulation import _advice
from tests.helpers.jobs import mpiexec
from tests.helpers.train_command import write_files

NET = """
import torch

def get_model():
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def lost(output, labels):
    return float("nan") * output.sum()
"""


#: The largest numbers of ranks take seconds.
FEW = (1, 2, 4)
COMMAND = f"""
import sys
from nnlo_common.commands._cli import main
from nnlo_common.simulation import _advice

_advice.WORKERS = {FEW}
_advice.RANKS = {FEW[-2:]}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    Path("net.py").write_text(NET)
    monkeypatch.setattr(_advice, "WORKERS", FEW)
    monkeypatch.setattr(_advice, "RANKS", FEW[-2:])


def advise(*words):
    return main(["advise", "--model", "net.py", "--train", "a.h5", "b.h5", "--batch", "10", *words])


@pytest.mark.framework("torch")
def test_it_prints_advice_and_writes_a_page(capsys):
    assert advise("--loss", "cross_entropy", "--seconds", "1", "--link", "2,12.5") == 0
    said = capsys.readouterr().out
    for heading in _advice.SECTIONS:
        assert f"\n{heading}\n" in said
    assert "nnlo advise: advice/advice.html" in said
    data = json.loads(Path("advice/advice.json").read_text())
    assert (data["batch"], data["parameters"]) == (10, 50)
    assert "The time of validation: there are no samples" in said
    assert "What to do" in Path("advice/advice.html").read_text()


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.framework("torch")
def test_ranks_try_at_the_same_time_and_measure_their_messages():
    words = ["advise", "--model", "net.py", "--train", "a.h5", "b.h5", "--batch", "10"]
    words += ["--loss", "cross_entropy", "--seconds", "1"]
    Path("command.py").write_text(COMMAND)
    done = mpiexec(2, "command.py", *words, framework="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("What to do") == 1, "one rank prints for all"
    assert "The network: all ranks were on one host" in done.stdout
    told = json.loads(Path("advice/advice.json").read_text())
    assert told["parameters"] == 50
    assert told["messages"]["measured"] is True
    assert 1e6 < told["messages"]["bytes_per_s"] < 1e12


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--loss", "lost"], "the loss is nan in step 1 of the probe"),
        (["--loss", "cross_entropy", "--seconds", "0"], "seconds"),
        (["--loss", "cross_entropy", "--link", "fast"], "--link fast is not possible"),
        (["--loss", "cross_entropy", "--second", "3"], "there is no option --second"),
        (["--loss", "cross_entropy", "--run", "net.py"], "net.py is a file"),
        (["--loss", "cross_entropi"], "did you mean"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_sentence(words, text, capsys):
    assert advise(*words) == 2
    said = capsys.readouterr()
    assert text in said.err
    assert "Traceback" not in said.err
    assert not Path("advice").exists()
