"""`nnlo train` with PyTorch on ROOT files: weights, cuts, padding and standardised features."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
pytest.importorskip("uproot", reason="the environment for MPICH has no readers of files")
import awkward as ak
import h5py
import torch
import uproot

from nnlo_common.commands._cli import main
from nnlo_common.data import FileSource
from tests.helpers.train_command import refused, started, told, train

pytestmark = [pytest.mark.framework("torch"), pytest.mark.slow]

DATA = ("--train", "[ab].root:events", "--val", "val.root:events")
NET = ["--model", "net.py", "--loss", "cross_entropy", "--metrics", "accuracy"]
WORDS = ["--features-name", "pt,eta", "--labels-name", "label"]
MODEL = """
import torch

def get_model():
    return torch.nn.Linear(2, 2)

def two(output, labels):
    return (output - labels).square().mean()

def three(output, labels, weights):
    each = torch.nn.functional.cross_entropy(output, labels, reduction="none")
    return (each * weights).sum() / len(weights)


"""
OF_SETS = """
import torch

class Sets(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(2, 2)

    def forward(self, x, mask):
        assert (x[~mask] == 0).all()
        return self.out((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))

get_model = Sets
"""


@pytest.fixture(autouse=True)
def columns(tmp_path, monkeypatch):
    """Return the columns of two files to train on, and of one to validate with."""
    monkeypatch.chdir(tmp_path)
    draw, found = np.random.default_rng(0), {}
    for name, size in [("a", 60), ("b", 40), ("val", 50)]:
        label = draw.integers(0, 2, size)
        counts = draw.integers(0, 5, size)
        one = {
            "pt": draw.gamma(2, 30, size) + 30 * label,
            "eta": draw.normal(0, 1 + label, size),
            "label": label,
            "w": draw.random(size) * 3,
        }
        hits = ak.unflatten(draw.normal(0, 1, counts.sum()), counts)
        with uproot.recreate(f"{name}.root") as file:
            kinds = {key: values.dtype for key, values in one.items()}
            tree = file.mktree("events", {**kinds, "hit_x": "var * float64", "hit_y": "var * float64"})
            tree.extend({**one, "hit_x": hits, "hit_y": hits * 2})
        found[name] = one
    Path("net.py").write_text(MODEL)
    Path("sets.py").write_text(OF_SETS)
    return found


def outputs(run, x):
    weights = torch.load(f"{run}/weights.pt", weights_only=True)
    return x.astype("f4") @ weights["weight"].numpy().T + weights["bias"].numpy()


def losses(found, labels):
    shifted = found - found.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]


@pytest.mark.parametrize("loss", ["cross_entropy", "three"])
def test_weights_count_in_loss_and_metrics(columns, loss):
    words = ["--weights-name", "w", "--select", "pt > 40", "--standardize", "--learning-rate", "1e-30"]
    net = [*NET[:3], loss, *NET[4:]]
    assert train(*net, *WORDS, *words, "--run", "r", data=DATA) == 0
    training = {key: np.concatenate([columns[name][key] for name in "ab"]) for key in columns["a"]}
    kept = training["pt"] > 40
    x = np.stack([training["pt"], training["eta"]], 1)[kept]
    (standard,) = json.loads(Path("r/standard.json").read_text())["features"]
    np.testing.assert_allclose(standard["mean"], x.mean(0))
    np.testing.assert_allclose(standard["spread"], x.std(0))
    history = told("r")["center"]
    for prefix, some in (("", training), ("val_", columns["val"])):
        used = some["pt"] > 40
        x_of = (np.stack([some["pt"], some["eta"]], 1)[used] - x.mean(0)) / x.std(0)
        labels, weights = some["label"][used], some["w"][used]
        found = outputs("r", x_of)
        assert history[f"{prefix}loss"][0] == pytest.approx(
            (losses(found, labels) * weights).mean(), rel=1e-4
        )
        right = found.argmax(1) == labels
        assert history[f"{prefix}accuracy"][0] == pytest.approx(
            (right * weights).sum() / weights.sum(), rel=1e-4
        )
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_one_step_goes_along_the_gradient_of_the_weighted_loss(columns):
    words = ["--weights-name", "w", "--learning-rate", "0.5", "--batch", "100", "--no-shuffle"]
    assert train(*NET, *WORDS, *words, "--seed", "3", "--run", "r", data=("--train", "[ab].root")) == 0
    assert (
        train(*NET, *WORDS, *words, "--seed", "3", "--run", "r0", "--learning-rate", "1e-30", data=DATA) == 0
    )
    some = {key: np.concatenate([columns[name][key] for name in "ab"]) for key in columns["a"]}
    x = np.stack([some["pt"], some["eta"]], 1).astype("f4")
    begin = torch.load("r0/weights.pt", weights_only=True)["bias"].numpy()
    scores = np.exp(outputs("r0", x) - outputs("r0", x).max(1, keepdims=True))
    slopes = (scores / scores.sum(1, keepdims=True) - np.eye(2)[some["label"]]) * some["w"][:, None]
    found = torch.load("r/weights.pt", weights_only=True)["bias"].numpy()
    np.testing.assert_allclose(found, begin - 0.5 * slopes.mean(0), rtol=1e-3, atol=1e-4)


def test_layers_have_rates_of_their_own(columns):
    words = [*NET, *WORDS, "--batch", "100", "--no-shuffle", "--seed", "3"]
    kinds = {
        "begin": ["--learning-rate", "1e-30"],
        "plain": ["--learning-rate", "0.5"],
        "lars": ["--learning-rate", "0.5", "--layer-rates", "lars", "--trust", "0.1"],
        "larc": ["--learning-rate", "0.5", "--layer-rates", "larc", "--trust", "1e9"],
    }
    for run, more in kinds.items():
        assert train(*words, *more, "--run", run, data=("--train", "[ab].root")) == 0
    found = {run: torch.load(f"{run}/weights.pt", weights_only=True) for run in kinds}
    begin, moved = found["begin"]["weight"], found["lars"]["weight"] - found["begin"]["weight"]
    assert float(moved.norm()) == pytest.approx(0.5 * 0.1 * float(begin.norm()), rel=1e-4)
    along = found["plain"]["weight"] - begin
    torch.testing.assert_close(moved / moved.norm(), along / along.norm(), rtol=1e-3, atol=1e-4)
    for run in ("lars", "larc"):
        torch.testing.assert_close(found[run]["bias"], found["plain"]["bias"])
    torch.testing.assert_close(found["larc"]["weight"], found["plain"]["weight"])


@pytest.mark.parametrize("more", [[], ["--bucket"]], ids=["one length", "bucketed"])
def test_rows_of_unequal_length_come_with_a_mask(more):
    words = ["--model", "sets.py", "--loss", "cross_entropy", "--labels-name", "label", "--epochs", "2"]
    words += ["--features-name", "hit_x,hit_y", "--pad", "3", "--mask", "--standardize", "--run", "r"]
    assert train(*words, *more, data=DATA) == 0
    assert len(told("r")["center"]["val_loss"]) == 2


def test_a_run_predicts_with_what_it_was_trained_with():
    words = ["--model", "sets.py", "--loss", "cross_entropy", "--labels-name", "label", "--run", "r"]
    words += ["--features-name", "hit_x,hit_y", "--pad", "3", "--mask", "--standardize"]
    assert train(*words, data=DATA) == 0
    assert main(["predict", "r", "--data", "val.root:events", "--out", "p.h5", "--keep", "label"]) == 0
    module = {}
    exec(OF_SETS, module)
    model = module["get_model"]()
    model.load_state_dict(torch.load("r/weights.pt", weights_only=True))
    names = {"features": "hit_x,hit_y", "labels": "label", "pad": 3, "mask": True}
    with closing(FileSource("val.root", **names, standardize="r/standard.json")) as source:
        (x, mask), labels = source.take(0, len(source))
    wanted = model(torch.as_tensor(x), torch.as_tensor(mask)).detach().numpy()
    with h5py.File("p.h5") as file:
        np.testing.assert_allclose(file["prediction"][:], wanted, atol=1e-5)
        np.testing.assert_array_equal(file["label"][:], labels)


@pytest.mark.mpi
def test_three_ranks_train_on_root_files_as_one_process_does():
    words = [*NET, *WORDS, *DATA, "--standardize", "quantiles", "--weights-name", "w"]
    words += ["--batch", "25", "--epochs", "2"]
    done = started(
        *words,
        "--mode",
        "synchronous",
        "--servers",
        "0",
        "--cache",
        "memory",
        "--run",
        "three",
        framework="torch",
    )
    assert done.returncode == 0, done.stderr
    assert train(*words[:-4], "--batch", "75", "--epochs", "2", "--run", "one", data=()) == 0
    assert Path("three/standard.json").read_bytes() == Path("one/standard.json").read_bytes()
    assert told("three")["center"]["val_loss"] == pytest.approx(told("one")["center"]["val_loss"], abs=0.05)


def test_quantiles_are_kept_with_the_run(columns):
    words = ["--standardize", "quantiles", "--select", "pt > 40", "--learning-rate", "1e-30", "--run", "r"]
    assert train(*NET, *WORDS, *words, data=DATA) == 0
    training = {key: np.concatenate([columns[name][key] for name in "ab"]) for key in columns["a"]}
    x = np.stack([training["pt"], training["eta"]], 1)[training["pt"] > 40]
    (standard,) = json.loads(Path("r/standard.json").read_text())["features"]
    low, middle, high = np.quantile(x, (0.158655, 0.5, 0.841345), axis=0, method="hazen")
    np.testing.assert_allclose(standard["mean"], middle, rtol=1e-3)
    np.testing.assert_allclose(standard["spread"], (high - low) / 2, rtol=1e-3)
    val = columns["val"]
    used = val["pt"] > 40
    logits = outputs("r", (np.stack([val["pt"], val["eta"]], 1)[used] - middle) / ((high - low) / 2))
    expected = losses(logits, val["label"][used]).mean()
    assert told("r")["center"]["val_loss"] == pytest.approx([expected], rel=1e-3)


def test_rare_classes_are_trained_on_as_often_and_validated_as_they_are(columns):
    words = ["--balance", "label", "--select", "pt > 40 and eta > 0", "--learning-rate", "1e-30"]
    assert train(*NET, *WORDS, *words, "--run", "r", data=DATA) == 0
    counts, found = {}, {}
    for prefix, some in (
        ("", {key: np.concatenate([columns[n][key] for n in "ab"]) for key in columns["a"]}),
        ("val_", columns["val"]),
    ):
        used = (some["pt"] > 40) & (some["eta"] > 0)
        x, labels = np.stack([some["pt"], some["eta"]], 1)[used], some["label"][used]
        each = losses(outputs("r", x), labels)
        found[prefix] = [each[labels == one].mean() for one in np.unique(labels)], each.mean()
        counts[prefix] = np.bincount(labels)
    assert counts[""].min() < counts[""].max()
    history = told("r")["center"]
    # Of a rare class each sample comes as often as the others, or once more.
    assert history["loss"][0] == pytest.approx(np.mean(found[""][0]), rel=0.02)
    assert history["val_loss"][0] == pytest.approx(found["val_"][1], rel=1e-4)


OF_KINDS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = torch.nn.Embedding(6, 2)
        self.out = torch.nn.Linear(1, 2)

    def forward(self, kind, pt):
        return self.kind(kind) + self.out(pt[:, None])

get_model = Net
"""
KINDS = ["--model", "kinds.py", "--loss", "cross_entropy", "--labels-name", "label"]
KINDS += ["--features-name", "kind", "pt", "--vocabulary", "kind", "--standardize"]


@pytest.fixture
def kinds():
    """Return the columns of a Parquet file to train on, and of one with a kind that it has not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, found = np.random.default_rng(0), {}
    for name, known in (("a", ["mu", "e", "tau", "pi"]), ("val", ["e", "nu", "pi"])):
        found[name] = {
            "kind": draw.choice(known, 70),
            "pt": draw.gamma(2, 30, 70),
            "label": draw.integers(0, 2, 70),
        }
        pq.write_table(pa.table(found[name]), f"{name}.parquet", row_group_size=9)
    Path("kinds.py").write_text(OF_KINDS)
    return found


def outputs_of_kinds(run, kinds, pt):
    module = {}
    exec(OF_KINDS, module)
    model = module["Net"]()
    model.load_state_dict(torch.load(f"{run}/weights.pt", weights_only=True))
    known = ["", "e", "mu", "pi", "tau"]
    numbers = torch.tensor([known.index(one) if one in known else 0 for one in kinds])
    return model(numbers, torch.as_tensor(pt.astype("f4"))).detach().numpy()


def test_texts_are_trained_on_validated_and_predicted_by_one_vocabulary(kinds, capsys):
    data = ("--train", "a.parquet", "--val", "val.parquet")
    assert train(*KINDS, "--learning-rate", "1e-30", "--run", "r", data=data) == 0
    unknown = int((kinds["val"]["kind"] == "nu").sum())
    assert unknown
    line = f"kind: its values become indices from 1 to 4; in the validation {unknown} of 70 values are"
    assert line in capsys.readouterr().out
    names, counts = np.unique(kinds["a"]["kind"], return_counts=True)
    kept = json.loads(Path("r/vocabulary.json").read_text())["columns"]["kind"]
    assert kept == {"values": names.tolist(), "counts": counts.tolist()}
    pt = kinds["a"]["pt"]
    found = outputs_of_kinds("r", kinds["val"]["kind"], (kinds["val"]["pt"] - pt.mean()) / pt.std())
    expected = losses(found, kinds["val"]["label"]).mean()
    assert told("r")["center"]["val_loss"] == pytest.approx([expected], rel=1e-4)
    assert main(["predict", "r", "--data", "val.parquet", "--out", "p.h5"]) == 0
    assert f"kind: {unknown} of 70 values are unknown, and became 0" in capsys.readouterr().out
    with h5py.File("p.h5") as file:
        np.testing.assert_allclose(file["prediction"][:], found, atol=1e-5)


def test_a_fold_has_the_values_of_its_training_part_only(kinds, capsys):
    data = ("--train", "a.parquet")
    assert train(*KINDS, "--hold-out", "0.5", "--run", "r", data=data) == 0
    kept = json.loads(Path("r/vocabulary.json").read_text())["columns"]["kind"]
    assert sum(kept["counts"]) == 35
    assert "of 35 values are unknown and become 0" in capsys.readouterr().out


@pytest.mark.mpi
def test_three_ranks_have_the_vocabulary_of_one_process(kinds):
    data = ("--train", "a.parquet", "--val", "val.parquet")
    words = [*KINDS, *data, "--mode", "synchronous", "--servers", "0", "--batch", "25", "--run", "three"]
    done = started(*words, framework="torch")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("become indices from 1 to 4; in the validation") == 1
    assert train(*KINDS, "--run", "one", data=data) == 0
    for name in ("vocabulary.json", "standard.json"):
        assert Path("three", name).read_bytes() == Path("one", name).read_bytes()


REFUSED_VOCABULARIES = {
    "pt": "pt has the type float64, but vocabulary= .--vocabulary. is for texts and whole numbers",
    "colour": "names 'colour', no column of features= or labels=; these have 'kind', 'pt', 'label'",
    "kind:3": "'kind' .* has more than 3 different values, such as .*write kind:N to allow N",
}


@pytest.mark.parametrize("asked", REFUSED_VOCABULARIES)
def test_what_is_no_category_is_refused(kinds, asked, capsys):
    words = [*KINDS, "--vocabulary", *dict.fromkeys(["kind", asked]), "--train", "a.parquet", "--batch", "9"]
    assert main(["train", *words]) == 2
    assert re.search(REFUSED_VOCABULARIES[asked], capsys.readouterr().err)
    assert not Path("runs").exists()


REFUSED = {
    "--trust 0.1": "--trust is the factor of layers' rates; add --layer-rates lars or larc",
    "--layer-rates lamb": "lars, larc",
    "--balance pt": "balance='pt' has 100 different values, such as",
    "--mask": "--mask needs --pad",
    "--bucket": "--bucket needs --pad",
    "--bucket --pad 3": "bucket=True is for rows of unequal length",
    "--weights-name w --loss two": "takes no weights; give it a third argument",
    "--select pt>": "select='pt>': it is no expression",
    "--select pt>1e9": "none of 100 samples fulfils it",
    "--select __import__('os')": "there is no function '__import__'",
    "--features-name hit_x": "rows of unequal length; pass pad=N (--pad N)",
    "--features-name pt,hits": "has no 'hits'; it has 'pt'",
    "--train a.root:tree": "has no tree 'tree'; it has 'events'",
    "--train a.root val.h5": "name files of one format",
}


@pytest.mark.parametrize(("words", "problem"), REFUSED.items())
def test_what_cannot_be_is_refused_in_a_sentence(capsys, monkeypatch, words, problem):
    with h5py.File("val.h5", "w") as file:
        file["pt"] = np.arange(3)
    data = () if "--train" in words else DATA[:2]
    monkeypatch.setattr("tests.helpers.train_command.train", lambda *given: train(*given, data=data))
    said = refused(capsys, *NET, *WORDS, *words.split())
    assert problem in said, said
