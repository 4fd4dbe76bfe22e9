"""Planted causes of slow reading: each is named alone, with advice that mends it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from nnlo_common.base._spans import Spans, record
from nnlo_common.commands._cli import main
from nnlo_common.commands.report._run_reader import EpochFacts, RankFacts, RunFacts
from nnlo_common.commands.report._verdicts import reading
from nnlo_common.data import Batches, FileSource
from nnlo_common.data._memory_cache import cached_mb
from nnlo_common.data.formats._hdf5 import OpenHDF5

h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")
pytestmark = pytest.mark.slow

SAMPLES = 3000


@pytest.fixture
def file(tmp_path):
    """A file of random numbers, which gzip has to work on."""

    def make(**options):
        x = np.random.default_rng(0).normal(size=(SAMPLES, 300)).astype("f4")
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file.create_dataset("x", data=x, **options)
        return str(tmp_path / "a.h5")

    return make


class Naps:
    """A clock that goes on with the processor's time, and by naps."""

    def __init__(self):
        self.napped_s = 0.0

    def __call__(self):
        return time.thread_time() + self.napped_s

    def nap(self, seconds):
        self.napped_s += seconds


def epoch_facts(source, clock, epochs=1) -> list[EpochFacts]:
    """Read epochs, and return what a report has of them; all of their time is that of reading."""
    batches, facts = Batches(source, batch_size=100, shuffle=True), []
    for epoch in range(epochs):
        spans = Spans(clock=clock)
        record(spans)
        batches.get(epoch, 0)  # without reading ahead: all in this thread, and counted by its time
        for number in range(len(batches)):
            if number % batches.window == 0:
                batches._read(batches._window(epoch, number // batches.window))
        record(None)
        batches.close()
        told: dict[str, float | str] = {**spans.reading, "cached_mb": cached_mb()}
        facts.append(
            EpochFacts(
                ended_s=0.0, seconds=1.0, samples=SAMPLES, memory_mb=1.0, cpu_s=1.0, metrics={},
                spent={"read": 0.8, "compute": 0.2}, stages=dict(spans.stages), reading=told,
            )
        )  # fmt: skip
    return facts


def verdict(epochs) -> str:
    run = RunFacts(
        folder=None,
        history={},
        workers={},
        versions={},
        ranks=[RankFacts(rank=0, role="alone", epochs=epochs)],
    )
    (found,) = reading(run)
    return found


def most(stages: Mapping[str, float]) -> str:
    return max(stages, key=lambda name: stages[name])


def test_a_slow_disk_is_told_to_stage(file, monkeypatch):
    clock, read = Naps(), OpenHDF5.read

    def slowly(opened, *where):
        clock.nap(0.2)
        read(opened, *where)

    monkeypatch.setattr(OpenHDF5, "read", slowly)
    with closing(FileSource(file(), features="x")) as source:
        found = verdict(epoch_facts(source, clock))
    assert "% of that waiting for the files: stage the files on a local disk (stage_to=" in found


def test_gzip_is_told_to_keep_the_samples_in_memory_and_that_mends_it(file):
    path = file(compression="gzip", chunks=(100, 300))
    with closing(FileSource(path, features="x", cache="none")) as source:
        (before,) = epoch_facts(source, time.thread_time)
    found = verdict([before])
    assert "% of that decoding them (gzip): keep the decoded samples in memory (cache=" in found
    with closing(FileSource(path, features="x", cache="memory")) as source:
        first, *later = epoch_facts(source, time.thread_time, epochs=3)
    assert "train for more than one epoch" in verdict([first])
    for one in later:
        assert one.stages["decode"] < 0.1 * before.stages["decode"]
        assert one.reading["cached_mb"] == pytest.approx(SAMPLES * 1200 / 1e6)


def test_tiny_chunks_are_told_to_be_rewritten_and_that_mends_it(file, tmp_path):
    path = file(chunks=(1, 100), shuffle=True)
    with closing(FileSource(path, features="x", cache="none")) as source:
        (before,) = epoch_facts(source, time.thread_time)
    found = verdict([before])
    assert "which are stored in pieces of 0.4 kB: rewrite them once with larger ones by nnlo rechunk" in found
    assert main(["rechunk", path, "--to", str(tmp_path / "new")]) == 0
    with closing(FileSource(tmp_path / "new/a.h5", features="x")) as source:
        (after,) = epoch_facts(source, time.thread_time)
    assert after.stages["decode"] < 0.3 * before.stages["decode"]


def test_a_slow_function_of_the_user_is_named(file):
    clock = Naps()

    def slow(x):
        clock.nap(0.5)
        return x

    with closing(FileSource(file(), features="x", adapt_features=slow)) as source:
        found = verdict(epoch_facts(source, clock))
    assert "% of that your functions adapt_features and adapt_labels: make them faster" in found


def test_what_is_in_memory_is_left_to_be_gathered(file):
    with closing(FileSource(file(compression="gzip"), features="x", cache="memory")) as source:
        epochs = epoch_facts(source, time.thread_time, epochs=2)
    assert most(epochs[1].stages) == "mix"
    assert "% of that gathering the samples of a batch" in verdict(epochs)


def test_reading_that_takes_little_has_no_verdict(file):
    with closing(FileSource(file(), features="x")) as source:
        epochs = epoch_facts(source, time.thread_time)
    epochs = [replace(one, spent={"read": 0.2, "compute": 0.8}) for one in epochs]
    run = RunFacts(
        folder=None,
        history={},
        workers={},
        versions={},
        ranks=[RankFacts(rank=0, role="alone", epochs=epochs)],
    )
    assert not list(reading(run))
