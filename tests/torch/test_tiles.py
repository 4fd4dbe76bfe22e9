"""`nnlo_torch.infer_tiles` and `nnlo tile` with PyTorch: equal to the whole volume for real networks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._cli import main
from nnlo_common.plugin import measured_field
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import ROOT
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
nt = pytest.importorskip("nnlo_torch")
pytestmark = pytest.mark.framework("torch")
nn = torch.nn

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, dims=3, depth=1, width=4, classes=3):
        super().__init__()
        names = ("Conv", "ConvTranspose", "MaxPool")
        Conv, Up, Pool = [getattr(torch.nn, f"{name}{dims}d") for name in names]
        self.first, self.pool = Conv(1, width, 3, padding=1), Pool(2)
        self.inner = Conv(width, 2 * width, 3, padding=1)
        self.up, self.last = Up(2 * width, width, 2, stride=2), Conv(2 * width, classes, 3, padding=1)

    def forward(self, x):
        first = torch.relu(self.first(x))
        inner = torch.relu(self.inner(self.pool(first)))
        return self.last(torch.cat([first, self.up(inner)], 1))

def get_model(dims=3):
    torch.manual_seed(0)
    return Net(dims)

def sure(scores):
    return scores.max(0) > 0.2
"""


def net(dims=3):
    scope = {}
    exec(NET, scope)
    return scope["get_model"](dims).eval()


def whole(model, volume):
    with torch.no_grad():
        return model(torch.from_numpy(volume)[None, None])[0].numpy()


def volume(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype("f4")


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((50, 70), 24), ((30, 64), 20), ((26, 34, 40), 20), ((20, 46, 24), (20, 24, 20)), ((38, 22, 22), 22)],
)
@pytest.mark.parametrize("blend", ["crop", "gaussian"])
def test_a_u_net_gives_what_the_whole_gives(shape, tile, blend):
    model, data = net(len(shape)), volume(*shape)
    overlap = None if blend == "crop" else 4
    found = nt.infer_tiles(model, data, tile=tile, blend=blend, overlap=overlap, batch_size=2)
    np.testing.assert_allclose(found.outputs, whole(model, data), atol=1e-5)
    assert found.tiles > 1
    assert max(found.margin) == 5


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_give_the_bits_of_one_process(size):
    data = volume(26, 34, 40)
    alone = nt.infer_tiles(net(), data, tile=20, reduce="argmax").outputs
    np.testing.assert_array_equal(alone, whole(net(), data).argmax(0))
    models = [net() for _ in range(size)]
    for one in on_ranks(
        size, lambda world: nt.infer_tiles(models[world.rank], data, tile=20, reduce="argmax", world=world)
    ):
        np.testing.assert_array_equal(one.outputs, alone)


@pytest.mark.extended
@pytest.mark.slow
def test_a_large_volume_is_what_the_whole_gives(tmp_path):
    h5py = pytest.importorskip("h5py")
    data, model = volume(512, 256, 256), net()
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_dataset("raw", data=data, chunks=(64, 64, 64))
    found = nt.infer_tiles(model, tmp_path / "v.h5", tmp_path / "y.h5", tile=100, batch_size=2)
    assert found.tiles > 50
    expected = whole(model, data)
    with h5py.File(tmp_path / "y.h5") as file:
        for at in range(0, 512, 64):
            some = slice(at, at + 64)
            np.testing.assert_allclose(file["prediction"][:, some], expected[:, some], atol=1e-5)


MEMORY = """
import resource, sys
import h5py, numpy as np, torch
import nnlo_torch as nt
from net import get_model

torch.set_num_threads(1)
with h5py.File("v.h5", "w") as file:
    data = file.create_dataset("raw", (int(sys.argv[1]), 128, 128), "f4", chunks=(32, 64, 64))
    for at in range(0, len(data), 32):
        data[at : at + 32] = np.random.default_rng(at).standard_normal((32, 128, 128))
nt.infer_tiles(get_model(), "v.h5", "y.h5", tile=48, batch_size=2, overwrite=True)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.extended
@pytest.mark.slow
def test_memory_does_not_grow_with_the_volume(tmp_path):
    (tmp_path / "net.py").write_text(NET)
    peaks = []
    for length in (160, 1280):
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(length)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.08 * peaks[0], f"{peaks} kB: the volume has 21 and 168 MB"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv1d(2, 2, 3, padding=1))

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        rows = x.transpose(1, 2)
        return self.inner(rows, rows, rows)[0].transpose(1, 2)


def conv(kernel, dilation=1):
    reach = (kernel - 1) * dilation
    padding = (reach // 2, reach - reach // 2)
    return nn.Sequential(nn.ConstantPad1d(padding, 0.0), nn.Conv1d(2, 2, kernel, dilation=dilation))


#: Networks with what is known of them: how far they reach before and after, and their period.
NETWORKS = {
    "one point": (lambda: nn.Conv1d(2, 2, 1), (0, 0, 1)),
    "one convolution": (lambda: conv(5), (2, 2, 1)),
    "an even kernel": (lambda: conv(4), (1, 2, 1)),
    "several": (lambda: nn.Sequential(conv(3), nn.ReLU(), conv(3), nn.ReLU(), conv(7)), (5, 5, 1)),
    "dilation": (lambda: nn.Sequential(conv(3, 2), nn.ReLU(), conv(3, 4)), (6, 6, 1)),
    "residual": (Residual, (2, 2, 1)),
    # Outputs 2i and 2i + 1 see the pooled inputs 2i and 2i + 1.
    "pooling": (lambda: nn.Sequential(nn.MaxPool1d(2), nn.Upsample(scale_factor=2)), (1, 1, 2)),
    # A stride of 4, kernel of 4: outputs 4i to 4i + 3 see inputs 4i to 4i + 3.
    "stride and transposed": (
        lambda: nn.Sequential(nn.Conv1d(2, 2, 4, stride=4), nn.ConvTranspose1d(2, 2, 4, stride=4)),
        (3, 3, 4),
    ),
    # Pooled place i sees inputs 2i - 1 to 2i + 2, and so do outputs 2i and 2i + 1.
    "convolution and pooling": (
        lambda: nn.Sequential(conv(3), nn.AvgPool1d(2), nn.Upsample(scale_factor=2)),
        (2, 2, 2),
    ),
    "attention": (Attention, (None, None, None)),
    "a norm over all": (lambda: nn.Sequential(conv(3), nn.InstanceNorm1d(2)), (None, None, None)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_receptive_field_is_the_computed_one(name):
    make, expected = NETWORKS[name]
    torch.manual_seed(1)
    compute = nt._inference.TorchCompute(make().eval())
    with torch.no_grad():
        found = measured_field(compute, 2, "f4", 1)
    if expected[0] is None:
        assert found.margin == (None,)
    else:
        assert (found.before[0], found.after[0], found.period[0]) == expected


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: nt.infer_tiles(nn.Conv2d(1, 1, 3), volume(30, 30), tile=10),
            "it must have a value, or some",
        ),
        (
            lambda: nt.infer_tiles(nn.Linear(7, 1), volume(30, 30), tile=10),
            "the model takes none of the tiles",
        ),
        (lambda: nt.infer_tiles([net(2)] * 2, volume(30, 30), tile=10), "is for one model"),
        (
            lambda: nt.infer_tiles(net(2), volume(30, 31), tile=9),
            "a tile of 9 along y is not a multiple of 2",
        ),
        (
            lambda: nt.infer_tiles(net(2), volume(30, 31), tile=10),
            "a margin of 5 at both faces leave nothing of",
        ),
    ],
)
def test_bad_input_gets_one_sentence(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
    torch.save(net().state_dict(), "weights.pt")
    np.save("v.npy", volume(26, 34, 40))
    return ["tile", "net.py", "--from", "weights.pt", "--data", "v.npy", "--tile", "20"]


def test_the_command_plans_and_writes(files, capsys):
    assert main([*files, "--plan", "--ranks", "8"]) == 0
    said = capsys.readouterr().out
    assert "nnlo tile: tiles    18, margin 5 x 5 x 5 (measured); the model looks at 18" in said
    assert "floating-point operations" in said
    assert "#SBATCH --ntasks=8" in said
    assert main([*files, "--reduce", "argmax", "--out", "y.npy"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), whole(net(), np.load("v.npy")).argmax(0))
    assert main([*files, "--reduce", "sure", "--objects", "label", "--table", "--out", "o.npy"]) == 0
    said = capsys.readouterr().out
    assert f"nnlo tile: {np.load('o.npy').max()} objects found" in said
    assert Path("o.npy.csv").exists()


def test_the_command_refuses_in_one_sentence(files, capsys):
    for words, said in {
        "": "--out is missing",
        "--out y.npy --tile 20 x": "--tile 20 x: give whole numbers",
        f"--out y.npy --tile {'9' * 5000}": "9999: give whole numbers",
        "--out y.npy --tile 4": "a margin of 5 at both faces leave nothing of a tile of 4",
        "--out y.npy --reduce sur": "--reduce sur: the model's Python file has no function of this name; "
        "did you",
        "--out y.npy --blend gauss": "must be one of crop, linear, gaussian",
        "--out y.npy --data none.npy": "none.npy cannot be read as .npy",
        "--out y.txt": "y.txt ends in .txt",
    }.items():
        assert main([*files, *words.split()]) == 2, words
        assert said in capsys.readouterr().err
    assert not list(Path().glob("y.*"))


@pytest.mark.mpi
@pytest.mark.slow
def test_the_command_runs_on_several_ranks(files):
    words = [*files, "--reduce", "sure", "--objects", "label", "--out", "y.npy"]
    done = mpiexec(3, "-m", "nnlo_common", *words, framework="torch")
    assert done.returncode == 0, done.stderr
    assert main([*words[:-1], "alone.npy"]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.load("alone.npy"))
