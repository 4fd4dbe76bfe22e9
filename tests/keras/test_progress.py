"""`Progress`, and Keras' own bar: one rank counts what all workers train on, the others are silent."""

from __future__ import annotations

import json
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import TrainingReport  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402
from nnlo_common.training.report import _progress_display  # noqa: E402
from nnlo_common.training.report._course import Course  # noqa: E402
from nnlo_common.training.report._live_ranks import read_live  # noqa: E402
from nnlo_keras import _served_epochs  # noqa: E402
from nnlo_keras._served_epochs import ServerBar  # noqa: E402
from tests.helpers import keras_cases as cases  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BATCH, BATCHES, EPOCHS = 3, 7, 2


@pytest.fixture(autouse=True)
def at_every_batch(monkeypatch):
    """Show and note after each batch, as if each took long."""
    for name in ("PLAIN_S", "_NOTED_S"):
        monkeypatch.setattr(_progress_display, name, 0.0)
    monkeypatch.setattr(_served_epochs, "_EVERY_S", 0.0)


@pytest.fixture
def launched(monkeypatch):
    """Let optimizers that `fit` builds early know that there are several ranks, as under a launcher."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


def fit(workers, callbacks, world=None, servers=1, **options):
    rows = workers * BATCHES * BATCH
    x = np.linspace(-1.0, 1.0, 5 * rows, dtype="f4").reshape(rows, 5)
    data = x, (x[:, 0] > 0).astype("i4")
    held = x[:5], data[1][:5]
    if world is not None:
        data = nk.shard(*data, servers=servers, world=world)
        callbacks = [nk.Distribute(world=world), *callbacks]
    model = cases.compiled(cases.dense(), nk.Downpour(keras.optimizers.SGD(0.01), servers=servers))
    options = {
        "verbose": 0,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "validation_data": held,
    } | options
    model.fit(*data, callbacks=callbacks, **options)
    return cases.weights(model)


CASES = {"alone": (1, 1, 1), "a server": (4, 3, 1), "no server": (3, 3, 0)}


@pytest.mark.parametrize(("ranks", "workers", "servers"), CASES.values(), ids=CASES)
def test_one_rank_prints_for_all_and_all_write(ranks, workers, servers, tmp_path, capsys, request):
    if ranks == 1:
        fit(1, [nk.Progress(tmp_path, live=False)])
    else:
        request.getfixturevalue("launched")
        with MemoryCluster(ranks) as cluster:
            cluster.run(
                lambda world: fit(workers, [nk.Progress(tmp_path, live=False)], world, servers=servers)
            )
    lines = capsys.readouterr().out.splitlines()
    columns = r"epoch +(\d)/2 +\d+ % +[\d ]+ samples/s  loss [\d.]+(  \w+ [\d.]+)* \| val_loss [\d.]+"
    assert {found[1] for line in lines if (found := re.match(columns, line))} == {"1", "2"}
    assert all(line.startswith("epoch ") for line in lines)
    run = read_live(tmp_path)
    assert run.ended
    assert not run.unreadable
    whole = EPOCHS * BATCHES * BATCH
    assert [one.samples for one in run.ranks] == (
        servers * [workers * whole] if ranks > 1 else []
    ) + workers * [whole]
    assert all("loss" in one.scores for one in run.ranks)


def test_progress_changes_no_number(tmp_path):
    keras.utils.set_random_seed(3)
    want = fit(1, [])
    keras.utils.set_random_seed(3)
    assert cases.equal(fit(1, [nk.Progress(tmp_path, live=False)]), want)


@pytest.mark.parametrize("known", [True, False])
def test_the_bar_of_keras_counts_the_batches_of_all_workers_once(launched, capsys, known, monkeypatch):
    if not known:  # as with a generator
        monkeypatch.setattr(_served_epochs, "_steps_of", lambda params, feed: None)
    with MemoryCluster(4) as cluster:
        cluster.run(lambda world: fit(3, [], world, verbose=1))
    told = re.sub(r"[\x08\r]+|\x1b\[\d*m", "\n", capsys.readouterr().out)
    assert re.findall(r"^Epoch (\d)/2$", told, re.MULTILINE) == ["1", "2"]
    epochs = told.partition("Epoch 1/2")[2].split("Epoch 2/2")
    whole = 3 * BATCHES
    assert ("/Unknown" in epochs[0]) == (not known)
    for number, epoch in enumerate(epochs):
        counts = [int(one) for one in re.findall(r"(\d+)/(?:\d+|Unknown)", epoch)]
        assert counts == sorted(counts)
        assert counts
        last = re.findall(r"(\d+)/(\d+)", epoch)[-1]
        if known or number:
            assert last == (str(whole), str(whole))
            assert not known or set(re.findall(r"\d+/(\d+)", epoch)) == {str(whole)}
        else:  # two workers may be in the second epoch while the third ends the first
            assert whole <= int(last[0]) == int(last[1]) <= whole + 2 * BATCHES


def test_a_resumed_server_counts_from_its_checkpoint(launched, tmp_path, capsys, monkeypatch):
    taken, workers, whole = [], 2, 2 * BATCHES
    monkeypatch.setattr("nnlo_keras._callbacks._progress.Course", noting(taken))
    monkeypatch.setattr(_served_epochs, "_steps_of", lambda params, feed: None)

    def program(world, epochs):
        callbacks = [nk.Progress(live=False), nk.Report(tmp_path), nk.Checkpoint(tmp_path)]
        fit(workers, callbacks, world, verbose=1, epochs=epochs)

    for epochs in (2, 4):
        with MemoryCluster(1 + workers) as cluster:
            cluster.run(lambda world, until=epochs: program(world, until))
    facts = map(json.loads, (tmp_path / "ranks" / "facts.rank0.jsonl").read_text().splitlines())
    epochs = [line["batches"] for line in facts if line["what"] == "epoch"]
    assert sum(epochs[2:]) == sum(epochs[:2]) == 2 * whole
    assert sum(taken[2:]) == sum(taken[:2]) == 2 * whole * BATCH
    told = re.sub(r"[\x08\r]+|\x1b\[\d*m", "\n", capsys.readouterr().out).partition("Epoch 3/4")[2]
    counts = {int(one) for one in re.findall(r"\n\d+/(\d+)", told)}
    assert counts
    assert max(counts) < whole + BATCHES


def test_the_bar_of_a_resumed_server_begins_at_none():
    shown = []
    team = SimpleNamespace(report=lambda: TrainingReport(samples=45), watch=lambda call, _: call())
    bar = keras.callbacks.ProgbarLogger()
    bar.verbose, bar.progbar = 1, SimpleNamespace(update=lambda made, finalize: shown.append(made))
    ServerBar(bar, team, 14, 42).take_over()
    assert shown == [3]


def noting(taken):
    """A course that notes how many samples each epoch of a server had."""

    class Noting(Course):
        def __init__(self, **options):
            super().__init__(**options)
            self.last = None

        def begin_at(self, report, epoch):
            super().begin_at(report, epoch)
            self.last = report.samples

        def end_epoch(self, report):
            if report.exchanges:
                taken.append(report.samples - (self.last or 0))
                self.last = report.samples
            return super().end_epoch(report)

    return Noting
