"""`nnlo rerun`: a job whose rank has died is run again; one that would end alike is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common.commands._cli import main
from nnlo_common.commands._rerun import run_rerun
from tests.helpers.jobs import environment, launcher
from tests.helpers.paths import ROOT

#: A job that ends as told by its words, one for each of its runs; the last one counts from then on.
JOB = """
import os, signal, sys
from pathlib import Path
runs = Path("runs")
done = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (done + 1))
way = sys.argv[1:][min(done, len(sys.argv) - 2)]
if way == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
errors = {"died": "PeerLostError: rank 1: a server died", "diverged": "DivergedError: rank 1 sent NaN"}
if way in errors:
    sys.stderr.write(f"nnlo: rank 2 of 4 on node7 failed; ending the job\\n{errors[way]}\\n")
    sys.exit(1)
if way == "complete":
    Path("result").touch()
sys.exit({"refused": 2, "left": 75}.get(way, 0))
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text(JOB)
    return lambda *ways: [sys.executable, "job.py", *ways]


def runs() -> int:
    return len(Path("runs").read_text())


@pytest.mark.parametrize(
    ("ways", "status", "made", "said"),
    [
        (["fine"], 0, 1, ""),
        (["killed", "died", "fine"], 0, 3, "was ended by SIGKILL after"),
        (
            ["died", "fine"],
            0,
            2,
            "(rank 2 of 4 on node7 failed; ending the job: PeerLostError: rank 1: a server died",
        ),
        (["left", "fine"], 0, 2, "has saved a checkpoint and left"),
        (["killed"], 137, 3, "it was run 3 times, and is not run again"),
        (["refused"], 2, 1, "the same command would end alike"),
        (["diverged"], 1, 1, "DivergedError: rank 1 sent NaN); the same command would end alike"),
    ],
)
def test_a_job_is_run_again_where_that_may_help(job, capsys, ways, status, made, said):
    waits = []
    assert run_rerun(job(*ways), times=2, wait=waits.append) == status
    assert runs() == made
    assert waits == [1.0, 2.0][: made - 1]
    assert said in capsys.readouterr().err


def test_a_job_is_complete_when_its_file_is_there(job, capsys):
    assert run_rerun(job("fine", "complete"), until="result", wait=lambda _: None) == 0
    assert runs() == 2
    assert "ended with status 0 after 0 s, and there is no result; run 2 of 4" in capsys.readouterr().err
    assert run_rerun(job("fine"), until="result") == 2
    assert "result exists before the job has begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", "nothing-there"], "there is no program 'nothing-there'"),
        (["--times", "-1", "--", sys.executable], "--times -1: give a whole number"),
    ],
)
def test_what_cannot_be_run_is_refused(capsys, words, said):
    assert main(["rerun", *words]) == 2
    assert said in capsys.readouterr().err


def test_within_a_job_it_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert main(["rerun", "--", "python", "train.py"]) == 2
    assert (
        "start it once, before the launcher: nnlo rerun -- mpiexec -n 4 python train.py"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_goes_to_the_job_and_ends_all(tmp_path, number):
    told = tmp_path / "told"
    program = (
        "import pathlib, signal, sys, time\n"
        f"def end(number, _):\n    pathlib.Path({str(told)!r}).write_text(str(number))\n    sys.exit(7)\n"
        f"signal.signal({int(number)}, end)\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    words = [sys.executable, "-m", "nnlo_common", "rerun", "--", sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment(None), cwd=ROOT) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        command.send_signal(number)
        assert command.wait(30) == 7
    assert told.read_text() == str(int(number))


TRAIN = """
import os, signal, sys
from pathlib import Path
import numpy as np
import torch
import nnlo_torch as nt

torch.manual_seed(0)
x = torch.randn(120, 3)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(3, 1)
optimizer = nt.Downpour(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
loader = torch.utils.data.DataLoader(data, batch_size=10, sampler=nt.ShardSampler(data))
checkpoint = nt.Checkpoint("run", optimizer)
Path(f"pid of {optimizer.role}").write_text(str(os.getpid()))
for epoch in checkpoint.epochs(4):
    for number, (inputs, targets) in enumerate(checkpoint.batches(loader)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        if len(sys.argv) > 1 and epoch == 2 and number == 5 and not Path("struck").exists():
            Path("struck").touch()
            os.kill(int(Path(f"pid of {sys.argv[1]}").read_text()), signal.SIGKILL)
        optimizer.step()
optimizer.close()
if optimizer.role != "worker 0":
    np.save("weights.npy", torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy())
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.framework("torch")
def test_a_killed_training_ends_with_the_same_bits(tmp_path):
    pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    found = []
    for struck in ("", "server 0"):
        folder = tmp_path / f"struck {struck}"
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        job = [launcher(), "-n", "2", sys.executable, "train.py", *filter(None, [struck])]
        done = subprocess.run(
            [sys.executable, "-m", "nnlo_common", "rerun", "--", *map(str, job)],
            env=environment(None),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert (folder / "struck").exists() == bool(struck)
        assert ("run 2 of 4 in 1 s" in done.stderr) == bool(struck), done.stderr
        found.append(np.load(folder / "weights.npy"))
    np.testing.assert_array_equal(*found)
