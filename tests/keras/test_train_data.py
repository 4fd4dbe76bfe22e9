"""`nnlo train` with Keras on Parquet files: weights in loss and metrics, and standardised features."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
pa = pytest.importorskip("pyarrow", reason="the environment for MPICH has no readers of files")
import pyarrow.parquet as pq  # noqa: E402

from nnlo_common.commands._cli import main  # noqa: E402
from tests.helpers.train_command import told, train  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    pytest.mark.slow,
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

MODEL = """
import keras

def get_model():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, activation="softmax")])
"""


WORDS = ["--model", "net.py", "--loss", "sparse_categorical_crossentropy", "--metrics", "accuracy"]
WORDS += ["--features-name", "pt,eta", "--labels-name", "label"]


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Return the columns of a file to train on, and of one to validate with."""
    monkeypatch.chdir(tmp_path)
    draw, found = np.random.default_rng(0), {}
    for name, size in [("a", 60), ("val", 50)]:
        label = draw.integers(0, 2, size)
        columns = {"pt": draw.gamma(2, 30, size) + 30 * label, "eta": draw.normal(0, 1, size)}
        found[name] = columns | {"label": label, "w": draw.random(size) * 3}
        pq.write_table(pa.table(found[name]), f"{name}.parquet", row_group_size=7)
    Path("net.py").write_text(MODEL)
    return found


def test_weights_count_in_loss_and_metrics(found):
    words = [*WORDS, "--weights-name", "w", "--standardize"]
    data = ("--train", "a.parquet", "--val", "val.parquet")
    assert train(*words, "--learning-rate", "1e-30", "--run", "r", data=data) == 0
    history, model = told("r")["center"], keras.models.load_model("r/model.keras")
    x = np.stack([found["a"]["pt"], found["a"]["eta"]], 1)
    for prefix, some in (("", found["a"]), ("val_", found["val"])):
        x_of = (np.stack([some["pt"], some["eta"]], 1) - x.mean(0)) / x.std(0)
        outputs = np.asarray(model.predict(x_of.astype("f4"), verbose=0))
        labels, weights = some["label"], some["w"]
        losses = -np.log(outputs[np.arange(len(labels)), labels])
        assert history[f"{prefix}loss"][0] == pytest.approx((losses * weights).mean(), rel=1e-4)
        right = (outputs.argmax(1) == labels) * weights
        assert history[f"{prefix}accuracy"][0] == pytest.approx(right.sum() / weights.sum(), rel=1e-4)


def test_layers_have_rates_of_their_own(found):
    words = [*WORDS, "--batch", "60", "--no-shuffle", "--seed", "3", "--standardize"]
    kinds = {
        "begin": ["--learning-rate", "1e-30"],
        "plain": ["--learning-rate", "0.5"],
        "lars": ["--learning-rate", "0.5", "--layer-rates", "lars", "--trust", "0.1"],
        "larc": ["--learning-rate", "0.5", "--layer-rates", "larc", "--trust", "1e9"],
    }
    weights = {}
    for run, more in kinds.items():
        assert train(*words, *more, "--run", run, data=("--train", "a.parquet")) == 0
        model = keras.models.load_model(f"{run}/model.keras")
        assert type(model.optimizer).__module__.startswith("keras."), "it loads without nnlo"
        weights[run] = model.get_weights()
    moved, along = (weights[run][0] - weights["begin"][0] for run in ("lars", "plain"))
    assert np.linalg.norm(moved) == pytest.approx(0.05 * np.linalg.norm(weights["begin"][0]), rel=1e-4)
    unit = [one / np.linalg.norm(one) for one in (moved, along)]
    np.testing.assert_allclose(*unit, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(weights["lars"][1], weights["plain"][1], rtol=1e-5)
    for larc, plain in zip(weights["larc"], weights["plain"], strict=True):
        np.testing.assert_allclose(larc, plain, rtol=1e-5)


OF_KINDS = """
import keras

def get_model():
    kind = keras.Input((), dtype="int64")
    return keras.Model(kind, keras.layers.Softmax()(keras.layers.Embedding(6, 2)(kind)))
"""


# The model asks for int64, which JAX says it makes int32.
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")
def test_whole_numbers_are_trained_on_and_predicted_by_one_vocabulary(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw, columns = np.random.default_rng(0), {}
    for name, known in (("a", [-13, 11, 211]), ("val", [11, 22, 211])):
        columns[name] = {"pid": draw.choice(known, 40), "label": draw.integers(0, 2, 40)}
        pq.write_table(pa.table(columns[name]), f"{name}.parquet", row_group_size=7)
    Path("net.py").write_text(OF_KINDS)
    words = [*WORDS[:6], "--features-name", "pid", "--labels-name", "label", "--vocabulary", "pid"]
    data = ("--train", "a.parquet", "--val", "val.parquet")
    assert train(*words, "--run", "r", data=data) == 0
    pids = columns["val"]["pid"]
    unknown = int((pids == 22).sum())
    assert f"in the validation {unknown} of 40 values are unknown" in capsys.readouterr().out
    assert main(["predict", "r", "--data", "val.parquet", "--out", "p.npy"]) == 0
    assert f"pid: {unknown} of 40 values are unknown, and became 0" in capsys.readouterr().out
    model = keras.models.load_model("r/model.keras")
    wanted = model.predict(np.select([pids == 11, pids == 211], [2, 3], 0), verbose=0)
    np.testing.assert_allclose(np.load("p.npy"), wanted, atol=1e-6)
