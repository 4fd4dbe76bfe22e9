"""A step weighs as much as the samples behind it, whatever loader they have come through."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
from torch.utils.data import DataLoader  # noqa: E402

import nnlo_torch as nt  # noqa: E402
from tests.programs import torch_weights as cases  # noqa: E402

pytestmark = pytest.mark.framework("torch")


def trainee(world=None, wrapper=None, **options):
    model = torch.nn.Linear(2, 1)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    return (wrapper or nt.Downpour)(plain, model=model, world=world, **options)


def step(optimizer, rows=1, target=0.0):
    optimizer.zero_grad()
    (optimizer._model(torch.ones(rows, 2)).mean() - target).square().backward()
    optimizer.step()


# --- by samples --------------------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("assignment", ["static", "dynamic"])
@pytest.mark.parametrize("loop", cases.LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("name", cases.LOADERS)
def test_a_step_weighs_the_samples_that_the_loop_has_got(name, loop, assignment):
    make, options = cases.LOADERS[name]

    def program(world):
        return cases.compared(make, loop, world=world, assignment=assignment, **options)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected
    assert len(weights) >= 3


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("leaves", [False, True])
def test_the_report_counts_the_samples_that_the_loop_has_got(size, leaves):
    def program(world):
        optimizer = trainee(world)
        sampler = nt.ShardSampler(range(10), optimizer=optimizer)
        for _ in DataLoader(range(10), 4, sampler=sampler, drop_last=True):
            step(optimizer)
            if leaves:
                break
        optimizer.close()
        return optimizer.report().samples

    expected = 4 if leaves else 8
    assert (on_ranks(2, program) if size > 1 else [program(None)]) == [expected] * size


@pytest.mark.slow
def test_what_processes_have_fetched_ahead_of_a_loop_that_is_left_does_not_count():
    optimizer = trainee()
    sampler = nt.ShardSampler(range(40), optimizer=optimizer)
    for _ in DataLoader(range(40), 4, sampler=sampler, num_workers=1):
        break
    assert optimizer.report().samples == 4


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.mpi
def test_a_loader_with_processes_may_be_ahead_of_the_loop(tmp_path):
    done = mpiexec(2, PROGRAMS / "torch_weights.py", str(tmp_path / "found.json"), timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == len(cases.LOOPS) * len(cases.LOADERS | cases.PROCESSES)
    different = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
    assert not different


@pytest.mark.parametrize("loop", cases.LOOPS, ids=lambda loop: loop.__name__)
def test_epoch_counts_when_it_yields(loop):
    def program(world):
        return cases.compared(cases.sampled, loop, world=world, through_epoch=True)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected


def test_a_sampler_without_a_loader_counts_what_it_gives():
    def program(world):
        optimizer = trainee(world)
        weights = None if optimizer.serves else cases.noted_weights(optimizer)
        for number, _ in enumerate(nt.ShardSampler(range(10), optimizer=optimizer)):
            if number % 3 == 2:
                step(optimizer)
        optimizer.close()
        return weights

    assert on_ranks(2, program)[1] == [3, 3, 3]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"batch_size": 4, "drop_last": True}])
def test_an_iterable_weighs_what_the_loop_has_got(options):
    def program(world):
        def make(optimizer, assignment):
            data = nt.ShardIterable([torch.tensor(number) for number in range(10)], optimizer=optimizer)
            return torch.utils.data.DataLoader(data, **options) if options else data

        return cases.compared(make, cases.every_batch, world=world)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected
    assert set(weights) == ({1} if not options else {4} if "drop_last" in options else {2, 4})


@pytest.mark.parametrize("assignment", ["static", "dynamic"])
@pytest.mark.parametrize("loader", [False, True])
def test_files_weigh_their_batches(tmp_path, assignment, loader):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = torch.arange(cases.SIZE).numpy()

    def program(world):
        def make(optimizer, assignment):
            batches = nt.H5Batches(
                tmp_path / "a.h5",
                features="x",
                batch_size=cases.BATCH,
                assignment=assignment,
                optimizer=optimizer,
            )
            return torch.utils.data.DataLoader(batches, batch_size=None) if loader else batches

        def loop(batches, note, step):
            cases.every_second((batch[0] for batch in batches), note, step)

        return cases.compared(make, loop, world=world, assignment=assignment)

    _, (weights, expected) = on_ranks(2, program)
    assert weights == expected
    assert 3 in weights or 7 in weights


def test_a_loop_of_its_own_weighs_one():
    def program(world):
        optimizer = trainee(world)
        if optimizer.serves:
            return optimizer.close()
        weights = cases.noted_weights(optimizer)
        step(optimizer)
        step(optimizer)
        optimizer.close()
        return weights

    assert on_ranks(2, program)[1] == [1, 1]


def test_samples_that_are_only_looked_at_do_not_count():
    def program(world):
        optimizer = trainee(world)
        weights = None if optimizer.serves else cases.noted_weights(optimizer)
        loader = torch.utils.data.DataLoader(
            cases.Samples(), 4, sampler=nt.ShardSampler(cases.Samples(), evaluation=True, optimizer=optimizer)
        )
        for _ in optimizer.epoch([torch.ones(2, 2), torch.ones(3, 2)]):
            step(optimizer)
        optimizer.evaluate(lambda batch: {}, loader)
        for _ in optimizer.epoch([torch.ones(5, 2)]):
            step(optimizer)
        optimizer.close()
        return weights

    assert on_ranks(2, program)[1] == [2, 3, 5]


# --- the mean ----------------------------------------------------------------------------------------------


def test_the_mean_is_that_of_all_samples():
    """Workers with 3 and 1 samples: one step of Synchronous is one of a process with all 4."""

    def program(world):
        optimizer = trainee(world, nt.Synchronous)
        worker, _ = optimizer.share
        for batch in optimizer.epoch([torch.ones(3, 2) if worker == 0 else torch.ones(1, 2)]):
            step(optimizer, len(batch), target=float(worker))
        with optimizer.center_weights():
            center = optimizer._model.bias.item()
        optimizer.close()
        return center

    # The slope of (0 - target)**2 is 0 and -2: their mean over samples is -0.5, times 0.5.
    assert on_ranks(3, program)[0] == 0.25


def test_the_noise_scale_is_in_samples():
    def program(batch):
        def run(world):
            optimizer = trainee(world, nt.Synchronous)
            worker, _ = optimizer.share
            for _ in optimizer.epoch([torch.ones(batch, 2)]):
                step(optimizer, batch, target=1.0 + 2 * worker)
            optimizer.close()
            return optimizer.report().noise_scale

        return run

    one, eight = (on_ranks(3, program(batch))[0] for batch in (1, 8))
    # Gradients -2 and -6 for each of 3 numbers: |mean|^2 = 48, the mean of |g|^2 is 60.
    assert one == pytest.approx((60 - 48) / (1 - 1 / 2) / (2 * 48 - 60))
    assert eight == pytest.approx(8 * one)


# --- a weight of the user's --------------------------------------------------------------------------------


def test_a_weight_that_is_set_counts_instead():
    def program(world):
        optimizer = trainee(world)
        weights = None if optimizer.serves else cases.noted_weights(optimizer)
        for number, _ in enumerate(optimizer.epoch([torch.ones(2, 2)] * 4)):
            optimizer.weight = [None, 7, 0.5, None][number]
            step(optimizer)
        optimizer.close()
        return weights

    assert on_ranks(2, program)[1] == [2, 7, 0.5, 2]


def test_the_weight_is_by_samples_until_it_is_set():
    optimizer = trainee()
    assert optimizer.weight is None
    for weight in (3, 0.5, np.int64(5), np.float32(1.5), torch.tensor(2.0), torch.tensor([4]).sum()):
        optimizer.weight = weight
        assert isinstance(optimizer.weight, float)
        assert optimizer.weight == float(weight)
    assert copy.deepcopy(optimizer).weight == 4
    optimizer.weight = None
    assert copy.deepcopy(optimizer).weight is None


@pytest.mark.parametrize(
    "weight", [0, -1, float("nan"), float("inf"), True, "samples", [3], torch.ones(2), 1 + 0j]
)
def test_a_weight_that_is_none_is_refused_at_once(weight):
    optimizer = trainee()
    with pytest.raises(ConfigurationError, match=r"^optimizer.weight = .* finite number above 0, or None"):
        optimizer.weight = weight
    assert optimizer.weight is None
