"""`nnlo_torch.predict` and `nnlo predict` with PyTorch: the model's own outputs, on all ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import ROOT
from tests.helpers.threads import on_ranks
from tests.helpers.train_command import write_files

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
nt = pytest.importorskip("nnlo_torch")
pytestmark = pytest.mark.framework("torch")
X = np.random.default_rng(0).standard_normal((203, 3)).astype("f4")
NET = """
import torch, nnlo_common

def get_model(width=4):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

def best(outputs):
    return {"best": outputs.argmax(1), "scores": outputs}

def mean():
    return nnlo_common.Figure(
        sums=lambda outputs, kept: {"s": outputs["scores"].sum(dtype="f8"), "n": outputs["scores"].size},
        result=lambda sums: float(sums["s"] / sums["n"]),
    )

def wrong():
    return 3
"""


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )


def plain(net, x=X, batch=10):
    net.eval()
    with torch.no_grad():
        return torch.cat([net(part) for part in torch.from_numpy(x).split(batch)]).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_return_what_a_plain_loop_returns(size):
    net = model()
    net.train()
    models = [model() for _ in range(size)]  # the seed is all threads'
    found = on_ranks(
        size, lambda world: nt.predict(models[world.rank], X, batch_size=10, world=world).outputs
    )
    assert nt.predict(net, torch.from_numpy(X)).rows == 203
    assert all(part.training for part in net.modules()), "it is in training mode again"
    for one in found:
        np.testing.assert_array_equal(one, plain(model()))


def test_several_inputs_and_named_outputs():
    class Two(torch.nn.Module):
        def forward(self, x, y):
            return {"sum": x[:, 0] + y, "parts": [x, y.bfloat16()]}

    found = nt.predict(Two(), (X, np.arange(203)), batch_size=7).outputs
    np.testing.assert_array_equal(found["sum"], X[:, 0] + np.arange(203, dtype="f4"))
    assert list(found) == ["sum", "parts/0", "parts/1"]
    assert found["parts/1"].dtype == np.float32


def test_an_ensemble_and_half_precision():
    nets = [model(0), model(1)]
    found = nt.predict(nets, X, batch_size=10).outputs
    np.testing.assert_allclose(
        found["prediction"], (plain(nets[0]) + plain(nets[1])) / 2, rtol=1e-5, atol=1e-6
    )
    half = nt.predict(nets[0], X, batch_size=10, precision="bfloat16").outputs
    assert 0 < np.abs(half - plain(nets[0])).max() < 0.1


def test_the_weights_of_all_ranks_must_be_equal():
    models = [model(0), model(1)]
    with pytest.raises(ConfigurationError, match="rank 1 has another model than rank 0"):
        on_ranks(2, lambda world: nt.predict(models[world.rank], X, world=world))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nt.predict(3, X), "model=3: give a torch.nn.Module"),
        (lambda: nt.predict([], X), "model=.*: give a torch.nn.Module"),
        (lambda: nt.predict(model(), X[:, :2]), r"fails on the first batch \(prediction float32\[203, 2\]\)"),
        (lambda: nt.predict(model(), X, features="x"), "features= is about files, but the data are arrays"),
        (lambda: nt.predict(model(), X, precision="int8"), "precision='int8': give float16 or bfloat16"),
        (lambda: nt.predict(model(), "none.h5", features="x"), "none.h5 does not exist on this host"),
    ],
)
def test_bad_input_gets_one_sentence(call, words):
    pytest.importorskip("h5py")
    with pytest.raises(ConfigurationError, match=words):
        call()


def result(path):
    import h5py

    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run."""
    write_files(tmp_path, monkeypatch)
    Path("net.py").write_text(NET)
    words = "train --model net.py --model-params width=5 --train a.h5 --loss cross_entropy --epochs 1 --run r"
    assert main(words.split()) == 0
    return "r"


def expected(weights="r/weights.pt", width=5):
    net = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))
    net.load_state_dict(torch.load(weights, weights_only=True))
    parts = [result(name)["features"] for name in ("a.h5", "b.h5")]
    return np.concatenate([plain(net, part, 1000) for part in parts])


@pytest.mark.slow
def test_the_command_uses_a_run(run, capsys):
    words = [
        "predict", run, "--data", "a.h5", "b.h5", "--keep", "labels", "--apply", "best", "--out", "y.h5",
        "--figures", "mean", "--batch", "60",
    ]  # fmt: skip
    assert main(words) == 0
    found = result("y.h5")
    np.testing.assert_allclose(found["scores"], expected(), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found["best"], found["scores"].argmax(1))
    assert list(found["labels"][:3]) == list(result("a.h5")["labels"][:3])
    said = capsys.readouterr().out
    assert "y.h5: 140 samples in " in said
    mean = json.loads(Path("y.h5.figures.json").read_text())["mean"]
    assert mean == pytest.approx(found["scores"].mean(), rel=1e-5)
    assert main(words) == 2
    assert "y.h5 exists already; name another file" in capsys.readouterr().err
    words = ["predict", "net.py", "net.py", "--model-params", "width=5", "--from", "r/weights.pt"]
    assert main([*words, "--data", "a.h5", "--out", "e.h5", "--dtype", "float16"]) == 0
    assert {name: str(one.dtype) for name, one in result("e.h5").items()} == {
        "prediction": "float16",
        "prediction_spread": "float16",
    }


@pytest.mark.slow
def test_the_command_refuses_in_one_sentence(run, capsys):
    for words, said in {
        "predict r --data a.h5": "--out is missing: name the file to write",
        "predict r --out y.h5": "--data is missing: name files",
        "predict": "the following arguments are required: MODEL",
        "predict . --data a.h5 --out y.h5": "is not the folder of a run: it has no config.toml",
        "predict net.py --data a.h5 --out y.h5": "net.py is a model without its weights; add --from FILE",
        "predict r --data a.h5 --out y.txt": "y.txt ends in .txt; name a file in .h5",
        "predict r --data a.h5 --out y.h5 --apply bset": "--apply bset: the model's Python file has no "
        "function of "
        "this name; did you mean 'best'?",
        "predict r --data a.h5 --out y.h5 --figures wrong": "--figures wrong: wrong() returned 3; return "
        "an nnlo",
        "predict r --data a.h5 --out y.h5 --figures roc": "--figures roc: give roc:LABELS",
        f"predict r --data a.h5 --out y.h5 --figures confusion:labels:{'9' * 5000}": "give roc:LABELS",
        f"predict r --data a.h5 --out y.h5 --part 1/{'9' * 5000}": "give a number and how many there are",
        f"predict r --data a.h5 --out y.h5 --batch {'9' * 5000}": "must be a whole number at least 1",
        "predict r --data none.h5 --out y.h5": "none.h5 does not exist on this host",
        "predict r --data a.h5 --out y.h5 --feature labels": "there is no option --feature; did you mean "
        "'--features",
        "predict r --data a.h5 --out y.h5 --features-name labels": "the model, or apply, fails on the "
        "first batch",
    }.items():
        assert main(words.split()) == 2, words
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.startswith("nnlo predict: ")
    assert not list(Path().glob("y.*"))


@pytest.mark.slow
@pytest.mark.parametrize("line", ["features_name = 5", "features_name = [5]", "pad = 'x'", "mask = 3"])
def test_a_folder_of_a_run_whose_options_were_damaged_is_refused(run, line, capsys):
    config, (name, *_) = Path("r/config.toml"), line.split()
    others = [one for one in config.read_text().splitlines() if not one.startswith(f"{name} ")]
    config.write_text("\n".join([line, *others]))
    assert main(["predict", run, "--data", "a.h5", "--out", "y.h5"]) == 2
    assert f"config.toml: {line} is not possible" in capsys.readouterr().err


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("size", [3])
def test_the_command_runs_on_several_ranks(run, size):
    words = ["predict", run, "--data", "a.h5", "b.h5", "--out", "y.h5", "--batch", "3", "--keep", "labels"]
    done = mpiexec(size, "-m", "nnlo_common", *words, framework="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("140 samples in") == 1
    np.testing.assert_allclose(result("y.h5")["prediction"], expected(), rtol=1e-5, atol=1e-6)
    again = mpiexec(size, "-m", "nnlo_common", *words, framework="torch")
    assert again.returncode == 2
    assert again.stderr.count("y.h5 exists already") == 1


@pytest.mark.mpi
@pytest.mark.slow
def test_a_script_survives_the_death_of_a_rank_and_of_all(tmp_path):
    program = ROOT / "tests" / "programs" / "predict_torch.py"
    out = tmp_path / "y.npy"
    killed = mpiexec(3, program, str(out), "30")
    assert killed.returncode != 0
    assert not out.exists()
    done = mpiexec(2, program, str(out), "0")
    assert done.returncode == 0, done.stderr
    computed = sum(int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("computed"))
    assert 0 < computed < 203, "what was written stays"
    alone = mpiexec(1, program, str(tmp_path / "alone.npy"), "0")
    assert alone.returncode == 0, alone.stderr
    assert out.read_bytes() == (tmp_path / "alone.npy").read_bytes()


@pytest.mark.mpi
@pytest.mark.slow
def test_the_model_of_an_open_training_has_the_centre():
    """Also right after the loop, when the server still waits for the workers' next epoch."""
    done = mpiexec(3, ROOT / "tests" / "programs" / "predict_training.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the centre's") == 3
