"""The running statistics of torch models: the server's are those of a loop that has seen all batches."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_torch._flat_model import buffers_of  # noqa: E402
from nnlo_torch._team import FlatBuffers  # noqa: E402
from tests.programs import torch_statistics as job  # noqa: E402

pytestmark = pytest.mark.framework("torch")

PROGRAM = PROGRAMS / "torch_statistics.py"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def on_ranks(size, **options):
    """The statistics after each epoch, of each rank."""
    with ranks(size) as cluster:
        return [
            seen for _, seen in cluster.run(lambda world: job.train(world=world, **options), timeout_s=40)
        ]


def assert_like(found, want, layers=(1, 2, 3)):
    for mine, plain in zip(found, want, strict=True):
        for name, value in plain.items():
            if int(name[0]) in layers or name.endswith("num_batches_tracked"):
                np.testing.assert_allclose(mine[name], value, **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("wrapper", [nt.Downpour, nt.Synchronous, nt.EASGD], ids=lambda one: one.__name__)
def test_with_frozen_weights_the_statistics_are_those_of_the_plain_loop(wrapper, workers):
    _, want = job.train(None)
    server, *_ = on_ranks(workers + 1, wrapper=wrapper)
    assert_like(server, want)
    assert int(server[-1]["1.num_batches_tracked"]) == job.EPOCHS * job.BATCHES


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_mean_over_all_batches_is_exact_where_they_differ(workers):
    _, want = job.train(None, different=True)
    server, *_ = on_ranks(workers + 1, different=True)
    assert_like(server, want, layers=(3,) if workers > 1 else (1, 2, 3))


def test_a_count_that_a_model_begins_with_is_gone_on_from():
    def old():
        model = job.model_of()
        for batch in job.batches_of(different=True):
            model(batch)
        return model

    _, want = job.train(None, model=old())
    with ranks(3) as cluster:
        server, *_ = cluster.run(lambda world: job.train(world=world, model=old())[1], timeout_s=40)
    assert_like(server, want)


class Looking:
    """A loop that looks at the centre in the midst of each epoch."""

    def __call__(self, world):
        model = job.model_of()
        optimizer = nt.Synchronous(torch.optim.SGD(model.parameters(), lr=0.0), world=world)
        batches = job.batches_of(different=False)
        for _ in range(job.EPOCHS):
            for index in nt.ShardSampler(batches, shuffle=False, optimizer=optimizer):
                optimizer.zero_grad()
                model(batches[index]).square().mean().backward()
                optimizer.step()
                before = {name: value.clone() for name, value in model.named_buffers()}
                with optimizer.center_weights():
                    model(batches[index])  # in training mode: it counts what is no batch
                for name, value in model.named_buffers():
                    if value.is_floating_point():
                        assert torch.equal(value, before[name])
            optimizer.mean({})
        found = {name: value.numpy().copy() for name, value in model.named_buffers()}
        optimizer.close()
        return found


def test_a_look_at_the_centre_in_mid_epoch_changes_nothing():
    _, want = job.train(None)
    with ranks(3) as cluster:
        server, *_ = cluster.run(Looking(), timeout_s=40)
    assert_like([server], want[-1:])


def test_a_layer_in_eval_mode_and_one_that_does_not_count_are_left_and_averaged():
    def program(world):
        torch.manual_seed(3)
        resting, instance = torch.nn.BatchNorm1d(3), torch.nn.InstanceNorm1d(3, track_running_stats=True)
        resting.running_mean.fill_(5.0)
        resting.eval()
        model = torch.nn.ModuleDict({"resting": resting, "instance": instance})
        optimizer = nt.Synchronous(torch.optim.SGD(resting.parameters(), lr=0.0), world=world, model=model)
        draw = torch.Generator().manual_seed(world.rank)
        for _ in nt.ShardSampler(range(6), shuffle=False, optimizer=optimizer):
            x = torch.randn(4, 3, 5, generator=draw)
            optimizer.zero_grad()
            (resting(x).sum() + instance(x).sum()).backward()
            optimizer.step()
        optimizer.mean({})
        found = {name: value.numpy().copy() for name, value in model.named_buffers()}
        optimizer.close()
        return found

    with ranks(3) as cluster:
        server, first, second = cluster.run(program, timeout_s=40)
    assert server["resting.running_mean"].tolist() == [5, 5, 5]
    assert server["resting.num_batches_tracked"] == 0
    for name in ("instance.running_mean", "instance.running_var"):
        np.testing.assert_allclose(server[name], (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-7)


def test_a_momentum_that_is_changed_between_epochs_never_makes_the_decay_too_slow():
    norm = torch.nn.BatchNorm1d(2, momentum=0.5)
    buffers = FlatBuffers(buffers_of([norm]), [norm])
    norm(torch.randn(4, 2))
    norm.momentum = 0.25
    assert buffers.moves().decay.tolist() == [0.5]
    buffers.mark()
    assert buffers.moves().decay.tolist() == [0.75]
    norm.momentum = 0.5
    assert buffers.moves().decay.tolist() == [0.5]
    norm.momentum = None
    assert buffers.moves().decay.tolist() == [0]
    buffers.mark()
    assert np.isnan(buffers.moves().decay).all()


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
def test_the_statistics_of_an_mpi_job_are_those_of_one_process(size, tmp_path):
    for name, start in (("plain", alone), ("job", lambda *args, **options: mpiexec(size, *args, **options))):
        (tmp_path / name).mkdir()
        done = start(PROGRAM, str(tmp_path / name), timeout_s=150)
        assert done.returncode == 0, done.stderr
    for different in (False, True):
        found, want = (np.load(tmp_path / name / f"different{different}.npz") for name in ("job", "plain"))
        for name in want.files:
            exact = not different or size == 2 or name[2] == "3" or "num_batches" in name
            if exact:
                np.testing.assert_allclose(found[name], want[name], **TOLERANCE, err_msg=name)
