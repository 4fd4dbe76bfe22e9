"""`nnlo_keras.predict` and `nnlo predict` with Keras: the model's own outputs, on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._cli import main
from tests.helpers.jobs import mpiexec
from tests.helpers.threads import on_ranks
from tests.helpers.train_command import write_files

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
nk = pytest.importorskip("nnlo_keras")
pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
X = np.random.default_rng(0).standard_normal((203, 3)).astype("f4")


def model(seed=0):
    keras.utils.set_random_seed(seed)
    x = keras.Input((3,))
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, "relu")(x))
    return keras.Model(x, {"kind": keras.layers.Dense(2)(hidden), "mass": keras.layers.Dense(1)(hidden)})


def on_rank(models, world):
    return nk.predict(models[world.rank], X, batch_size=10, world=world)


@pytest.mark.slow
def test_ranks_return_what_predict_returns():
    net = model()
    plain = net.predict(X, batch_size=10, verbose=0)
    found = nk.predict(net, X, batch_size=10).outputs
    assert list(found) == list(plain)
    for name in plain:
        np.testing.assert_allclose(found[name], plain[name], rtol=1e-6, atol=1e-7)
    for size in (2, 3):
        # A model is no thread's own: each rank has one, as each process has.
        models = [model() for _ in range(size)]
        for one in on_ranks(size, partial(on_rank, models)):
            for name in plain:
                np.testing.assert_array_equal(one.outputs[name], found[name])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: nk.predict(3, X), "model=3: give a keras.Model"),
        (lambda: nk.predict(model(), X[:, :2]), "fails on the first batch"),
        (lambda: nk.predict(model(), X, features="x"), "features= is about files"),
    ],
)
def test_bad_input_gets_one_sentence(call, words):
    with pytest.raises(ConfigurationError, match=words):
        call()


def result(path):
    import h5py

    with h5py.File(path) as file:
        return {name: file[name][()] for name in file}


@pytest.mark.slow
def test_the_command_uses_a_model_and_a_run(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    net.save("net.keras")
    plain = net.predict(result("a.h5")["features"], verbose=0)
    words = [
        "predict",
        "net.keras",
        "--data",
        "a.h5",
        "--out",
        "y.h5",
        "--keep",
        "labels",
        "--figures",
        "confusion:labels:2",
    ]
    assert main(words) == 0
    np.testing.assert_allclose(result("y.h5")["prediction"], plain, rtol=1e-5, atol=1e-6)
    words = "train --model net.keras --train a.h5 --loss sparse_categorical_crossentropy --epochs 1 --run r"
    assert main(words.split()) == 0
    assert main(["predict", "r", "--data", "a.h5", "--out", "z.h5"]) == 0
    trained = keras.models.load_model("r/model.keras", compile=False)
    plain = trained.predict(result("a.h5")["features"], verbose=0)
    np.testing.assert_allclose(result("z.h5")["prediction"], plain, rtol=1e-5, atol=1e-6)
    assert Path("y.h5.figures.json").exists()


@pytest.mark.mpi
@pytest.mark.slow
def test_the_command_runs_on_several_ranks(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    net.save("net.keras")
    words = ["predict", "net.keras", "--data", "a.h5", "b.h5", "--out", "y.h5", "--batch", "3"]
    done = mpiexec(3, "-m", "nnlo_common", *words, framework="keras", timeout_s=100)
    assert done.returncode == 0, done.stderr
    both = np.concatenate([result(name)["features"] for name in ("a.h5", "b.h5")])
    np.testing.assert_allclose(
        result("y.h5")["prediction"], net.predict(both, verbose=0), rtol=1e-5, atol=1e-6
    )
