"""Trainings on a GPU follow those on the CPU; the same tests run on any machine as if its CPU were a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.plugin import PRESENT, GradientSum
from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch import _flat_model  # noqa: E402
from nnlo_torch._team import DeviceSum  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402
from tests.helpers.devices import DEVICES, device_of, on_gpu  # noqa: E402
from tests.helpers.jobs import environment, mpiexec  # noqa: E402
from tests.helpers.paths import BENCHMARKS, PROGRAMS  # noqa: E402

pytestmark = pytest.mark.framework("torch")

#: On one GPU sums have another order than on the CPU.
NEAR = {"rtol": 2e-3, "atol": 2e-3}
SGD = {"lr": 0.05, "momentum": 0.5}
WRAPPERS = [(name, options) for name, options in cases.WRAPPERS.items()] + [
    ("EAMSGD", {"every": 2}),
    ("Steady", {"passes": "fixed"}),
    ("Steady", {"passes": "fixed", "every": 3}),
    ("Downpour", {"every": 3}),
    ("Downpour", {"n_push": 2, "n_fetch": 3, "lag": 1}),
    ("Downpour", {"every": 3, "local": 0.05}),
    ("Downpour", {"wire": "int8"}),
    ("Synchronous", {"wire": "bfloat16"}),
    ("EASGD", {"every": 2, "wire": "int8", "lag": 1}),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Where the model is."""
    return device_of(request.param, monkeypatch)


def trained(name, options, device, *, ranks=2, autocast=False, scaler=False, **common):
    """The weights of all ranks after two epochs; with one worker nothing depends on timing."""

    def program(world):
        model = cases.model_of().to(device)
        nesterov = {"nesterov": True} if name == "EAMSGD" else {}
        inner = torch.optim.SGD(model.parameters(), **SGD, **nesterov)
        optimizer = getattr(nt, name)(inner, model=model, world=world, **options, **common)
        scale = torch.amp.GradScaler(device, enabled=scaler)
        x, y = (part.to(device) for part in cases.data())
        sampler = nt.ShardSampler(range(60), seed=3, optimizer=optimizer)
        for _ in range(2):
            for start in [*torch.tensor([*sampler], dtype=torch.long).split(6)]:
                if not len(start):
                    continue
                optimizer.zero_grad()
                with torch.autocast(device, torch.bfloat16, enabled=autocast):
                    loss = cases.loss_of(model, x[start], y[start])
                scale.scale(loss).backward()
                scale.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scale.step(optimizer)
                scale.update()
        optimizer.close()
        assert {one.device.type for one in model.parameters()} == {device}
        return [one.detach().float().cpu().clone() for one in model.parameters()]

    with MemoryCluster(ranks) as cluster:
        return cluster.run(program, timeout_s=60)


def near(found, expected, device, **limits):
    for one, other in zip(found, expected, strict=True):
        if device == "cpu":
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, **(limits or NEAR))


@pytest.mark.parametrize(("name", "options"), WRAPPERS, ids=str)
def test_every_wrapper_has_the_trajectory_of_the_cpu(name, options, device):
    with pytest.MonkeyPatch.context() as plain:
        expected = trained(name, options, device_of_cpu(plain))
    for one, other in zip(trained(name, options, device), expected, strict=True):
        near(one, other, device)


def device_of_cpu(patch):
    """The CPU, whose parameters are the flat vector's memory, whatever another fixture has set."""
    patch.setattr(_flat_model, "_storage", _ordinary)
    return "cpu"


def _ordinary(tensor):
    plain = tensor.dtype is torch.float32 and tensor.is_contiguous()
    return _flat_model.Storage.VIEW if plain else _flat_model.Storage.COPY


@pytest.mark.parametrize(
    "options", [{"every": 3}, {"n_push": 2, "n_fetch": 1}, {"every": 4, "lag": 1}], ids=str
)
def test_between_exchanges_no_gradient_comes_to_the_host(options, device, monkeypatch):
    fetched = []
    monkeypatch.setattr(_flat_model._Block, "fetch", lambda *one: fetched.append(one))
    with pytest.MonkeyPatch.context() as plain:
        expected = trained("Downpour", options, device_of_cpu(plain))
    for one, other in zip(trained("Downpour", options, device), expected, strict=True):
        near(one, other, device)
    assert not fetched


def test_a_sum_on_the_device_is_saved_like_that_on_the_host(device):
    def made():
        model = cases.model_of().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, _flat_model.FlatModel(_flat_model.named_parameters(optimizer))

    (model, flat), (_, other) = made(), made()
    there, here = DeviceSum(flat), GradientSum(flat.gradient.vector.size)
    again = DeviceSum(other)
    for number in range(4):
        model.zero_grad()
        model(torch.full((2, 5), float(number), device=device)).sum().backward()
        flat.collect()
        there.add(flat.gradient.vector)
        flat.blocks[0].fetch(slice(0, flat.gradient.vector.size))
        flat.gradient.vector[flat.marks] = PRESENT
        here.add(flat.gradient.vector)
        if number == 1:
            again.load(there.state())
            whole = GradientSum(here.total.size)
            whole.load(there.state())
            assert np.array_equal(whole.total, here.total)
            assert np.array_equal(again.state()["total"], here.total)
    assert there.count == here.count == 4
    assert np.array_equal(there.take(), here.take())
    with pytest.raises(ConfigurationError, match="the saved state of a DeviceSum"):
        there.load({"type": "GradientSum", "total": np.zeros(3, "f4"), "count": 1})


def test_mixed_precision_is_near_full_precision(device):
    whole = trained("Downpour", {}, device)
    mixed = trained("Downpour", {}, device, autocast=True)
    for one, other in zip(mixed, whole, strict=True):
        for mine, theirs in zip(one, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("name", ["Downpour", "EASGD"])
def test_all_ranks_of_a_group_stay_equal(name, device):
    _, *workers = trained(name, {"every": 2} if name == "EASGD" else {}, device, ranks=3, group_size=2)
    for one, other in zip(*workers, strict=True):
        assert torch.equal(one, other)


def test_ranks_without_a_server_stay_equal(device):
    first, *others = trained("Synchronous", {}, device, ranks=3, servers=0)
    for other in others:
        for one, same in zip(first, other, strict=True):
            assert torch.equal(one, same)


def test_a_training_resumes_where_it_was(tmp_path, device):
    def run(folder, epochs):
        torch.manual_seed(2)
        model = cases.model_of().to(device)
        optimizer = nt.Downpour(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
        x, y = (part.to(device) for part in cases.data())
        loader = torch.utils.data.DataLoader(
            range(60), batch_size=6, sampler=nt.ShardSampler(range(60), seed=3)
        )
        checkpoint = nt.Checkpoint(tmp_path / folder, optimizer)
        for _ in checkpoint.epochs(epochs):
            for rows in checkpoint.batches(loader):
                optimizer.zero_grad()
                cases.loss_of(model, x[rows], y[rows]).backward()
                optimizer.step()
        optimizer.close()
        return [one.detach().cpu().clone() for one in model.parameters()]

    straight = run("straight", 4)
    run("stopped", 2)
    for one, other in zip(run("stopped", 4), straight, strict=True):
        assert torch.equal(one, other)


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [pytest.param("cuda", marks=on_gpu), pytest.param("cpu", marks=pytest.mark.extended)]
)
def test_several_ranks_share_one_gpu(where, tmp_path):
    done = mpiexec(4, PROGRAMS / "gpu_torch.py", where, str(tmp_path), timeout_s=100)
    assert done.returncode == 0, done.stderr
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(4)]
    assert all(torch.equal(one["centre"], found[0]["centre"]) for one in found)
    assert {one["device"] for one in found[1:]} == {where}
    assert all(one["loss"] < 1.0 for one in found)


@pytest.mark.gpu
@on_gpu[1]
@pytest.mark.slow
def test_the_memory_checker_of_cuda_finds_nothing(tmp_path):
    checker = shutil.which("compute-sanitizer")
    if checker is None:
        pytest.skip("compute-sanitizer is not installed")
    words = [
        checker,
        "--error-exitcode",
        "9",
        sys.executable,
        str(PROGRAMS / "gpu_torch.py"),
        "cuda",
        str(tmp_path),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=200, check=False, env=environment({})
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.mpi
@pytest.mark.extended
def test_the_benchmark_runs_on_a_stand_in(tmp_path):
    """What `make gpu` prints, with tiny networks on the CPU."""
    words = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--output", "gpu.json"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=250, check=False, env=environment({}), cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| jedi |" in done.stdout
    assert "1 server, 1 worker, every=10, lag=1" in done.stdout
    assert Path(tmp_path / "gpu.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_benchmark_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=environment({}),
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert done.stdout.startswith("skipped: no GPU that torch can use")
