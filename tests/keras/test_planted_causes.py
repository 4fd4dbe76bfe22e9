"""Real trainings in Keras with a planted cause: the report names that cause, and nothing else."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import h5py  # noqa: E402

import nnlo_keras as nk  # noqa: E402
from nnlo_common.commands.report._run_reader import read_run  # noqa: E402
from nnlo_common.commands.report._verdicts import verdicts  # noqa: E402
from nnlo_common.data.formats._hdf5 import OpenHDF5  # noqa: E402
from tests.helpers.virtual_time import VirtualTime  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.extended,
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BATCH, BATCHES, EPOCHS, LONG_S = 3, 5, 3, 0.15


class Pauses(keras.callbacks.Callback):
    """Batches that take some time to compute."""

    def __init__(self, nap, seconds):
        super().__init__()
        self.nap, self.seconds = nap, seconds

    def on_train_batch_begin(self, batch, logs=None):
        self.nap(self.seconds)


def train(world, folder, nap, *, name="Downpour", rate=0.01, slow=None, files=None, servers=1):
    x = np.linspace(-1, 1, 4 * (world.size - servers) * BATCHES * BATCH, dtype="f4").reshape(-1, 4)
    data = {"x": x, "y": x.sum(axis=1, keepdims=True)}
    if files is None:
        data["x"], data["y"] = nk.shard(*data.values(), servers=servers, world=world)
    else:
        options = {"features": "x", "labels": "y", "batch_size": BATCH, "block": BATCH, "window": 1}
        data = {"x": nk.H5Sequence(files, world=world, **options)}
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(getattr(nk, name)(keras.optimizers.SGD(rate), servers=servers), "mse")
    pauses = Pauses(nap, 0 if world.rank < servers else LONG_S * (3 if world.rank == slow else 1))
    callbacks = [nk.Distribute(world=world), nk.Report(folder), pauses]
    model.fit(**data, batch_size=None if files else BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0)


@pytest.fixture
def clock(monkeypatch):
    """A clock of their own, cores enough for all ranks, and several ranks as under a launcher."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(99)))
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")
    time = VirtualTime()
    time.tell(monkeypatch)
    return time


PLANTED = {
    "nothing": ({}, []),
    "a slow worker": (
        {"slow": 2},
        [r"^worker 1 \(rank 2 on .*\(450\.0 ms, the others 150\.0 ms\).*=\"dynamic\" would save 57 %"],
    ),
    "a rate that diverges": (
        {"rate": 0.9},
        [r"^loss rises from .* after epoch \d to .* at the end: lower the learning rate"],
    ),
}


@pytest.mark.parametrize(("options", "expected"), PLANTED.values(), ids=PLANTED)
def test_what_was_planted_is_named_and_nothing_else(options, expected, tmp_path, clock):
    clock.on_ranks(4, lambda world: train(world, tmp_path, clock.nap, **options))
    found = verdicts(read_run(tmp_path))
    assert len(found) == len(expected), found
    for line, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, line)


@pytest.mark.skipif(
    keras.backend.backend() == "tensorflow",
    reason="TensorFlow asks for batches in a thread of its own, in its step",
)
@pytest.mark.parametrize("slower", [0.5, 3])
def test_a_slow_disk_is_named_where_it_is_slower_than_the_batches(slower, tmp_path, clock, monkeypatch):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = x = np.linspace(-1, 1, 4 * 3 * BATCHES * BATCH, dtype="f4").reshape(-1, 4)
        file["y"] = x.sum(axis=1, keepdims=True)
    read = OpenHDF5.read

    def read_slowly(file, name, start, stop, out):
        clock.nap(LONG_S * slower / BATCH * (stop - start) / 2)  # two data sets
        read(file, name, start, stop, out)

    monkeypatch.setattr(OpenHDF5, "read", read_slowly)
    clock.on_ranks(4, lambda world: train(world, tmp_path, clock.nap, files=[tmp_path / "a.h5"]))
    found = verdicts(read_run(tmp_path))
    assert len(found) == (slower > 1), found
    for line in found:
        # A batch is read in the time of three; it takes one to compute, while the next one is being read.
        assert re.search(
            r"^reading takes 6\d % .*, \d+ % of that waiting for the files: stage the files on", line
        )


def test_a_training_that_ends_as_it_diverges_says_so(tmp_path, clock):
    with pytest.raises(Exception, match="its loss has diverged"):
        clock.on_ranks(3, lambda world: train(world, tmp_path, clock.nap, rate=1e30))
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"the training has diverged: rank \d sent NaN or infinity .* smaller learning rate", found
    )


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("name", ["Synchronous", "LocalSGD"])
def test_a_training_without_a_server_that_diverges_says_so(name, tmp_path, clock):
    options = {"name": name, "rate": 1e30, "servers": 0}
    with pytest.warns(RuntimeWarning, match="not finite"):
        clock.on_ranks(3, lambda world: train(world, tmp_path, clock.nap, **options))
    (found,) = verdicts(read_run(tmp_path))
    assert re.match(
        r"the training has diverged: the gradient of rank .* is not finite .* in step \d, ", found
    )
