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


def test_weights_count_in_loss_and_metrics(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw, found = np.random.default_rng(0), {}
    for name, size in [("a", 60), ("val", 50)]:
        label = draw.integers(0, 2, size)
        columns = {"pt": draw.gamma(2, 30, size) + 30 * label, "eta": draw.normal(0, 1, size)}
        found[name] = columns | {"label": label, "w": draw.random(size) * 3}
        pq.write_table(pa.table(found[name]), f"{name}.parquet", row_group_size=7)
    Path("net.py").write_text(MODEL)
    words = ["--model", "net.py", "--loss", "sparse_categorical_crossentropy", "--metrics", "accuracy"]
    words += ["--features-name", "pt,eta", "--labels-name", "label", "--weights-name", "w", "--standardize"]
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
