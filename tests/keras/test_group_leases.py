"""Leases of samples of files to groups in Keras: each sample goes to one rank of one group."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
h5py = pytest.importorskip("h5py")

import nnlo_keras as nk  # noqa: E402
from nnlo_common import ConfigurationError  # noqa: E402
from tests.helpers.threads import on_ranks  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

SIZE, EPOCHS = 53, 3  # neither 2 nor 3 divides it


@pytest.fixture
def path(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.random.default_rng(1).standard_normal((SIZE, 4)).astype("f4")
        file["y"] = np.arange(SIZE, dtype="f4")
    return str(tmp_path / "a.h5")


@pytest.fixture(autouse=True)
def _launched(monkeypatch):
    """Let optimizers that `fit` builds early know that there are several ranks, as under a launcher."""
    monkeypatch.setattr("nnlo_keras._wrapper.launched", lambda: "several ranks")


class Noted(nk.H5Sequence):
    """Notes which samples this rank trains on in each epoch."""

    def lease_from(self, team):
        leases, self.seen = super().lease_from(team), {}
        take = leases.take

        def noted(epoch):
            batch, size = take(epoch)
            self.seen.setdefault(epoch, []).extend(batch[1].astype(int).tolist())
            return batch, size

        leases.take = noted
        return leases


def train(world, path, layout, *, name="Downpour", epochs=EPOCHS, callbacks=(), given=None):
    """Train one rank; the samples of its epochs, and its weights."""
    options = {"features": "x", "labels": "y", "batch_size": 2, "window": 2, "assignment": "dynamic"}
    data = Noted(path, world=world, **options, **(layout if given is None else given))
    data.seen = {}
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.set_weights([np.full((4, 1), 0.1), np.zeros(1)])
    model.compile(getattr(nk, name)(keras.optimizers.SGD(1e-4), **layout), "mse")
    model.fit(data, epochs=epochs, callbacks=[nk.Distribute(world=world), *callbacks], verbose=0)
    return data.seen, np.concatenate([one.ravel() for one in model.get_weights()])


def check(shares, k):
    """Each sample once, or again in a batch without weight, and equally many batches on a group's ranks."""
    dealt = [sample for one in shares for sample in one]
    assert sorted(set(dealt)) == [*range(SIZE)]
    assert len(dealt) - SIZE <= -SIZE % k
    for lead in range(0, len(shares), k):
        assert len({(len(one) + 1) // 2 for one in shares[lead : lead + k]}) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("ranks", "servers", "k"), [(5, 1, 2), (7, 1, 2), (8, 2, 3)])
@pytest.mark.parametrize("name", ["Downpour", "Synchronous"])
def test_each_sample_goes_to_one_rank_in_each_epoch(ranks, servers, k, name, path):
    layout = {"servers": servers, "group_size": k}
    found = on_ranks(ranks, lambda world: train(world, path, layout, name=name))
    for epoch in range(EPOCHS):
        check([seen.get(epoch, []) for seen, _ in found[servers:]], k)
    for lead in range(servers, ranks, k):
        assert all(np.array_equal(one, found[lead][1]) for _, one in found[lead : lead + k])


class StopIn(keras.callbacks.Callback):
    """Stops the training on this rank after some batches of all."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        self.batches -= 1
        self.model.stop_training = self.model.stop_training or self.batches == 0


def test_a_training_without_a_server_has_the_shares_of_static_assignment(path):
    def program(world):
        data = nk.H5Sequence(path, features="y", batch_size=2, assignment="dynamic", servers=0, world=world)
        return [int(sample) for index in range(len(data)) for sample in data[index][0]]

    check(on_ranks(3, program), 3)


def test_files_and_wrapper_with_different_groups_are_named(path):
    text = "assignment='dynamic' has group_size=1, but the wrapper has group_size=2; give both the same"
    with pytest.raises(ConfigurationError, match=text):
        on_ranks(5, lambda world: train(world, path, {"group_size": 2}, given={}))
