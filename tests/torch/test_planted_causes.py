"""Real trainings with a planted cause: the report names that cause, and nothing else."""

from __future__ import annotations

import os
import re

import pytest

from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.commands.report._verdicts import verdicts
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.virtual_time import VirtualTime

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402

pytestmark = pytest.mark.framework("torch")

BATCHES, EPOCHS, LONG_S = 4, 2, 0.15


class SleepySGD(torch.optim.SGD):
    """Steps that take some time."""

    def step(self, closure=None):
        self.pause()
        return super().step(closure)


class Batches:
    """Batches that take some time to read."""

    def __init__(self, pause):
        self.pause = pause

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for number in range(BATCHES):
            self.pause()
            yield torch.linspace(-1, 1, 12).reshape(4, 3) + number / BATCHES


def train(world, folder, nap, *, name="Downpour", rate=0.01, slow="", read_s=0.0, apply_s=0.0, servers=1):
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(model.weight)
    sgd = SleepySGD(model.parameters(), lr=rate)
    optimizer = getattr(nt, name)(sgd, model=model, world=world, servers=servers)
    sgd.pause = lambda: nap(apply_s if optimizer.serves else 0.0)
    report = nt.Report(optimizer, folder)
    for _ in range(EPOCHS):
        for x in optimizer.epoch(Batches(lambda: nap(read_s))):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nap(LONG_S * (3 if optimizer.role == slow else 1))
            optimizer.step()
        loss = optimizer.evaluate(lambda x: {"loss": model(x).square().mean()}, [torch.ones(3, 3)])
        report.epoch(loss)
    optimizer.close()


@pytest.fixture
def clock(monkeypatch):
    """A clock of their own, and cores enough for all ranks; what lacks them has a test of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(99)))
    time = VirtualTime()
    time.tell(monkeypatch)
    return time


PLANTED = {
    "nothing": ({}, []),
    "a slow worker": (
        {"slow": "worker 1"},
        # Two with 1 and one with 1/3 of the pace: an epoch lasts 3 / (7/3) instead of 3, or 57 % less.
        [r"^worker 1 \(rank 2 on .*\(450\.0 ms, the others 150\.0 ms\).*=\"dynamic\" would save 57 %"],
    ),
    "a slow reader": (
        {"read_s": 3 * LONG_S},
        [r"^reading takes 75 % of the time of a batch: stage the files on a local disk"],
    ),
    "a server that is the bottleneck": (
        {"apply_s": LONG_S},
        [r"^workers wait [56]\d % of their time, and a server works 9\d % of its own: use servers=2"],
    ),
    "a rate that diverges": (
        {"rate": 0.5},
        [r"^loss rises from .* after epoch 1 to .* at the end: lower the learning rate"],
    ),
}


# One of them each time: what the clock replaces may have moved.
OFTEN = "a slow reader"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(*one, id=name, marks=() if name == OFTEN else pytest.mark.extended)
        for name, one in PLANTED.items()
    ],
)
def test_what_was_planted_is_named_and_nothing_else(options, expected, tmp_path, clock):
    clock.on_ranks(4, lambda world: train(world, tmp_path, clock.nap, **options))
    found = verdicts(read_run(tmp_path))
    assert len(found) == len(expected), found
    for line, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, line)


@pytest.mark.extended
def test_a_training_that_ends_as_it_diverges_says_so(tmp_path, clock):
    with pytest.raises(Exception, match="its loss has diverged"):
        clock.on_ranks(3, lambda world: train(world, tmp_path, clock.nap, rate=1e30))
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"the training has diverged: rank \d sent NaN or infinity .* smaller learning rate", found
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", ["Synchronous", "LocalSGD"])
def test_a_training_without_a_server_that_diverges_says_so(name, tmp_path, clock):
    options = {"name": name, "rate": 1e30, "servers": 0}
    with pytest.warns(RuntimeWarning, match="not finite"):
        clock.on_ranks(3, lambda world: train(world, tmp_path, clock.nap, **options))
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"the training has diverged: the gradient of rank 0 and 1 and 2 is not finite .* in step \d, ", found
    )


@pytest.mark.extended
@pytest.mark.mpi
def test_too_few_cores_are_named_and_nothing_else(tmp_path):
    ended = mpiexec(4, PROGRAMS / "one_core_torch.py", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"4 ranks shared 1 core of .*, so they waited for a core \d\d % of their time: start fewer", found
    )
