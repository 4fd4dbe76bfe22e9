"""`nnlo train` with PyTorch: alone in this process, then on three ranks, as users start it."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._cli import main
from nnlo_common.commands.report._run_reader import read_run
from nnlo_common.commands.train._settings import MODES
from tests.helpers.pages import code
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

torch_net = ["--model", "torch_net.py", "--loss", "cross_entropy", "--metrics", "accuracy"]
TORCH = """
import torch

def get_model(width=8, trains=True):
    layers = torch.nn.Linear(3, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    return torch.nn.Sequential(*layers).requires_grad_(trains)

def get_name():
    return "a net"

def half(output, labels):
    return ((output - labels) ** 2).mean() / 2

def outputs(output, labels):
    return output

def pair(output, labels):
    return output - labels
"""


@pytest.fixture(autouse=True)
def _files(tmp_path, monkeypatch):
    write_files(tmp_path, monkeypatch)
    Path("torch_net.py").write_text(TORCH)


@pytest.mark.framework("torch")
@pytest.mark.slow
def test_a_torch_module_trains_and_trains_the_same_again(capsys):
    import torch

    words = ["--epochs", "3", "--model-params", "width=16", "--timeline"]
    assert train(*torch_net, *ADAM, *words) == 0
    first = told("runs/a_net-1")
    assert first["center"].keys() == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert first["center"]["val_loss"][-1] < first["center"]["val_loss"][0]
    assert first["workers"] == []
    lines = Path("runs/a_net-1/ranks/facts.rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["what"] for line in lines].count("epoch") == 3
    names = {
        event["name"] for event in json.loads(Path("runs/a_net-1/ranks/timeline.rank0.json").read_text())
    }
    assert {"epoch 0", "epoch 2", "reads ahead", "validate"} <= names
    weights = torch.load("runs/a_net-1/weights.pt", weights_only=True)
    assert weights["0.weight"].shape == (16, 3)
    run = json.loads(Path("runs/a_net-1/run.json").read_text())
    assert run["ranks"][0]["role"] == "alone"
    assert run["versions"]["torch"].startswith(torch.__version__.partition("+")[0])
    assert run["command"].split()[0] == "nnlo"
    assert main(["train", "--config", "runs/a_net-1/config.toml"]) == 0
    logger = logging.getLogger("nnlo_common")
    assert (logger.handlers, logger.level, logger.propagate) == ([], logging.NOTSET, True), "as before"
    assert told("runs/a_net-2") == first
    again = torch.load("runs/a_net-2/weights.pt", weights_only=True)
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert Path("runs/a_net-1/config.toml").read_text() == Path("runs/a_net-2/config.toml").read_text()
    assert "a_net-2" in capsys.readouterr().out


@pytest.mark.framework("torch")
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_a_torch_module_alone(mode):
    assert train(*torch_net, "--mode", mode, "--run", "r") == 0
    assert len(told("r")["center"]["loss"]) == 1


@pytest.mark.framework("torch")
def test_a_torch_training_has_a_report_with_its_time(capsys):
    words = ["--epochs", "3", "--run", "r"]
    assert train(*torch_net, *ADAM, *words) == 0
    assert main(["report", "r"]) == 0
    assert "nnlo report: r/report.html" in capsys.readouterr().out
    run = read_run(Path("r"))
    (rank,) = run.ranks
    assert (rank.role, rank.samples, [one.samples for one in rank.epochs]) == ("alone", 420, [140] * 3)
    assert run.history == told("r")["center"]
    spent = rank.shares.seconds
    assert min(spent["compute"], spent["read"], spent["validate"]) > 0
    assert spent["wait"] == spent["idle"] == 0  # for whom?
    assert rank.shares.total_s <= run.seconds


@pytest.mark.framework("torch")
def test_a_torch_training_stops_at_its_target_or_early():
    assert train(*torch_net, *ADAM, "--epochs", "9", "--target-metric", "val_loss < 9", "--run", "r") == 0
    assert len(told("r")["center"]["loss"]) == 1
    slow = ["--learning-rate", "1e-30", "--early-stopping", "2", "--early-stopping-metric", "accuracy"]
    assert train(*torch_net, *slow, "--epochs", "9", "--run", "s") == 0
    assert len(told("s")["center"]["loss"]) == 3


@pytest.mark.framework("torch")
def test_a_torch_training_goes_on_from_its_checkpoint(capsys):
    words = [*torch_net, *ADAM, "--epochs", "4", "--seed", "3"]
    assert train(*words, "--run", "whole") == 0
    assert train(*words, "--run", "r", "--checkpoint") == 0
    Path("r/history.json").unlink()  # as if killed after the last epoch
    assert train(*words, "--run", "r", "--checkpoint") == 0
    assert told("r") == told("whole")
    assert train(*words, "--run", "r", "--checkpoint") == 2
    assert "has a complete training" in capsys.readouterr().err


def weights_of(folder):
    import torch

    return {name: one.tolist() for name, one in torch.load(f"{folder}/weights.pt", weights_only=True).items()}


@pytest.mark.framework("torch")
def test_the_epochs_of_a_finished_torch_training_can_be_raised(capsys):
    words = [*torch_net, *ADAM, "--seed", "3"]
    assert train(*words, "--epochs", "5", "--run", "whole") == 0
    assert train(*words, "--epochs", "2", "--run", "r", "--checkpoint") == 0
    assert train(*words, "--epochs", "5", "--run", "r", "--checkpoint") == 0
    assert told("r") == told("whole")
    assert weights_of("r") == weights_of("whole")
    assert train(*words, "--epochs", "4", "--run", "r", "--checkpoint") == 2
    assert "--epochs 4: --run" in capsys.readouterr().err


@pytest.mark.framework("torch")
def test_a_finished_run_stays_as_it_was_if_it_cannot_be_continued(monkeypatch, capsys):
    import nnlo_torch

    words = [*torch_net, *ADAM, "--run", "r", "--checkpoint"]
    assert train(*words, "--epochs", "2") == 0
    before = {name: Path("r", name).read_bytes() for name in ("config.toml", "history.json")}

    def refuse(*arguments, **options):
        raise ConfigurationError("the newest checkpoint belongs to another training")

    with monkeypatch.context() as patch:
        patch.setattr(nnlo_torch, "Checkpoint", refuse)
        assert train(*words, "--epochs", "3") != 0
    assert "belongs to another training" in capsys.readouterr().err
    assert {name: Path("r", name).read_bytes() for name in before} == before
    assert train(*words, "--epochs", "2") == 2
    assert "has a complete training of --epochs 2" in capsys.readouterr().err
    assert train(*words, "--epochs", "3") == 0


@pytest.mark.framework("torch")
@pytest.mark.parametrize(("words", "rates"), SCHEDULES.values(), ids=SCHEDULES)
def test_the_torch_learning_rate_follows_the_schedule(words, rates):
    check_schedule(torch_net, words, rates, weights_of)


@pytest.mark.framework("torch")
def test_a_torch_training_that_stopped_early_says_why_and_goes_on_if_asked(capsys):
    check_early_stopping(torch_net, weights_of, capsys)


@pytest.mark.framework("torch")
@pytest.mark.parametrize("kind", ["run", "plain", "nested", "npz", "safetensors"])
def test_a_torch_training_begins_with_the_weights_of_a_file(kind):
    import torch

    words = [*torch_net, *ADAM, "--batch", "35"]
    assert train(*words, "--run", "first", "--seed", "5") == 0
    weights = torch.load("first/weights.pt", weights_only=True)
    name = {"run": "first", "npz": "w.npz", "safetensors": "w.safetensors"}.get(kind, "w.pt")
    if kind == "npz":
        np.savez(name, **{key: one.numpy() for key, one in weights.items()})
    elif kind == "safetensors":
        pytest.importorskip("safetensors.torch", reason="it reads these files").save_file(weights, name)
    elif kind != "run":
        torch.save({"epoch": 3, "model": weights} if kind == "nested" else weights, name)
    assert train(*words, "--learning-rate", "1e-30", "--from", name, "--run", "r") == 0
    assert weights_of("r") == weights_of("first")
    assert told("r")["center"]["val_loss"][-1] == told("first")["center"]["val_loss"][-1]
    assert train("--config", "r/config.toml", "--run", "again", data=()) == 0
    assert weights_of("again") == weights_of("first")


@pytest.mark.framework("torch")
def test_weights_that_do_not_fit_or_run_code_are_refused_before_the_training(capsys):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
    torch.save(model.state_dict(), "narrow.pt")
    said = refused(capsys, *torch_net, "--from", "narrow.pt")
    assert "narrow.pt does not fit the model" in said
    assert "0.weight" in said
    torch.save(model, "code.pt")
    assert "add --allow-pickle if you trust it" in refused(capsys, *torch_net, "--from", "code.pt")
    Path("w.keras").write_bytes(b"x")
    assert "is not a file of weights for torch" in refused(capsys, *torch_net, "--from", "w.keras")
    assert "no such file" in refused(capsys, *torch_net, "--from", "none.pt").lower()
    Path("empty").mkdir()
    assert "is a folder without model.keras or weights.pt" in refused(capsys, *torch_net, "--from", "empty")
    words = [*torch_net, "--model-params", "width=5", "--from", "code.pt", "--allow-pickle"]
    assert train(*words, "--learning-rate", "1e-30", "--run", "r") == 0
    assert weights_of("r") == {name: one.tolist() for name, one in model.state_dict().items()}


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("keras_name", "ours"), [("mse", "mse_loss"), ("categorical_crossentropy", "cross_entropy,")]
)
def test_a_loss_by_the_name_of_keras_is_answered_with_that_of_torch(keras_name, ours, capsys):
    words = [keras_name if word == "cross_entropy" else word for word in torch_net]
    assert train(*words, *ADAM) == 2
    assert f"--loss {keras_name}: not found in PyTorch" in (told := capsys.readouterr().err)
    assert f"; PyTorch calls it {ours}" in told


@pytest.mark.framework("torch")
def test_a_torch_training_that_was_killed_ends_as_one_that_was_not(monkeypatch, capsys):
    import torch

    from nnlo_torch import _train

    words = [*torch_net, *ADAM, "--epochs", "4"]
    assert train(*words, "--run", "whole") == 0
    epoch = _train.TorchTrainer._epoch

    def killed(self, course, checkpoint):
        if len(course.center.get("loss", [])) == 2:
            raise KeyboardInterrupt
        return epoch(self, course, checkpoint)

    with monkeypatch.context() as patched:
        patched.setattr(_train.TorchTrainer, "_epoch", killed)
        assert train(*words, "--run", "r", "--checkpoint") == 130
    capsys.readouterr()
    assert train(*words, "--run", "r", "--checkpoint") == 0
    assert set(re.findall(r"^epoch +(\d)", capsys.readouterr().out, re.MULTILINE)) == {"3", "4"}
    assert told("r") == told("whole")
    one, other = (torch.load(f"{run}/weights.pt", weights_only=True) for run in ("r", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.framework("torch")
@pytest.mark.parametrize("saving", [[], ["--checkpoint"]])
def test_what_to_do_stands_before_the_traceback_of_a_users_error(saving, capsys, monkeypatch):
    import torch

    calls = []

    def broken(output, labels):
        calls.append(1)
        if len(calls) > 3:  # after the trial, within the first epoch
            raise RuntimeError("a broken cable")
        return torch.nn.functional.cross_entropy(output, labels.long())

    monkeypatch.setattr(torch.nn.functional, "broken_loss", broken, raising=False)
    with pytest.raises(RuntimeError, match="cable"):
        train("--model", "torch_net.py", "--loss", "broken_loss", "--run", "r", *saving)
    said = capsys.readouterr().err
    assert said.startswith("nnlo train: RuntimeError: a broken cable\n")
    assert "test_train.py, line " in said.splitlines()[1]
    assert 'in broken: raise RuntimeError("a broken cable")' in said.splitlines()[1]
    assert ("rerun the same command to resume from the last checkpoint in " in said) == bool(saving)


@pytest.mark.framework("torch")
def test_a_loss_of_the_python_file_is_taken():
    words = ["--model", "torch_net.py", "--labels-name", "one_hot", "--run", "r"]
    assert train(*words, "--loss", "half", "--metrics", "mse_loss", "accuracy") == 0
    center = told("r")["center"]
    assert center["loss"][0] == pytest.approx(center["mse_loss"][0] / 2)


@pytest.mark.framework("torch")
@pytest.mark.parametrize("shape", [(4,), (4, 2, 2)], ids=["classes", "segments"])
def test_accuracy_takes_labels_in_a_column_of_their_own(shape):
    import torch

    from nnlo_torch import _train

    labels = torch.arange(4).reshape(4, *[1] * (len(shape) - 1)).expand(shape) % 3
    output = torch.nn.functional.one_hot((labels + (labels == 2)) % 3, 3).movedim(-1, 1).float()
    for given in (labels, labels.unsqueeze(1), labels.to(torch.uint8).unsqueeze(1)):
        assert _train.accuracy(output, given).item() == 0.75
        assert _train._correct(output, given).shape == shape


@pytest.mark.framework("torch")
def test_the_python_file_in_the_guide_trains():
    import h5py

    (block,) = code("python", "docs/train.md")
    Path("guide.py").write_text(block)
    Path("train").mkdir()
    with h5py.File("train/a.h5", "w") as file:
        file["jets"], file["mass"] = np.ones((50, 4)), np.full((50, 1), 2.0)
    words = ["--model", "guide.py", "--model-params", "width=8", "--loss", "relative", "--epochs", "3"]
    assert train(*words, "--optimizer", "adam", data=()) == 0
    losses = told("runs/jets-1")["center"]["loss"]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.framework("torch")
def test_several_inputs_and_adaptors_are_taken():
    Path("two.py").write_text(
        """
import torch

class Two(torch.nn.Module):
    def __init__(self, named):
        super().__init__()
        self.named, self.layer = named, torch.nn.Linear(5, 2)

    def forward(self, x, y=None):
        x, y = (x["a"], x["b"]) if self.named else (x, y)
        return self.layer(torch.cat([x, y], dim=1))

def get_model(named=False):
    return Two(named)

def get_labels():
    return "labels", lambda labels: 1 - labels
"""
    )
    words = ["--model", "two.py", "--loss", "cross_entropy", "--features-name", "features", "one_hot"]
    assert train(*words, "--run", "r") == 0
    text = Path("two.py").read_text()
    adapted = "\ndef get_features():\n    return 'features', lambda x: {'a': x, 'b': x[:, :2]}\n"
    Path("named.py").write_text(text + adapted)
    named = ["--model", "named.py", "--model-params", "named=true", "--loss", "cross_entropy"]
    assert train(*named, "--run", "s") == 0


@pytest.mark.framework("torch")
def test_a_pickled_torch_module_is_taken_if_trusted(capsys):
    import torch

    torch.save(torch.nn.Linear(3, 2), "m.pt")
    assert "--allow-pickle" in refused(capsys, "--model", "m.pt", "--loss", "cross_entropy")
    assert train("--model", "m.pt", "--loss", "cross_entropy", "--allow-pickle", "--run", "r") == 0
    torch.save(torch.nn.Linear(3, 2).state_dict(), "w.pt")
    assert train("--model", "w.pt", "--loss", "cross_entropy", "--allow-pickle") == 2
    assert "holds weights" in capsys.readouterr().err


BROKEN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 2)

    def forward(self, x):
        return self.layer(x)  # MARK

def get_model():
    return Net() if %r == "forward" else torch.nn.Linear(3, 2)

def mine(output, labels):
    return output[7].mean()  # MARK

def adapted(x):
    return x[0, 0, 0]  # MARK

def get_features():
    return "features", adapted if %r == "adapted" else None
"""


@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    ("what", "words", "error"),
    [
        ("forward", ["--loss", "cross_entropy"], "RuntimeError: mat1 and mat2"),
        ("mine", ["--loss", "mine"], "IndexError: index 7 is out of bounds"),
        ("mine", ["--loss", "cross_entropy", "--metrics", "mine"], "IndexError: index 7 is out of bounds"),
        ("adapted", ["--loss", "cross_entropy"], "IndexError: too many indices"),
    ],
)
def test_an_error_in_the_users_code_shows_its_line_and_does_not_blame_options(what, words, error, capsys):
    Path("broken.py").write_text(BROKEN % (what, what))
    said = refused(capsys, "--model", "broken.py", *words)
    lines = BROKEN.splitlines()
    number = next(at + 1 for at, line in enumerate(lines, 1) if f"def {what}(" in line)
    assert f"broken.py, line {number}, in {what}: {lines[number - 1].strip()}" in said
    assert error in said
    assert "Choose another" not in said


WRONG_TORCH = {
    "unknown loss": (["--loss", "cross_entropi"], "did you mean 'cross_entropy'?"),
    "Keras's loss": (["--loss", "mean_squared_error"], "not found in PyTorch"),
    "a loss that is no number": (["--loss", "pair", "--labels-name", "one_hot"], "and not one number"),
    "labels that are broadcast": (["--loss", "mse_loss"], "Using a target size"),
    "labels of three": (["--labels-name", "three"], "labels float32 (None, 3)"),
    "unknown metric": (["--metrics", "accurac"], "did you mean 'accuracy'?"),
    "a metric that is no number": (["--metrics", "outputs"], "the score 'outputs' is tensor("),
    "nothing to train": (["--model-params", "trains=false"], "has no parameters to train"),
    "unknown optimizer": (["--optimizer", "adan"], "did you mean 'Adam'?"),
    "an unknown option of it": (["--optimizer-option", "nestero=true"], "did you mean 'nesterov'?"),
    "an impossible one": (["--optimizer-option", "nesterov=true"], "Nesterov momentum requires"),
    "momentum of Adam": (["--optimizer", "adam", "--momentum", "0.9"], "takes no 'momentum'"),
    "GEM of Nesterov": (
        ["--mode", "gem", "--momentum", "0.9", "--optimizer-option", "nesterov=true"],
        "nesterov",
    ),
    "an optimizer that cannot be wrapped": (["--optimizer", "lbfgs"], "cannot wrap LBFGS"),
    "no such dataset": (["--labels-name", "label"], "Did you mean 'labels'?"),
    "an unknown target": (["--target-metric", "val_acc > 1"], "the metrics are loss, accuracy, val_loss"),
}


@pytest.mark.framework("torch")
@pytest.mark.parametrize(("words", "expected"), WRONG_TORCH.values(), ids=WRONG_TORCH)
def test_what_torch_cannot_train_is_refused(words, expected, capsys):
    assert expected in refused(capsys, *torch_net, *words)


NEW = {
    "EAMSGD": "--mode eamsgd --every 3 --beta-per step --synchronous --momentum 0.5 "
    "--optimizer-option nesterov=true --learning-rate 0.1",
    "Downpour": "--mode downpour --every 4 --n-fetch 2 --local 0.05 --warm-start 1 --learning-rate 0.05",
    "GEM": "--mode gem --every 2 --clip 4 --no-primed --momentum 0.5 --learning-rate 0.05",
}


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_three_ranks_stop_early_together_and_go_on_if_asked():
    check_early_stopping_on_three_ranks(torch_net, "torch")


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
def test_files_with_more_samples_are_refused_on_another_number_of_ranks():
    check_another_data_set(torch_net, "torch")


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
def test_an_epoch_without_a_step_has_no_number_as_its_loss():
    """A step that comes late counts for the next epoch, which is all of it if there is one sample."""
    import h5py

    with h5py.File("one.h5", "w") as file:
        file["features"], file["labels"] = np.ones((1, 3), "f4"), np.ones(1, "i4")
    words = ["--train", "one.h5", "--val", "val.h5", "--batch", "10", "--epochs", "3", "--run", "r"]
    words += ["--early-stopping", "3", "--early-stopping-metric", "loss"]
    done = started(*torch_net, *words, framework="torch")
    assert done.returncode == 0, done.stderr
    assert {len(values) for values in told("r")["center"].values()} == {3}


@pytest.mark.sampled(3)
@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("words", NEW.values(), ids=NEW)
def test_three_ranks_train_with_the_options_of_a_mode(words):
    data = ["--train", "?.h5", "--val", "val.h5", "--batch", "10", "--epochs", "3", "--run", "r"]
    done = started(*torch_net, *data, *words.split(), framework="torch")
    assert done.returncode == 0, done.stderr
    found = told("r")["center"]["val_loss"]
    assert found[-1] < found[0]
    assert main(["train", "--config", "r/config.toml", "--run", "again"]) == 0  # it has all of them


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_ranks_train_in_a_tree_of_servers():
    check_tree(torch_net, "torch")


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
def test_three_ranks_train_a_torch_module():
    data = ["--train", "?.h5", "--val", "val.h5", "--batch", "10"]
    options = ["--mode", "easgd", "--every", "2", "--epochs", "3", "--checkpoint", "--run", "r"]
    options += ["--early-stopping", "7"]
    done = started(*torch_net, *data, *ADAM, *options, framework="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nnlo train: easgd --every 2, 1 serving, 2 training") == 1
    assert len(set(re.findall(r"^epoch +\d", done.stdout, re.MULTILINE))) == 3
    found = told("r")
    assert found["center"]["val_loss"][-1] < found["center"]["val_loss"][0]
    assert [worker["role"] for worker in found["workers"]] == ["worker 0", "worker 1"]
    assert all(len(worker["history"]["loss"]) == 3 for worker in found["workers"])
    assert {path.name for path in Path("r").iterdir()} == {
        "checkpoint", "config.toml", "history.json", "ranks", "run.json", "weights.pt",
    }  # fmt: skip
    assert {path.name for path in Path("r/ranks").iterdir()} == {
        name for rank in range(3) for name in (f"live.rank{rank}.json", f"facts.rank{rank}.jsonl")
    }
    assert "nnlo train: kept the weights of epoch 3, whose val_loss is the best" in done.stdout
    (server, *_) = json.loads(Path("r/run.json").read_text())["ranks"]
    assert (server["role"], server["samples"]) == ("server 0", 3 * 140)


@pytest.mark.sampled(3)
@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words", "told_ranks"),
    [(2, ["--servers", "0"], "0 serving, 1 x 2"), (3, ["--group-size", "2"], "1 serving, 1 x 2")],
)
def test_two_ranks_of_a_group_train_as_one_process_with_twice_the_batch(ranks, words, told_ranks):
    import torch

    data = ["--train", "?.h5", "--val", "val.h5", "--epochs", "3", *ADAM]
    done = started(
        *torch_net,
        *data,
        "--batch",
        "70",
        "--mode",
        "downpour",
        *words,
        "--run",
        "r",
        ranks=ranks,
        framework="torch",
    )
    assert done.returncode == 0, done.stderr
    assert f"nnlo train: downpour, {told_ranks} training" in done.stdout
    assert main(["train", *torch_net, *data, "--batch", "140", "--run", "alone"]) == 0
    center, alone = (torch.load(f"{run}/weights.pt", weights_only=True) for run in ("r", "alone"))
    for name, weights in alone.items():
        torch.testing.assert_close(center[name], weights, rtol=0, atol=1e-5)
    assert told("r")["center"]["val_loss"] == pytest.approx(told("alone")["center"]["val_loss"], abs=1e-5)
    samples = [one["samples"] for one in json.loads(Path("r/run.json").read_text())["ranks"][-2:]]
    assert samples == [3 * 70, 3 * 70]


@pytest.mark.sampled(3)
@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--servers", "3"], "3 ranks cannot be laid out"),
        (["--group-size", "3"], "3 - 1 server = 2 worker ranks, fewer than group_size=3"),
        (["--epochs", "0"], "--epochs '0' is not possible"),
        (
            ["--mode", "easgd", "--every", "1", "--sub-servers", "host", "--sub-every", "9"],
            "make 2 exchanges in 1 epochs, so it would never exchange with the top server",
        ),
        pytest.param(["--labels-name", "three"], "do not fit", marks=pytest.mark.extended),
        (["--mode", "diloco"], "exchanges every 500 steps of a worker, but each has 1 steps"),
        pytest.param(
            ["--mode", "easgd", "--order", "paper", "--every", "1"],
            "the centre would not move. Give more --epochs",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_what_is_refused_is_told_once_by_three_ranks(words, expected):
    done = started(*torch_net, "--train", "?.h5", *words, framework="torch")
    assert done.returncode == 2
    assert done.stderr.count("nnlo train: ") == 1
    assert expected in done.stderr
    assert not Path("runs").exists()


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.extended
def test_three_ranks_go_on_from_the_checkpoint_of_those_that_were_killed():
    Path("fails.py").write_text(
        TORCH.replace("import torch", "import os, torch\n\ncalls = []")
        + """
def mean(output, labels):
    calls.append(1)
    if os.environ.get("FAIL") and len(calls) == 30:
        raise RuntimeError("a broken cable")
    return torch.nn.functional.cross_entropy(output, labels.long())
"""
    )
    words = [
        "--model",
        "fails.py",
        "--loss",
        "mean",
        "--train",
        "?.h5",
        "--batch",
        "10",
        "--mode",
        "synchronous",
    ]
    words += ["--epochs", "6", "--run", "r", "--checkpoint", *ADAM]
    done = started(*words, env={"FAIL": "1"}, framework="torch")
    assert done.returncode == 1
    assert "a broken cable" in done.stderr
    assert not Path("r/history.json").exists()
    done = started(*words, framework="torch")
    assert done.returncode == 0, done.stderr
    went_on = len(set(re.findall(r"^epoch +\d", done.stdout, re.MULTILINE)))
    assert 0 < went_on < 6
    losses = told("r")["center"]["loss"]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert len(told("r")["workers"][0]["history"]["loss"]) == 6


@pytest.mark.framework("torch")
@pytest.mark.mpi
@pytest.mark.slow
def test_what_goes_wrong_in_the_training_ends_all_ranks():
    import h5py

    with h5py.File("b.h5", "a") as file:
        file["features"][:] = np.nan
    done = started(
        *torch_net, "--train", "?.h5", "--batch", "10", "--check-finite", "--no-shuffle", framework="torch"
    )
    assert done.returncode == 1
    assert "b.h5: sample" in done.stderr
    assert "Traceback" not in done.stderr
