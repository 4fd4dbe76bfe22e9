"""Data that a script gives to `fit` on several ranks: all of it on every worker, or split there, is told."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402
from nnlo_keras import _shard  # noqa: E402

pytestmark = pytest.mark.framework("keras")
X = np.arange(60, dtype="f4").reshape(20, 3)


class Holder:
    """A data set of one's own."""

    def __init__(self, data):
        self.data, self.itself, self.transform = data, self, str.lower


@pytest.mark.parametrize(
    "wrapped", [lambda x: x, lambda x: [x, x], lambda x: {"x": x}, Holder, lambda x: Holder([Holder(x)])]
)
def test_a_mark_tells_data_apart(wrapped):
    mark = _shard._mark
    assert mark(wrapped(X), None) == mark(wrapped(X.copy()), None) > 0
    others = [X[::2], X[1::2], X + 1, X.astype("f8"), X.reshape(-1)]
    assert len({mark(wrapped(one), None) for one in [X, *others]}) == 1 + len(others)


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="there are data sets of TensorFlow on TensorFlow only"
)
def test_a_mark_tells_shards_of_tensorflow_apart():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices(X)
    marks = [
        _shard._mark(one.shuffle(9).batch(4).prefetch(1))
        for one in (data, data, data.shard(2, 0), data.shard(2, 1))
    ]
    assert marks[0] == marks[1] > 0
    assert len(set(marks)) == 3


def test_what_cannot_be_seen_has_no_mark():
    unseen = [None, iter([X]), (x for x in [X]), object(), Holder("a file"), np.array([object()] * 3)]
    assert [_shard._mark(one, None) for one in unseen] == [0] * len(unseen)


SAME = "fit() was given the same data on all 2 workers"
SPLIT = "validation_split=0.5: every rank sets its own samples apart"


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.slow
def test_what_all_workers_have_is_said_once_and_a_distribution_is_refused(tmp_path):
    backend = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = mpiexec(3, PROGRAMS / "keras_given.py", str(tmp_path), timeout_s=180, env=backend)
    assert done.returncode == 0, done.stderr
    server, *workers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    for name, told in server.items():
        wanted = [SAME] if name.startswith("all") else [SPLIT] if "split" in name else []
        wanted = (
            ["keras.distribution.DataParallel is around this model"] if name == "distribution" else wanted
        )
        assert [line[: len(want)] for line, want in zip(told, wanted, strict=True)] == wanted, name
    for worker in workers:
        assert worker.pop("distribution") == server["distribution"]
        assert not any(worker.values())


@pytest.mark.parametrize(
    ("steps", "shuffle", "warns"), [(2, False, True), (5, False, False), (2, True, False)]
)
def test_batches_of_which_each_epoch_takes_the_same_few_are_told(steps, shuffle, warns):
    columns = {"x": X[:10], "y": X[:10, :1]}
    data = nk.Batches(columns, features="x", labels="y", batch_size=2, shuffle=shuffle)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(nk.Downpour(keras.optimizers.SGD(0.0)), "mse")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit(data, epochs=2, steps_per_epoch=steps, verbose=0, callbacks=[nk.Distribute()])
    assert any("the same 2 of 5 batches" in str(one.message) for one in told) == warns
