"""Real trainings with a planted cause: the report names that cause, and nothing else."""

from __future__ import annotations

import os
import re
import time

import pytest

from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.commands.report._verdicts import verdicts
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import on_ranks

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402

pytestmark = [pytest.mark.framework("torch"), pytest.mark.extended]

BATCHES, EPOCHS = 4, 2
#: Long beside what a busy machine adds to it; where it adds more, the training is made again.
LONG_S, ADDED, TRIES = 0.15, 0.15, 4


class Naps:
    """Sleeps, and how much longer they took than they should."""

    asked_s = late_s = 0.0

    def nap(self, seconds):
        began_s = time.perf_counter()
        time.sleep(seconds)
        self.asked_s += seconds
        self.late_s += time.perf_counter() - began_s - seconds


class SleepySGD(torch.optim.SGD):
    """Steps that take some time."""

    pause_s = 0.0

    def step(self, closure=None):
        if self.pause_s:
            self.nap(self.pause_s)
        return super().step(closure)


class Batches:
    """Batches that take some time to read."""

    def __init__(self, nap, pause_s):
        self.nap, self.pause_s = nap, pause_s

    def __len__(self):
        return BATCHES

    def __iter__(self):
        for number in range(BATCHES):
            if self.pause_s:
                self.nap(self.pause_s)
            yield torch.linspace(-1, 1, 12).reshape(4, 3) + number / BATCHES


def train(world, folder, nap, *, rate=0.01, slow="", read_s=0.0, apply_s=0.0):
    torch.set_num_threads(1)
    model = torch.nn.Linear(3, 1)
    torch.nn.init.ones_(model.weight)
    sgd = SleepySGD(model.parameters(), lr=rate)
    optimizer = nt.Downpour(sgd, model=model, world=world)
    sgd.nap, sgd.pause_s = nap, apply_s if optimizer.serves else 0.0
    report = nt.Report(optimizer, folder)
    for _ in range(EPOCHS):
        for x in optimizer.epoch(Batches(nap, read_s)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            nap(LONG_S * (3 if optimizer.role == slow else 1))
            optimizer.step()
        loss = optimizer.evaluate(lambda x: {"loss": model(x).square().mean()}, [torch.ones(3, 3)])
        report.epoch(loss)
    optimizer.close()


@pytest.fixture
def many_cores(monkeypatch):
    """Cores enough for all ranks, wherever the test runs; what lacks them has a test of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(99)))


PLANTED = {
    "nothing": ({}, []),
    "a slow worker": (
        {"slow": "worker 1"},
        [r"^worker 1 takes [23]\.\d times as long as the others.*assignment=\"dynamic\" would save 5\d %"],
    ),
    "a slow reader": (
        {"read_s": 3 * LONG_S},
        [r"^reading takes [67]\d % of the time of a batch: stage the files on a local disk"],
    ),
    "a server that is the bottleneck": (
        {"apply_s": LONG_S},
        [r"^workers wait [5-7]\d % of their time, and a server works [89]\d % of its own: use servers=2"],
    ),
    "a rate that diverges": (
        {"rate": 0.5},
        [r"^loss rises from .* after epoch 1 to .* at the end: lower the learning rate"],
    ),
}


@pytest.mark.parametrize(("options", "expected"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_named_and_nothing_else(options, expected, tmp_path, many_cores):
    for number in range(TRIES):
        naps, folder = Naps(), tmp_path / str(number)
        on_ranks(4, lambda world: train(world, folder, naps.nap, **options))  # noqa: B023 - called at once
        if naps.late_s < ADDED * naps.asked_s:
            break
    else:
        pytest.skip(f"the machine was too busy for {TRIES} trainings to be what they should be")
    found = verdicts(read_run(folder))
    assert len(found) == len(expected), found
    for line, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, line)


def test_a_training_that_ends_as_it_diverges_says_so(tmp_path, many_cores):
    with pytest.raises(Exception, match="its loss has diverged"):
        on_ranks(3, lambda world: train(world, tmp_path, time.sleep, rate=1e30))
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"the training has diverged: rank \d sent NaN or infinity .* smaller learning rate", found
    )


@pytest.mark.mpi
def test_too_few_cores_are_named_and_nothing_else(tmp_path):
    ended = mpiexec(4, PROGRAMS / "one_core_torch.py", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"4 ranks shared 1 core of .*, so they waited for a core \d\d % of their time: start fewer", found
    )
