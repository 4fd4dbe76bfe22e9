"""Predictions of rows: each row once and in order, the same bytes on any number of ranks and after kills."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import signal
import subprocess
import sys
from operator import itemgetter, neg
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ROC, ConfigurationError, Confusion, Figure
from nnlo_common.data import FileSource, Standard, Vocabulary
from nnlo_common.data._preparation import Moments
from nnlo_common.inference import ArraySource, Ensemble, Prediction, PredictOptions, predict_rows, source_of
from nnlo_common.inference._running import PieceProgress, PiecesOut, array_share
from nnlo_common.inference.sinks import HDF5Sink, _npy
from nnlo_common.inference.sinks._npy import _runs
from nnlo_common.testing import InjectedFault
from tests.helpers.jobs import environment
from tests.helpers.threads import no_new_threads, on_ranks, ranks

ROWS = 1003  # divided by nothing below
DRAW = np.random.default_rng(0)
X = DRAW.standard_normal((ROWS, 4)).astype("f4")
WEIGHTS = DRAW.standard_normal((4, 3)).astype("f4")


class Linear:
    """A model of NumPy; what it returns is a function of the outputs."""

    def __init__(self, shape=lambda y: y, before=lambda x: None):
        self.shape, self.before = shape, before

    def begin(self, features):
        self.before(features)
        return self.shape(features @ WEIGHTS)

    def result(self, handle):
        return handle


def expected(batch=10):
    return np.concatenate([X[at : at + batch] @ WEIGHTS for at in range(0, ROWS, batch)])


def predicted(path=None, world=None, model=None, data=X, files=None, name="m", **options):
    reading = {"features": "x"} if files else {}
    options = PredictOptions(**{"batch_size": 10, **options})
    with no_new_threads() if world is None else contextlib.nullcontext():
        return predict_rows(model or Linear(), data, path, options, world=world, model=name, reading=reading)


@pytest.fixture
def file(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the environment for MPICH has no h5py")
    for name, rows in (("a", slice(0, 400)), ("b", slice(400, 400)), ("c", slice(400, None))):
        with h5py.File(tmp_path / f"{name}.h5", "w") as one:
            one["x"], one["id"] = X[rows], np.arange(ROWS)[rows]
            one["label"] = (X[rows, 0] > 0).astype("i4")
    return str(tmp_path / "[abc].h5")


def content(path):
    """All datasets of a file."""
    import h5py

    found = {}
    with h5py.File(path) as one:
        one.visititems(lambda name, data: found.update({name: data[()]}) if hasattr(data, "dtype") else None)
    return found


def digest(folder):
    """The bytes of a result's parts."""
    every = sorted(Path(folder).glob("part-*"))
    return [hashlib.sha256(one.read_bytes()).hexdigest() for one in every]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ranks_return_the_bits_of_one_process(size):
    for one in on_ranks(size, lambda world: predicted(world=world)):
        assert one.rows == ROWS
        np.testing.assert_array_equal(one.outputs, expected())


@pytest.mark.parametrize("batch", [1, 7, 1003, 5000])
def test_batches_are_cut_from_the_whole(batch):
    np.testing.assert_array_equal(predicted(batch_size=batch).outputs, expected(min(batch, ROWS)))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_files_have_each_row_once_beside_the_columns_kept(size, file, tmp_path):
    on_ranks(
        size, lambda world: predicted(tmp_path / "out.h5", world, data=file, files=True, keep=["id", "label"])
    )
    found = content(tmp_path / "out.h5")
    assert list(found) == ["id", "label", "prediction"]
    np.testing.assert_array_equal(found["prediction"], expected())
    np.testing.assert_array_equal(found["id"], np.arange(ROWS))
    alone = tmp_path / "alone.h5"
    predicted(alone, data=file, files=True, keep=["id", "label"])
    assert digest(f"{alone}.parts") == digest(tmp_path / "out.h5.parts")
    assert not list(tmp_path.glob("out.h5.parts/done*")), "the record goes with the last piece"


@pytest.mark.parametrize("size", [1, 3])
def test_an_npy_file_is_one_array(size, tmp_path):
    on_ranks(size, lambda world: predicted(tmp_path / "y.npy", world))
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected())
    assert [one.name for one in tmp_path.iterdir()] == ["y.npy"]


def test_outputs_have_the_names_of_their_structure(tmp_path):
    pytest.importorskip("h5py")
    model = Linear(lambda y: {"mass": y[:, 0], "kind": (y[:, 1:], y.argmax(1))})
    predicted(tmp_path / "y.h5", model=model, dtype="float16")
    found = content(tmp_path / "y.h5")
    assert {name: str(one.dtype) for name, one in found.items()} == {
        "kind/0": "float16",
        "kind/1": "int64",
        "mass": "float16",
    }
    np.testing.assert_array_equal(found["mass"], expected()[:, 0].astype("f2"))
    assert list(predicted(model=model).outputs) == ["mass", "kind/0", "kind/1"]


@pytest.mark.parametrize(("name", "package"), [("y.h5", "h5py"), ("y.zarr", "zarr")])
@pytest.mark.parametrize("names", [("a", "a/b"), ("a/b/c", "a"), ("a/b", "a//b"), ("a", "a/"), ("x", "/")])
def test_names_inside_each_other_are_refused_before_the_work(name, package, names, tmp_path):
    pytest.importorskip(package)
    model = Linear(lambda y: dict.fromkeys(names, y))
    assert list(predicted(model=model).outputs) == [*names]
    calls = []
    model.before = lambda x: calls.append(len(x))
    with pytest.raises(
        ConfigurationError, match=f"{name} cannot hold the output '{names[1]}' beside '{names[0]}'; give it"
    ):
        predicted(tmp_path / name, model=model)
    assert len(calls) == 1, "a batch tells the outputs"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["50%best.h5", "100%.h5", "%%b%d.h5", "a b#ü.h5"])
def test_names_with_percent_signs_are_names(name, tmp_path):
    pytest.importorskip("h5py")
    predicted(tmp_path / name, model=Linear(lambda y: {"mass": y, "b%b/%%": y[:, 0]}))
    found = content(tmp_path / name)
    np.testing.assert_array_equal(found["mass"], expected())
    np.testing.assert_array_equal(found["b%b/%%"], expected()[:, 0])
    source = FileSource(str(tmp_path / glob.escape(name)), features=["mass", "b%b/%%"])
    np.testing.assert_array_equal(source.take(0, ROWS)[0][0], expected())
    source.close()


def test_a_function_of_the_outputs_is_written():
    found = predicted(apply=lambda y: {"best": y.argmax(1)}).outputs
    np.testing.assert_array_equal(found, expected().argmax(1))


def test_an_ensemble_has_mean_and_spread():
    found = predicted(model=Ensemble([Linear(), Linear(lambda y: 3 * y)])).outputs
    np.testing.assert_allclose(found["prediction"], 2 * expected(), rtol=1e-6)
    np.testing.assert_allclose(found["prediction_spread"], np.abs(expected()), rtol=1e-5)


@pytest.mark.parametrize("size", [1, 3])
def test_figures_are_those_of_all_rows(size, file, tmp_path):
    labels = (X[:, 0] > 0).astype(int)
    scores = 1 / (1 + np.exp(-expected()[:, :1]))
    figures = {
        "roc": ROC("label", bins=100_000),
        "confusion": Confusion("label", 2),
        "mean": Figure(
            sums=lambda outputs, kept: {
                "sum": outputs["prediction"].sum(dtype="f8"),
                "n": len(kept["label"]),
            },
            result=lambda sums: float(sums["sum"] / sums["n"]),
        ),
    }
    options = {"figures": figures, "keep": ["label"], "apply": lambda y: 1 / (1 + np.exp(-y[:, :1]))}
    found = on_ranks(
        size, lambda world: predicted(tmp_path / "y.h5", world, data=file, files=True, **options).figures
    )
    assert found == [found[0]] * size
    positive, negative = scores[labels == 1, 0], scores[labels == 0, 0]
    pairs = (positive[:, None] > negative).mean() + (positive[:, None] == negative).mean() / 2
    assert found[0]["roc"]["auc"] == pytest.approx(pairs, abs=1e-4)
    assert found[0]["confusion"] == [
        [int(((labels == label) & ((scores[:, 0] > 0.5) == best)).sum()) for best in (0, 1)]
        for label in (0, 1)
    ]
    assert found[0]["mean"] == pytest.approx(scores.mean(dtype="f8"), rel=1e-6)


WRONG_LABELS = [
    (2, "'label' has labels from 0 to 2, but classes=2 asks for labels from 0 to 1; give as many classes as"),
    (-1, "'label' has labels from -1 to 1, but classes=2"),
    (np.nan, "'label' has labels from nan to nan, but classes=2"),
]


@pytest.mark.parametrize(("label", "words"), WRONG_LABELS)
def test_a_label_that_is_no_class_is_named(label, words):
    labels = np.array([0, 1, 1, label, 0])
    with pytest.raises(ConfigurationError, match=words):
        Confusion("label", 2).sums({"prediction": np.zeros((5, 2))}, {"label": labels})


def test_a_score_of_no_class_is_named():
    with pytest.raises(ConfigurationError, match="'prediction' has scores for 3 classes, but classes=2"):
        Confusion("label", 2).sums({"prediction": np.eye(3)}, {"label": np.array([0, 1, 1])})


@pytest.mark.parametrize("dtype", ["?", "u1", "f2", "f4", "f8"])
def test_scores_of_any_type_have_a_curve(dtype):
    figure, labels = ROC("label", bins=100_000), np.array([0, 1, 0, 1])
    sums = figure.sums({"prediction": labels.astype(dtype)}, {"label": labels})
    assert figure.result(sums)["auc"] == 1


def test_figures_survive_a_kill(tmp_path):
    pytest.importorskip("h5py")
    figure = {
        "sum": Figure(
            sums=lambda o, k: {"s": o["prediction"].sum(dtype="f8")}, result=lambda s: float(s["s"])
        )
    }
    whole = predicted(figures=figure).figures
    calls = []

    def dies(x):
        calls.append(1)
        if len(calls) == 60:
            raise InjectedFault("here")

    with pytest.raises(InjectedFault):
        predicted(tmp_path / "y.h5", model=Linear(before=dies), figures=figure)
    assert predicted(tmp_path / "y.h5", figures=figure).figures == whole


@pytest.mark.parametrize("name", ["y.h5", "y.npy"])
def test_what_is_written_is_not_computed_again(name, tmp_path):
    pytest.importorskip("h5py")
    path, calls = tmp_path / name, []

    def dies(x):
        calls.append(len(x))
        if len(calls) == 50:
            raise InjectedFault("here")

    with pytest.raises(InjectedFault):
        predicted(path, model=Linear(before=dies))
    assert not path.exists()
    before = len(calls)
    predicted(path, model=Linear(before=lambda x: calls.append(len(x))))
    found = np.load(path) if name == "y.npy" else content(path)["prediction"]
    np.testing.assert_array_equal(found, expected())
    assert 101 < len(calls) < 101 + 10, "the first batch is tried twice, and a few were on their way"
    assert before == 50


@pytest.mark.parametrize("size", [2, 3])
def test_a_dead_rank_leaves_no_hole(size, tmp_path):
    pytest.importorskip("h5py")

    def program(world):
        count = []

        def before(x):
            count.append(1)
            if world.rank == 1 and len(count) == 3:
                raise InjectedFault("rank 1 dies")

        return predicted(tmp_path / "y.h5", world, model=Linear(before=before))

    with ranks(size) as cluster:
        cluster.run(program)
    np.testing.assert_array_equal(content(tmp_path / "y.h5")["prediction"], expected())


def test_the_jobs_of_an_array_write_one_file(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "y.h5"
    missing = [predicted(path, part=f"{part}/3").missing for part in (3, 1)]
    assert missing[0] > missing[1] > 0
    assert not path.exists()
    assert predicted(path, part="2/3").missing == 0
    np.testing.assert_array_equal(content(path)["prediction"], expected())


PROGRAM = """
import sys, time
import numpy as np
from tests.inference.test_rows import *
predicted(sys.argv[1], model=Linear(before=lambda x: time.sleep(0.002)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["y.h5", "y.npy"])
def test_kills_at_any_moment_lose_nothing(name, tmp_path):
    """SIGKILL at random moments, and the same command again, until it is complete."""
    pytest.importorskip("h5py")
    path, draw, kills = tmp_path / name, np.random.default_rng(3), 0
    while not path.exists():
        with subprocess.Popen([sys.executable, "-c", PROGRAM, str(path)], env=environment(None)) as job:
            try:
                job.wait(0.45 + draw.random() * 0.2 if kills < 5 else 60)
            except subprocess.TimeoutExpired:
                os.kill(job.pid, signal.SIGKILL)
                kills += 1
    found = np.load(path) if name == "y.npy" else content(path)["prediction"]
    np.testing.assert_array_equal(found, expected())


WRONG = [
    ({"path": "y.txt"}, r"ends in \.txt; name a file in \.h5"),
    (
        {"path": "y.npy", "model": Linear(lambda y: (y, y))},
        r"can hold one array, but there are 2: 0, 1; name",
    ),
    ({"path": "y.h5", "compression": "zip"}, "compression='zip': give one of gzip, lzf"),
    ({"path": "y.npy", "compression": "gzip"}, "compression='gzip' is not possible in"),
    ({"path": "none/there\0/y.h5"}, "cannot be written|embedded null"),
    ({"batch_size": 0}, "batch_size=0: must be a whole number of at least 1"),
    ({"dtype": "int8"}, "dtype='int8': give float16, float32 or float64"),
    ({"apply": 3}, "apply=3 is not a function"),
    ({"figures": {"roc": 1}}, "figures has 'roc', which is not a Figure"),
    ({"figures": {"roc": ROC("label")}}, "'roc' asks for 'label'; there are the outputs prediction, and the"),
    ({"model": Linear(lambda y: y.sum())}, r"the model returned 'prediction' of shape \(\) for 10 samples"),
    ({"model": Linear(lambda y: y[:3])}, r"of shape \(3, 3\) for 10 samples; each output needs a row"),
    ({"model": Linear(lambda y: "text")}, "the model returned str as 'prediction', which is not an array"),
    ({"model": Linear(lambda y: {})}, "the model returned {}; return at least one array"),
    (
        {"model": Linear(lambda y: y @ np.ones(7))},
        r"fails on the first batch \(prediction float32\[10, 4\]\)",
    ),
    ({"keep": ["id"]}, "the data are arrays, not files; give the columns as arrays by name"),
    ({"keep": {"id": np.zeros(5)}}, "keep has 5 rows, but there are 1003 samples"),
    ({"keep": {"prediction": np.zeros(ROWS)}}, "'prediction' is an output and a column to keep"),
    ({"data": np.zeros((0, 3), "f4")}, "give arrays with equally many rows"),
    ({"data": (np.zeros(3), np.zeros(4))}, "data has arrays of the lengths"),
    ({"part": "3/2", "path": "y.h5"}, "--part 3/2: the first part is 1/2"),
    ({"part": "half", "path": "y.h5"}, "--part half: give a number and how many"),
    ({"part": "1/2"}, "a part of a prediction without a file is lost"),
    ({"part": "1/2", "path": "y.h5", "overwrite": True}, "--overwrite in a job of an array would remove"),
]


@pytest.mark.parametrize("name", ["sums", "result"])
def test_a_figure_of_what_are_no_functions_is_refused(name):
    functions = {"sums": lambda outputs, kept: {}, "result": len} | {name: 3}
    with pytest.raises(ConfigurationError, match=rf"Figure\(\): {name}=3 is not a function"):
        Figure(**functions)


@pytest.mark.parametrize(("options", "words"), WRONG)
def test_bad_input_gets_one_sentence_and_writes_nothing(options, words, tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigurationError, ValueError), match=words):
        predicted(**options)
    assert not list(tmp_path.iterdir())


def test_a_result_that_exists_is_kept(tmp_path):
    path = tmp_path / "y.npy"
    predicted(path)
    with pytest.raises(
        ConfigurationError, match="exists already; name another file, delete it, or overwrite"
    ):
        predicted(path)
    predicted(path, apply=lambda y: -y, overwrite=True)
    np.testing.assert_array_equal(np.load(path), -expected())


def test_a_folder_of_others_is_not_touched(tmp_path):
    folder = tmp_path / "y.npy.parts"
    folder.mkdir()
    (folder / "precious").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ConfigurationError, match="is not a folder that nnlo has begun"):
            predicted(tmp_path / "y.npy", overwrite=overwrite)
    assert (folder / "precious").read_text() == "mine"


@pytest.mark.parametrize(
    ("again", "words"),
    [
        (
            {"name": "other"},
            "its model is 'm', here it is 'other'; name another file, or begin anew with --overw",
        ),
        ({"batch_size": 20}, "its batch_size is 10, here it is 20"),
        ({"data": X + 1}, "its data is"),
    ],
)
def test_another_result_does_not_continue_this_one(again, words, tmp_path):
    path = tmp_path / "y.npy"
    assert predicted(path, part="1/2").missing
    with pytest.raises(ConfigurationError, match=words):
        predicted(path, **again)
    predicted(path, **again, overwrite=True)
    assert path.exists()


KINDS = np.array(["e", "mu", "pi"] * ROWS)[:ROWS]
PREPARED = {
    "standardize": [
        {"features": "x", "standardize": Standard.measured([[Moments.of(some)]])} for some in (X, X[:500])
    ],
    "vocabulary": [
        {"features": ["x", "kind"], "vocabulary": Vocabulary({"kind": one}), "adapt_features": itemgetter(0)}
        for one in ({"e": 7, "mu": 1}, {"e": 7, "pi": 1})
    ],
    "adapt_features": [{"features": "x", "adapt_features": one} for one in (abs, neg)],
}


@pytest.mark.parametrize("name", PREPARED)
def test_samples_prepared_in_another_way_do_not_continue_a_result(name, tmp_path):
    def given(number, **options):
        with contextlib.closing(FileSource({"x": X, "kind": KINDS}, **PREPARED[name][number])) as source:
            return predicted(tmp_path / "y.npy", data=source, **options)

    def without():
        with contextlib.closing(FileSource({"x": X}, features="x")) as source:
            return predicted(tmp_path / "y.npy", data=source)

    assert given(0, part="1/2").missing
    with pytest.raises(ConfigurationError, match=f"its {name} is '.*', here it is '.*'; name another file"):
        given(1)
    if name != "vocabulary":  # without one there are other inputs
        with pytest.raises(ConfigurationError, match=f"its {name} is '.*', here it is None; name another"):
            without()
    assert not given(0).missing


def test_a_vocabulary_of_the_same_values_counted_elsewhere_continues_a_result(tmp_path):
    for part, counts in (("1/2", {"e": 7, "mu": 1}), (None, {"e": 2, "mu": 5})):
        options = PREPARED["vocabulary"][0] | {"vocabulary": Vocabulary({"kind": counts})}
        with contextlib.closing(FileSource({"x": X, "kind": KINDS}, **options)) as source:
            found = predicted(tmp_path / "y.npy", data=source, part=part)
        assert bool(found.missing) == (part is not None)


def test_two_jobs_do_not_write_one_result(tmp_path):
    path = tmp_path / "y.npy"
    predicted(path, part="1/2")
    program = (
        "import sys; from nnlo_common.base._file_access import hold_lock; "
        "from pathlib import Path; hold_lock(Path(sys.argv[1] + '.parts/in-use'), 'writing', 'file'); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=environment(None),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        other.stdout.readline()
        with pytest.raises(ConfigurationError, match=r"another job \(process \d+ on .*\) is writing"):
            predicted(path)
        other.stdin.close()
    predicted(path)


def test_ranks_with_different_models_are_named():
    words = "rank 1 has another model than rank 0: 'm1', not 'm0'; load the same weights on all ranks, or "
    with pytest.raises(ConfigurationError, match=words):
        on_ranks(2, lambda world: predicted(world=world, name=f"m{world.rank}"))


def test_a_torn_journal_is_continued(tmp_path):
    path = tmp_path / "y.npy"
    predicted(path, part="1/2")
    (journal,) = path.parent.glob("y.npy.parts/done*.jsonl")
    journal.write_bytes(journal.read_bytes()[:-7])
    predicted(path)
    np.testing.assert_array_equal(np.load(path), expected())


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"kind": "other"}'])
def test_a_manifest_that_is_not_ours_is_refused(text, tmp_path):
    path = tmp_path / "y.npy"
    predicted(path, part="1/2")
    (tmp_path / "y.npy.parts" / "manifest.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"manifest\.json is (damaged|not one of nnlo's)"):
        predicted(path)


def test_a_part_that_has_gone_is_computed_again(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "y.h5"
    predicted(path, part="1/2")
    next(tmp_path.glob("y.h5.parts/part-*")).unlink()
    predicted(path)
    np.testing.assert_array_equal(content(path)["prediction"], expected())


def test_a_part_that_has_gone_is_no_zeros(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "y.h5"
    predicted(path, part="1/2")
    next(tmp_path.glob("y.h5.parts/part-*")).unlink()
    assert predicted(path, part="2/2").missing == 1
    assert not path.exists()
    predicted(path, part="1/2")
    np.testing.assert_array_equal(content(path)["prediction"], expected())


def test_parts_that_the_first_rank_does_not_see_are_named(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.setattr(HDF5Sink, "has", lambda self, piece: piece != 3)
    with pytest.raises(
        ConfigurationError, match=r"1 pieces of .* were written, but are not there: name a file"
    ):
        predicted(tmp_path / "y.h5")


def test_an_output_that_changes_its_shape_is_named(tmp_path):
    seen = []

    def shape(y):
        seen.append(1)
        return y if len(seen) < 5 else y[:, :2]

    with pytest.raises(
        ConfigurationError, match=r"was float32 of shape \(3,\) for the first samples, and now is"
    ):
        predicted(model=Linear(shape))


def test_an_error_of_the_model_names_the_samples():
    def fails(x):
        if x[0, 0] == X[500, 0]:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as told:
        predicted(model=Linear(before=fails))
    assert told.value.__notes__ == ["while predicting the samples 500 to 509"]


def test_a_dataset_that_shrinks_is_named(file, tmp_path):
    h5py = pytest.importorskip("h5py")
    source = source_of(file, {"features": "x"}, np.asarray)
    path = file.replace("[abc]", "c")
    with h5py.File(path, "a") as one:
        short = one["x"][:100]
        del one["x"]
        one["x"] = short
    with pytest.raises(
        ConfigurationError, match=r"cannot be read .*: the file is damaged, or has changed since"
    ):
        predict_rows(
            Linear(), source, tmp_path / "y.npy", PredictOptions(batch_size=10), world=None, model="m"
        )
    source.close()


def test_a_full_disk_is_found_before_the_work(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        ConfigurationError, match=r"cannot be written further .No space left on device.; make room"
    ):
        predicted(tmp_path / "y.npy")
    monkeypatch.undo()
    predicted(tmp_path / "y.npy")


def test_a_kill_before_the_header_loses_nothing(tmp_path, monkeypatch):
    def killed(*_):
        raise InjectedFault("before the header")

    monkeypatch.setattr(_npy, "_put", killed)
    with pytest.raises(InjectedFault):
        predicted(tmp_path / "y.npy")
    monkeypatch.undo()
    predicted(tmp_path / "y.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected())


@pytest.mark.parametrize(("number", "words"), [(28, "No space left on device"), (122, "Disk quota exceeded")])
def test_a_disk_that_fills_up_leaves_what_is_done(number, words, tmp_path, monkeypatch):
    h5py = pytest.importorskip("h5py")
    path, count = tmp_path / "y.h5", []
    real = h5py.Dataset.__setitem__

    def full(self, *args):
        count.append(1)
        if len(count) > 30:
            raise OSError(f"unable to write (errno = {number}, error message = '...')")
        real(self, *args)

    monkeypatch.setattr(h5py.Dataset, "__setitem__", full)
    with pytest.raises(
        ConfigurationError, match=f"cannot be written further .{words}.; make room, then rerun"
    ):
        predicted(path)
    monkeypatch.undo()
    assert list(tmp_path.glob("y.h5.parts/part-*"))
    assert not list(tmp_path.glob("y.h5.parts/*.part.*")), "nothing is half written"
    predicted(path)
    np.testing.assert_array_equal(content(path)["prediction"], expected())


def test_runs_of_a_region_are_its_bytes():
    for shape in [(7,), (4, 5), (3, 4, 5), (2, 3, 4, 3)]:
        whole = np.arange(np.prod(shape)).reshape(shape)
        for _ in range(30):
            region = tuple(slice(*sorted(DRAW.integers(0, size + 1, 2))) for size in shape)
            found = [one for start, length in _runs(shape, region) for one in range(start, start + length)]
            assert found == whole[region].ravel().tolist()


def test_progress_says_what_is_left(capsys):
    times = iter([0.0, 1.0, 12.0, 13.0, 300.0])
    progress = PieceProgress("nnlo predict", clock=lambda: next(times))
    for done in (1, 3, 4, 100):
        progress(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "nnlo predict: 3 %, about 9 min left",
        "nnlo predict: 100 %",
    ]


def test_the_share_of_an_array_is_said_by_slurm():
    with pytest.raises(
        ConfigurationError, match="there is no SLURM_ARRAY_TASK_ID here; submit with sbatch --array"
    ):
        array_share("auto", {})


def test_a_prediction_shows_itself():
    assert "rows=3" in repr(Prediction(rows=3))
    assert ArraySource(np.zeros((2, 3)), "data").fields[0].name == "prediction"


def test_a_piece_is_written_in_few_calls(monkeypatch, tmp_path):
    # h5py holds the interpreter while it writes: a call for each batch slowed the model down.
    written = []
    write = PiecesOut.write

    def noted(self, name, region, array):
        written.append(len(array))
        write(self, name, region, array)

    monkeypatch.setattr(PiecesOut, "write", noted)
    predicted(tmp_path / "y.npy", batch_size=3)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected(3))
    assert sum(written) == ROWS
    assert len(written) <= 64  # of 335 batches
