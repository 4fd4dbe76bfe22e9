"""`nnlo train` with Keras: alone in this process, on whatever back end, then the example on three ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from nnlo_common.commands._cli import main
from tests.helpers.paths import EXAMPLES
from tests.helpers.train_command import (
    ADAM,
    SCHEDULES,
    check_another_data_set,
    check_early_stopping,
    check_early_stopping_on_three_ranks,
    check_schedule,
    check_tree,
    refused,
    started,
    told,
    train,
    write_files,
)

# Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
keras_warns = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
keras_net = ["--model", "keras_net.py", "--loss", "sparse_categorical_crossentropy", "--metrics", "accuracy"]
KERAS = """
def get_model(width=8):
    import keras
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(width, activation="relu"), keras.layers.Dense(2, "softmax")]
    )
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    Path("keras_net.py").write_text(KERAS)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_keras_model_trains_and_trains_the_same_again():
    import keras

    assert train(*keras_net, *ADAM, "--epochs", "3", "--timeline") == 0
    first = told("runs/keras_net-1")
    assert first["center"].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert first["center"]["val_loss"][-1] < first["center"]["val_loss"][0]
    lines = Path("runs/keras_net-1/ranks/facts.rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines].count("epoch") == 3
    assert json.loads(Path("runs/keras_net-1/ranks/timeline.rank0.json").read_text())
    model = keras.models.load_model("runs/keras_net-1/model.keras")
    assert type(model.optimizer).__name__ == "Adam"
    assert int(model.optimizer.iterations) == 3 * 14
    assert main(["train", "--config", "runs/keras_net-1/config.toml"]) == 0
    assert told("runs/keras_net-2") == first
    again = keras.models.load_model("runs/keras_net-2/model.keras")
    for one, other in zip(model.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
@pytest.mark.parametrize("name", ["m.json", "m.keras"])
def test_keras_files_train(name):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "softmax")])
    if name == "m.json":
        Path(name).write_text(model.to_json())
    else:
        model.save(name)
    words = ["--model", name, "--loss", "categorical_crossentropy", "--labels-name", "one_hot"]
    assert (
        train(*words, *ADAM, "--epochs", "9", "--target-metric", "val_loss < 9", "--early-stopping", "2") == 0
    )
    assert len(told("runs/m-1")["center"]["loss"]) == 1


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_the_epochs_of_a_finished_keras_training_can_be_raised(capsys):
    words = [*keras_net, *ADAM]
    assert train(*words, "--epochs", "4", "--run", "whole") == 0
    assert train(*words, "--epochs", "2", "--run", "r", "--checkpoint") == 0
    assert train(*words, "--epochs", "4", "--run", "r", "--checkpoint") == 0
    assert told("r") == told("whole")
    assert train(*words, "--epochs", "3", "--run", "r", "--checkpoint") == 2
    assert "--epochs 3: --run" in capsys.readouterr().err


KINDS = {name: one for name, one in SCHEDULES.items() if name != "exponential"}  # which the warm-up has


def weights_of(folder):
    import keras

    return [one.tolist() for one in keras.models.load_model(f"{folder}/model.keras").get_weights()]


@pytest.mark.sampled(4)
@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
@pytest.mark.parametrize(("words", "rates"), KINDS.values(), ids=KINDS)
def test_the_keras_learning_rate_follows_the_schedule(words, rates):
    check_schedule(keras_net, words, rates, weights_of)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_keras_training_that_stopped_early_says_why_and_goes_on_if_asked(capsys):
    check_early_stopping(keras_net, weights_of, capsys)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_keras_training_begins_with_the_weights_of_a_file(capsys):
    import keras

    words = [*keras_net, *ADAM, "--batch", "35"]
    assert train(*words, "--run", "first", "--seed", "5") == 0
    keras.models.load_model("first/model.keras").save_weights("w.weights.h5")
    for number, name in enumerate(["first", "w.weights.h5"]):
        assert train(*words, "--learning-rate", "1e-30", "--from", name, "--run", f"r{number}") == 0
        assert weights_of(f"r{number}") == weights_of("first")
    said = refused(capsys, *words, "--model-params", "width=5", "--from", "w.weights.h5")
    assert "w.weights.h5 does not fit the model" in said
    Path("w.pt").write_bytes(b"x")
    assert "is not a file of weights for keras" in refused(capsys, *words, "--from", "w.pt")


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_loss_by_the_name_of_torch_is_answered_with_that_of_keras(capsys):
    words = ["cross_entropy" if word == "sparse_categorical_crossentropy" else word for word in keras_net]
    assert "cross_entropy" in words
    assert train(*words, *ADAM) == 2
    assert "; Keras calls it categorical_crossentropy, or sparse_" in capsys.readouterr().err


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_keras_training_goes_on_from_its_checkpoint(monkeypatch):
    import keras

    from nnlo_keras import _train

    words = [*keras_net, *ADAM, "--epochs", "4"]
    assert train(*words, "--run", "whole") == 0

    class Killed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise KeyboardInterrupt

    made = _train.KerasTrainer._callbacks
    monkeypatch.setattr(
        _train.KerasTrainer, "_callbacks", lambda self, folder: [*made(self, folder), Killed()]
    )
    assert train(*words, "--run", "r", "--checkpoint") == 130
    monkeypatch.setattr(_train.KerasTrainer, "_callbacks", made)
    assert train(*words, "--run", "r", "--checkpoint") == 0
    one, other = told("r")["center"], told("whole")["center"]
    for name in other:
        assert one[name] == pytest.approx(other[name], rel=1e-5)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_lambda_layers_are_taken_if_trusted(capsys):
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: 2 * x), keras.layers.Dense(2)])
    Path("m.json").write_text(model.to_json())
    model.save("m.keras")
    words = ["--loss", "mse", "--labels-name", "one_hot"]
    assert "is a Lambda" in refused(capsys, "--model", "m.json", *words)
    assert "is a Lambda" in refused(capsys, "--model", "m.keras", *words)
    assert train("--model", "m.json", *words, "--allow-pickle") == 0
    assert train("--model", "m.keras", *words, "--allow-pickle") == 0


BROKEN = """
import keras

class Net(keras.Model):
    def call(self, x):
        return x[:, 0] + keras.ops.ones((7, 7))  # MARK

def mine(labels, output):
    return missing  # MARK

def get_model():
    inputs = keras.Input((3,))
    return Net() if %r == "call" else keras.Model(inputs, keras.layers.Dense(2)(inputs))
"""


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
@pytest.mark.parametrize(("what", "loss"), [("call", "mse"), ("mine", "mine")])
def test_an_error_in_the_users_code_shows_its_line_and_does_not_blame_options(what, loss, capsys):
    Path("broken.py").write_text(BROKEN % what)
    said = refused(capsys, "--model", "broken.py", "--loss", loss, "--labels-name", "one_hot")
    number = 6 if what == "call" else 9
    assert f"broken.py, line {number}, in {what}: " in said
    assert "Choose another" not in said


WRONG_KERAS = {
    "unknown loss": (["--loss", "sparse_categorical_crosentropy"], "'sparse_categorical_crossentropy'?"),
    "labels of three": (["--loss", "mse", "--labels-name", "three"], "labels of (2, 3)"),
    "labels that would be broadcast": (["--loss", "mse"], "compares an output of (2, 2) with labels of (2,)"),
    "features of another shape": (["--features-name", "one_hot"], "features (None, 2)"),
    "unknown metric": (["--metrics", "accurac"], "did you mean 'accuracy'?"),
    "unknown optimizer": (["--optimizer", "adan"], "did you mean 'Adam'?"),
    "an unknown option of it": (["--optimizer-option", "nestero=true"], "did you mean 'nesterov'?"),
    "a value that it cannot have": (["--optimizer-option", "clipnorm=1", "clipvalue=1"], "Only one of"),
    "no such dataset": (["--labels-name", "label"], "Did you mean 'labels'?"),
    "an unknown target": (["--target-metric", "val_acc > 1"], "the metrics are loss, accuracy, val_loss"),
}


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
@pytest.mark.parametrize(("words", "expected"), WRONG_KERAS.values(), ids=WRONG_KERAS)
def test_what_keras_cannot_train_is_refused(words, expected, capsys):
    assert expected in refused(capsys, *keras_net, *words)


@pytest.mark.framework("keras")
@pytest.mark.slow
def test_a_layer_that_keras_does_not_know_is_refused(capsys):
    layer = {"module": "keras.layers", "class_name": "Conv7D", "config": {}, "registered_name": None}
    Path("m.json").write_text(
        json.dumps({"module": "keras", "class_name": "Sequential", "config": {"layers": [layer]}})
    )
    said = refused(capsys, "--model", "m.json", "--loss", "mse")
    assert "cannot build the model" in said
    assert "Conv7D" in said


@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_three_ranks_stop_early_together_and_go_on_if_asked():
    check_early_stopping_on_three_ranks(keras_net, "keras")


@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_files_with_more_samples_are_refused_on_another_number_of_ranks():
    check_another_data_set(keras_net, "keras")


@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_ranks_train_in_a_tree_of_servers():
    check_tree(keras_net, "keras")


@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
def test_the_example_trains_on_three_ranks(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import toy_images

    toy_images.write("toy", files=2, samples=300, seed=0)
    env = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    words = "--loss categorical_crossentropy --metrics accuracy --batch 20 --epochs 4 --optimizer adam "
    words += "--early-stopping 7"
    files = ["--model", str(EXAMPLES / "cifar10.json"), "--train", "toy/train.list", "--val", "toy/val.list"]
    done = started(
        *files, *words.split(), "--learning-rate", "0.002", timeout_s=110, env=env, framework="keras"
    )
    assert done.returncode == 0, done.stderr
    center = told("runs/cifar10-1")["center"]
    assert center["val_loss"][-1] < center["val_loss"][0]
    assert len(told("runs/cifar10-1")["workers"]) == 2
    assert "nnlo train: kept the weights of epoch " in done.stdout
    assert Path("runs/cifar10-1/model.keras").is_file()


@pytest.mark.sampled(3)
@pytest.mark.framework("keras")
@pytest.mark.mpi
@pytest.mark.slow
@keras_warns
@pytest.mark.parametrize(("ranks", "words"), [(2, ["--servers", "0"]), (3, ["--group-size", "2"])])
def test_two_ranks_of_a_group_train_as_one_process_with_twice_the_batch(ranks, words):
    import keras

    data = ["--train", "?.h5", "--val", "val.h5", "--epochs", "3", *ADAM]
    done = started(
        *keras_net,
        *data,
        "--batch",
        "70",
        "--mode",
        "downpour",
        *words,
        "--run",
        "r",
        ranks=ranks,
        framework="keras",
    )
    assert done.returncode == 0, done.stderr
    assert main(["train", *keras_net, *data, "--batch", "140", "--run", "alone"]) == 0
    center, alone = (keras.models.load_model(f"{run}/model.keras").get_weights() for run in ("r", "alone"))
    for ours, theirs in zip(center, alone, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert told("r")["center"]["val_loss"] == pytest.approx(told("alone")["center"]["val_loss"], abs=1e-5)


@pytest.mark.framework("keras")
@pytest.mark.slow
@keras_warns
def test_a_metric_of_several_numbers_is_refused_before_the_training(capsys):
    words = ["--model", "keras_net.py", "--loss", "categorical_crossentropy", "--labels-name", "one_hot"]
    assert train(*words, *ADAM, "--epochs", "1", "--metrics", "F1Score") == 2
    assert "--metrics F1Score gives 2 numbers" in capsys.readouterr().err
