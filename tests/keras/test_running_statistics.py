"""Moving statistics of Keras models: the server's are those of a `fit` that has seen all batches."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

from tests.helpers.frameworks import since
from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import ranks

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
from nnlo_keras._weights import Statistics  # noqa: E402
from tests.programs import keras_statistics as job  # noqa: E402

BACKEND = keras.backend.backend()
PROGRAM = PROGRAMS / "keras_statistics.py"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


def assert_like(found, want):
    for mine, plain in zip(found, want, strict=True):
        # Keras numbers layers that have no name.
        for (path, value), expected in zip(mine.items(), plain.values(), strict=True):
            np.testing.assert_allclose(value, expected, **TOLERANCE, err_msg=path)


def possible(kind):
    """Whether a back end can train so; on JAX a layer in a branch cannot move statistics."""
    return {"executions": BACKEND != "torch", "alternating": BACKEND != "jax"}.get(kind, True)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", job.KINDS)
def test_with_frozen_weights_the_statistics_are_those_of_the_plain_fit(kind):
    if not possible(kind):
        pytest.skip(f"{BACKEND} cannot do that")
    _, want = job.train(kind, plain=True)
    for workers in (1, 2, 3):
        with ranks(workers + 1) as cluster:
            (_, server), *_ = cluster.run(lambda world: job.train(kind, world=world), timeout_s=120)
        assert_like(server, want)


@since("keras", "3.14", "BatchNormalization can renormalise")
def test_of_layers_that_may_do_something_else_the_plain_mean_is_taken():
    class Own(keras.layers.BatchNormalization):
        def call(self, inputs, training=None, mask=None):
            return super().call(inputs, training=False, mask=mask)

    usual, own = keras.layers.BatchNormalization(), Own()
    renormed = keras.layers.BatchNormalization(renorm=True)
    patched = keras.layers.BatchNormalization()
    model = keras.Sequential([keras.Input((2,)), usual, own, renormed, patched])
    patched.call = lambda inputs, **options: inputs
    statistics = Statistics.of(model, model.trainable_variables)
    assert statistics is not None
    (layer,) = statistics.layers
    names = {one.name.rsplit("/")[-1]: one.place for one in statistics.flat.layout.segments[:2]}
    assert names == {"moving_mean": layer.mean, "moving_variance": layer.variance}


def test_updates_go_on_where_a_training_was_saved():
    model = job.model_of("fit")
    model.compile("sgd", "mse")
    statistics = Statistics.of(model, model.trainable_variables)
    statistics.set_since(np.arange(5.0))
    assert statistics.moves().since.tolist() == [0, 1, 2, 3, 4]
    statistics.mark()
    assert not statistics.moves().since.any()


@pytest.mark.sampled(2)
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param("tensorflow", marks=pytest.mark.extended),
        pytest.param("jax", marks=pytest.mark.extended),
    ],
)
def test_the_statistics_of_an_mpi_job_are_those_of_one_process(backend, size, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    kinds = {"torch": "fit,twice", "tensorflow": "fit,executions,alternating"}.get(backend, "fit,executions")
    for name, start in (("plain", alone), ("job", lambda *args, **options: mpiexec(size, *args, **options))):
        (tmp_path / name).mkdir()
        done = start(PROGRAM, str(tmp_path / name), kinds, env=env, timeout_s=180)
        assert done.returncode == 0, done.stderr
    for kind in kinds.split(","):
        found, want = (np.load(tmp_path / name / f"{kind}.npz") for name in ("job", "plain"))
        assert want.files
        for path in want.files:
            np.testing.assert_allclose(found[path], want[path], **TOLERANCE, err_msg=path)
