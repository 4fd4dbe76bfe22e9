"""Groups in torch over real MPI."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.data import epoch_order  # noqa: E402
from tests.helpers import torch_cases as cases  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.slow, pytest.mark.framework("torch")]

SIZE, BATCH, EPOCHS = 53, 4, 2


def trained(folder, size, servers, k, names):
    """Run the program; what each rank has saved, by wrapper."""
    args = [str(folder), str(servers), str(k), *names]
    done = mpiexec(size, PROGRAMS / "torch_groups.py", *args, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return {name: [np.load(folder / f"{name}.rank{rank}.npz") for rank in range(size)] for name in names}


def plain(name, k):
    """One process with batches k times as large; its weights and loss at the end."""
    model = cases.model_of()
    optimizer = getattr(nt, name)(
        torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), **cases.WRAPPERS[name]
    )
    inputs, targets = cases.data()
    for epoch in range(EPOCHS):
        order = epoch_order(SIZE, seed=0, epoch=epoch, shuffle=True)
        for start in range(0, len(order), k * BATCH):
            indices = order[start : start + k * BATCH]
            optimizer.zero_grad()
            cases.loss_of(model, inputs[indices], targets[indices]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    vector = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
    return vector, cases.loss_of(model, inputs, targets).item()


def close(found, expected):
    return np.allclose(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("k", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_without_a_server_ranks_make_the_steps_of_one_process_with_the_large_batch(k, tmp_path):
    for name, found in trained(tmp_path, k, 0, k, ["Synchronous"]).items():
        vector, loss = plain(name, k)
        for one in found:
            assert close(one["vector"], vector)
            assert np.array_equal(one["vector"], found[0]["vector"])
            assert close(one["loss"], loss)


FEW = ("Downpour", "EASGD")
REST = tuple(name for name in cases.WRAPPERS if name not in FEW)


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.extended)])
def test_members_stay_equal_bit_for_bit_on_five_ranks(names, tmp_path):
    for name, found in trained(tmp_path, 5, 1, 2, names).items():
        for lead in (1, 3):
            assert np.array_equal(found[lead]["vector"], found[lead + 1]["vector"]), name
        assert len({float(one["loss"]) for one in found}) == 1
        counts = np.bincount(np.concatenate([one["seen"] for one in found]), minlength=SIZE)
        assert (counts >= EPOCHS).all()
        # A rank that lacks a batch repeats a sample: at most one in each group and epoch.
        assert counts.sum() <= EPOCHS * (SIZE + 2)


WAYS = ("auto", "mpi", "bfloat16", "shared", "thread", "torch")
HOROVOD = pytest.param(
    ("horovod",),
    marks=[
        pytest.mark.extended,
        pytest.mark.skipif(importlib.util.find_spec("horovod") is None, reason="Horovod is not installed"),
    ],
)


@pytest.mark.parametrize("ways", [WAYS, HOROVOD])
def test_each_way_to_add_up_makes_the_steps_of_one_process_with_the_large_batch(ways, tmp_path):
    vector, _ = plain("Synchronous", 3)
    for way, found in trained(tmp_path, 3, 0, 3, [f"Synchronous:{way}" for way in ways]).items():
        for one in found:
            if way.endswith(":bfloat16"):  # whose roundings are not lost, but come a step later
                assert np.allclose(one["vector"], vector, atol=2e-3), way
                assert not close(one["vector"], vector), way
            else:
                assert close(one["vector"], vector), way
            assert np.array_equal(one["vector"], found[0]["vector"]), way


@pytest.mark.extended
@pytest.mark.parametrize("ways", [WAYS[1:], HOROVOD])
def test_each_way_keeps_members_equal_bit_for_bit_on_five_ranks(ways, tmp_path):
    names = [f"{name}:{way}" for name in FEW for way in ways]
    for name, found in trained(tmp_path, 5, 1, 2, names).items():
        for lead in (1, 3):
            assert np.array_equal(found[lead]["vector"], found[lead + 1]["vector"]), name


@pytest.mark.extended
@pytest.mark.parametrize("source", ["sampler", "file"])
def test_what_a_dead_group_had_leased_goes_to_the_others(source, tmp_path):
    """Groups of 2 on 7 ranks; one rank of the last group is killed within an epoch."""
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    args = [str(tmp_path), source, "6"]
    done = mpiexec(7, PROGRAMS / "torch_group_leases.py", *args, timeout_s=100, options=["--with-ft", "ulfm"])
    assert done.returncode == 0, done.stderr
    assert "rank 5 ends, because rank 6 of its group has died" in done.stderr
    found = [np.load(tmp_path / f"rank{rank}.npz") for rank in range(1, 5)]
    for epoch in range(3):
        shares = [one[f"epoch{epoch}"].tolist() for one in found]
        dealt = {sample for one in shares for sample in one}
        assert sum(map(len, shares)) - len(dealt) <= 1  # of an odd number one rank repeats the last
        assert len(shares[0]) - len(shares[1]) in (0, 1)
        assert len(shares[2]) - len(shares[3]) in (0, 1)
        # The dead group has used up some leases of the epoch in which it died, and nothing after it.
        assert len(dealt) == 101 if epoch == 2 else len(dealt) <= 101
