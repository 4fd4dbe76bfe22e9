"""HDF5 files in `fit`: what Keras is given, in which order it may ask, and which part each rank has."""

from __future__ import annotations

import pickle
import random

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import h5py  # noqa: E402

import nnlo_keras as nk  # noqa: E402
from tests.helpers.keras_cases import weights  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

SAMPLES = 23
X = np.random.default_rng(0).standard_normal((SAMPLES, 3)).astype("f4")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture
def files(tmp_path):
    """Two files, of 9 and of 14 samples."""
    for name, part in [("a", slice(9)), ("b", slice(9, None))]:
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"], file["y"], file["number"] = X[part], Y[part], np.arange(SAMPLES)[part]
            file["inputs/1"], file["inputs/2"] = X[part, :1], X[part, 1:]
            file["outputs/a"], file["outputs/b"] = Y[part], -Y[part]
    return tmp_path / "*.h5"


def numbers(data, indices=None):
    """The samples of an epoch, asked for in some order of batches."""
    data.on_epoch_begin()
    asked = range(len(data)) if indices is None else indices
    seen = [int(number) for index in asked for number in data[index][0]]
    data.on_epoch_end()
    return seen


def dense():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])


def fitted(model, *data, **options):
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(*data, epochs=2, verbose=0, **options)
    return model


@pytest.mark.slow
def test_what_is_fitted_in_the_order_of_the_files_has_the_bits_of_arrays(files):
    want = weights(fitted(dense(), X, Y, batch_size=4, shuffle=False))
    data = nk.H5Sequence(files, features="x", labels="y", batch_size=4, shuffle=False, window=2)
    model = fitted(dense(), data)  # the `shuffle` of fit, which is on, changes nothing
    for ours, theirs in zip(weights(model), want, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert model.evaluate(data, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-5)
    inputs = nk.H5Sequence(files, features="x", batch_size=4, shuffle=False)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), model.predict(X, verbose=0), atol=1e-6)
    data.close()


@pytest.mark.slow
def test_groups_are_several_inputs_and_outputs(files):
    first, second = keras.Input((1,)), keras.Input((2,))
    both = keras.layers.concatenate([first, second])
    model = keras.Model([first, second], [keras.layers.Dense(1)(both), keras.layers.Dense(1)(both)])
    model.compile(keras.optimizers.Adam(0.05), ["mse", "mse"])
    data = nk.H5Sequence(files, features="inputs", labels="outputs", batch_size=4)
    losses = model.fit(data, epochs=15, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]


def test_each_epoch_has_each_sample_once_in_an_order_of_its_own(files):
    data = nk.H5Sequence(files, features="number", batch_size=4, block=3, window=2)
    epochs = [numbers(data) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(SAMPLES))] * 3
    assert len(set(map(tuple, epochs))) == 3
    again = nk.H5Sequence(files, features="number", batch_size=4, block=3, window=2)
    again.epoch = 2  # as if resumed
    assert numbers(again) == epochs[2]


def test_in_whatever_order_keras_asks_blocks_are_read_in_theirs(files):
    """`fit` shuffles the indices, looks at the first batches before, and asks again from other threads."""
    data, want = (nk.H5Sequence(files, features="number", batch_size=4, window=2) for _ in range(2))
    for _ in range(3):
        _ = data[0], data[1]
        indices = list(range(len(data)))
        random.shuffle(indices)
        assert numbers(data, indices) == numbers(want)
    data.on_epoch_begin()
    np.testing.assert_array_equal(data[5][0], data[5][0])
    assert not np.array_equal(data[5][0], data[4][0])
    with pytest.raises(IndexError, match="batch 6 is out of range: the epoch has 6"):
        data[6]


def test_it_may_go_into_another_process(files):
    data = nk.H5Sequence(files, features="number", batch_size=4)
    _ = data[0]
    assert numbers(pickle.loads(pickle.dumps(data))) == numbers(data)


@pytest.mark.parametrize("servers", [1, 2])
def test_each_sample_goes_to_one_worker_and_a_server_has_one(files, servers):
    def program(world):
        data = nk.H5Sequence(files, features="number", batch_size=4, block=3, servers=servers, world=world)
        epochs = [numbers(data) for _ in range(2)]
        data.close()
        return epochs

    with MemoryCluster(servers + 3) as cluster:
        ranks = cluster.run(program, 180)
    assert all(len(epoch) == 1 for epochs in ranks[:servers] for epoch in epochs)
    for epoch in range(2):
        parts = [epochs[epoch] for epochs in ranks[servers:]]
        assert sorted(number for part in parts for number in part) == list(range(SAMPLES))
        assert sorted(map(len, parts)) == [7, 8, 8]


def test_all_ranks_may_have_all_of_it(files):
    def program(world):
        return numbers(nk.H5Sequence(files, features="number", shuffle=False, shard=False, world=world))

    with MemoryCluster(3) as cluster:
        assert cluster.run(program, 180) == [list(range(SAMPLES))] * 3


def test_more_workers_than_samples_are_refused(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(2)

    def program(world):
        with pytest.raises(ConfigurationError, match="2 samples among 3 workers: some would get none"):
            nk.H5Sequence(tmp_path / "a.h5", features="x", world=world)
        return True

    with MemoryCluster(4) as cluster:
        assert cluster.run(program, 180) == [True] * 4


# -- leases ------------------------------------------------------------------------------------------


def test_leased_it_is_one_sample_till_distribute_has_asked_for_others(files):
    def program(world):
        data = nk.H5Sequence(files, features="number", batch_size=4, assignment="dynamic", world=world)
        if world.rank == 0:
            return len(data), len(numbers(data))
        data.on_epoch_begin()
        assert {int(data[index][0][0]) for index in range(4)} == {0}  # for Keras to build the model by
        with pytest.raises(ConfigurationError, match=r"without Distribute\(\).*shard=False to validate"):
            data[4]
        return len(data) > SAMPLES / 4

    with MemoryCluster(3) as cluster:
        assert cluster.run(program, 180) == [(1, 1), True, True]


@pytest.mark.parametrize("assignment", ["static", "dynamic"])
@pytest.mark.parametrize("looks", [1, 2])
def test_a_worker_that_saves_before_its_first_batch_resumes_with_the_first_epoch(files, assignment, looks):
    """Keras has ended an epoch before, to build the model."""

    def program(world):
        options = {"features": "number", "batch_size": 4, "assignment": assignment, "world": world}
        data = nk.H5Sequence(files, **options)
        data.on_epoch_begin()
        for index in range(min(looks, len(data))):
            data[index]
        data.on_epoch_end()
        resumed = nk.H5Sequence(files, **options)
        resumed.load(data.state(None))
        resumed.turn_to(0)
        within = resumed.state(2)["epoch"]
        resumed.on_epoch_begin()
        resumed.on_epoch_end()
        return resumed.epoch - 1, within, resumed.state(None)["epoch"]

    with MemoryCluster(3) as cluster:
        assert cluster.run(program, 180)[1:] == [(0, 0, 1)] * 2


def test_alone_nothing_is_leased(files):
    data = nk.H5Sequence(files, features="number", batch_size=4, assignment="dynamic")
    assert sorted(numbers(data)) == list(range(SAMPLES))


@pytest.mark.parametrize("options", [{"assignment": "fair"}, {"assignment": "dynamic", "shard": False}])
def test_assignments_that_cannot_be_are_refused(files, options):
    with pytest.raises(ConfigurationError, match="must be 'static', or 'dynamic' for training data"):
        nk.H5Sequence(files, features="x", **options)


# -- going on ----------------------------------------------------------------------------------------


class Noted(nk.H5Sequence):
    """Notes which epochs it was asked for."""

    asked: list[int]

    def on_epoch_begin(self):
        super().on_epoch_begin()
        self.asked.append(self.epoch)


def unbuilt():
    """Keras looks at the data to build it, as if that were an epoch."""
    return keras.Sequential([keras.layers.Dense(1)])


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, unbuilt])
def test_a_training_that_goes_on_has_the_order_of_its_epoch(files, make):
    def fit(**options):
        data = Noted(files, features="x", labels="y", batch_size=4, window=2)
        data.asked = []
        model = make()
        model.compile(nk.Downpour(keras.optimizers.SGD(0.01)), "mse")
        for one in [options] if options else [{"epochs": 2}, {"epochs": 1}]:
            model.fit(data, callbacks=[nk.Distribute()], verbose=0, **one)
        return data.asked[-3:]

    assert fit() == [0, 1, 2]  # the second fit goes on, too
    assert fit(initial_epoch=3, epochs=6) == [3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, unbuilt])
def test_a_plain_fit_begins_with_the_order_of_the_first_epoch_too(files, make):
    data = Noted(files, features="x", labels="y", batch_size=4, window=2)
    data.asked = []
    model = fitted(make(), data)
    model.fit(data, verbose=0)
    assert data.asked[-3:] == [0, 1, 2]  # what Keras has looked at to build the model was no epoch


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_the_order_of_the_next_epoch(files, tmp_path):
    def fit(epochs):
        data = Noted(files, features="x", labels="y", batch_size=4, window=2)
        data.asked = []
        model = dense()
        model.compile(nk.Downpour(keras.optimizers.SGD(0.01)), "mse")
        callbacks = [nk.Distribute(), nk.Checkpoint(tmp_path / "run")]
        model.fit(data, epochs=epochs, callbacks=callbacks, verbose=0)
        return data.asked

    assert fit(2)[-2:] == [0, 1]
    assert fit(5)[-3:] == [2, 3, 4]


def test_weights_are_what_keras_takes_for_them(files):
    with h5py.File(files.parent / "b.h5", "r+") as b, h5py.File(files.parent / "a.h5", "r+") as a:
        a["weight"], b["weight"] = np.zeros(9, "f4"), np.ones(14, "f4")
    data = nk.H5Sequence(files, features="x", labels="y", weights="weight", batch_size=4)
    held_out = nk.H5Sequence(files.parent / "b.h5", features="x", labels="y", batch_size=4)
    model = dense()
    model.compile("sgd", "mse", weighted_metrics=["mse"])
    of_weighted = model.evaluate(data, verbose=0, return_dict=True)["mse"]
    assert of_weighted == pytest.approx(
        model.evaluate(held_out, verbose=0, return_dict=True)["mse"], rel=1e-5
    )


def test_it_is_not_divided_twice(files):
    def program(world):
        data = nk.H5Sequence(files, features="x", world=world)
        with pytest.raises(ConfigurationError, match="which already holds only this rank's share"):
            nk.shard(data, world=world)
        return True

    with MemoryCluster(3) as cluster:
        assert cluster.run(program, 180) == [True] * 3


@pytest.mark.slow
def test_what_goes_wrong_while_it_is_read_ends_the_fit(files):
    with h5py.File(files.parent / "b.h5", "r+") as file:
        file["x"][3, 1] = np.nan
    data = nk.H5Sequence(files, features="x", labels="y", batch_size=4, window=1, check_finite=True)
    # TensorFlow wraps it up in an error of its own.
    with pytest.raises(Exception, match=r"b\.h5: sample 3 of /x is not finite"):
        fitted(dense(), data)


def test_options_are_those_of_the_files(files):
    data = nk.H5Sequence(
        files,
        features="x",
        labels="y",
        adapt_features=lambda x: {"first": x[:, :1]},
        check_finite=True,
        locking=False,
        stage_to=files.parent / "local",
    )
    x, y = data[0]
    assert x["first"].shape == y.shape == (SAMPLES, 1)
    data.close()
    assert list((files.parent / "local").iterdir()) == []
    with pytest.raises(TypeError, match="feature"):
        nk.H5Sequence(files, features="x", feature="x")
