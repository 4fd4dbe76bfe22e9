"""`nnlo tune` before anything is trained: options, spaces, figures of merit, layouts, folders and page."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nnlo_common import ConfigurationError
from nnlo_common.cluster._gpus import search_turns, share_host
from nnlo_common.cluster._hosts import locate
from nnlo_common.commands._cli import main
from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._run_folder import SEARCH, remove_unused
from nnlo_common.commands.train._run_plan import parts
from nnlo_common.commands.train._settings import settings_of
from nnlo_common.commands.tune import _search_folder as folders
from nnlo_common.commands.tune._figure_of_merit import FigureOfMerit, by_chance, figure_of, merit, remark
from nnlo_common.commands.tune._report_page import Board, TrialRow, figures, page
from nnlo_common.commands.tune._request import SEARCH_OPTIONS, BlockLayout, SearchSettings, read_request
from nnlo_common.commands.tune._search_facts import FinishedTrial, SearchFacts, best_of
from nnlo_common.commands.tune._search_facts import finished as all_finished
from nnlo_common.commands.tune._search_folder import JOURNAL, TRIAL, Found, claim_search, inspect_folder
from nnlo_common.commands.tune._search_result import search_text
from nnlo_common.commands.tune._search_space import space_of
from nnlo_common.commands.tune._tune_command import defaults
from nnlo_common.data import Vocabulary, _selection
from nnlo_common.training._rank_options import RankOptions
from tests.helpers.format_files import WITH_TEXTS, make
from tests.helpers.paths import DOCS

PAGE = DOCS / "searches.md"
GIVEN = {"model": Given("m.py"), "loss": Given("mse"), "epochs": Given("3")}


def get_model(width=8, kind="flat", learning_rate=0.1):
    return width, kind, learning_rate


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("m.py").write_text("def get_model(width=8):\n    pass\n")
    Path("a.h5").write_bytes(b"")


# -- spaces --------------------------------------------------------------------------------------------

WRONG_SPACES = {
    "nothing": ({}, "give a table of parameters by name"),
    "a list": (["width"], "give a table of parameters by name"),
    "an unknown name": ({"widthh": (1, 2)}, "did you mean 'width'?"),
    "one that is both": ({"learning_rate": (0.1, 0.2)}, "write 'model_params.learning_rate'"),
    "a fixed option": ({"seed": (1, 2)}, "it is not a searchable option"),
    "an unknown parameter": ({"model_params.depth": (1, 2)}, "has no such parameter"),
    "a number": ({"width": 3}, "neither a list of choices nor a table"),
    "half a range": ({"width": {"low": 3}}, "needs low and high, or choices"),
    "an unknown key": ({"width": {"low": 1, "hihg": 2}}, "did you mean 'high'?"),
    "both": ({"width": {"low": 1, "high": 2, "choices": [1]}}, "give one of the two"),
    "reversed": ({"width": (3, 2)}, "high must be above low"),
    "empty": ({"width": (3, 3)}, "high must be above low"),
    "texts": ({"width": ("a", "b")}, "it must be a number"),
    "infinity": ({"width": (0.0, float("inf"))}, "a finite number"),
    "a logarithm of 0": ({"width": (0, 2, "log")}, "give one above 0"),
    "no truth": ({"width": {"low": 1, "high": 2, "log": "yes"}}, "true or false"),
    "a step too far": ({"width": {"low": 1, "high": 2, "step": 3}}, "step is 3"),
    "half a step": ({"width": {"low": 1, "high": 9, "step": 0.5}}, "of the type of low"),
    "two steps": ({"width": {"low": 1, "high": 9, "step": 2, "log": True}}, "leave out step, or log"),
    "no choice": ({"width": []}, "give a list that is not empty"),
    "a choice twice": ({"width": [1, 2, 1]}, "twice"),
    "a table of choice": ({"width": [{}]}, "is not a text, a finite number"),
    "a range of texts": ({"kind": (1, 2)}, "takes no number; give a list of choices"),
    "a range of optimizers": ({"optimizer": (1, 2)}, "give a list of choices"),
    "half an epoch": ({"epochs": (0.5, 2)}, "whole number"),
    "no batch": ({"batch": (0, 2)}, "at least 1"),
    "an unknown mode": ({"mode": ["easdg"]}, "did you mean 'easgd'?"),
    "a condition on nothing": ({"width": {"low": 1, "high": 2, "when": {"kind": "x"}}}, "depends on 'kind'"),
    "a condition on an odd value": (
        {"kind": ["a", "b"], "width": {"low": 1, "high": 2, "when": {"kind": "c"}}},
        "depends on kind = 'c'",
    ),
    "no condition": ({"width": {"low": 1, "high": 2, "when": "always"}}, "give a table"),
}


@pytest.mark.parametrize(("table", "expected"), WRONG_SPACES.values(), ids=WRONG_SPACES)
def test_spaces_that_cannot_be_are_refused_by_name(table, expected):
    with pytest.raises(ConfigurationError, match=re.escape(expected)) as caught:
        space_of(table, "--space s.toml", get_model)
    if isinstance(table, dict) and table:
        assert repr(list(table)[-1]) in str(caught.value)


def test_what_is_searched_reaches_the_options_and_the_model():
    space = space_of(
        {
            "width": (4, 16, "log"),
            "kind": ["flat", "deep"],
            "optimizer": ["sgd", "adam"],
            "momentum": {"low": 0.0, "high": 0.9, "when": {"optimizer": "sgd"}},
            "optimizer_option.nesterov": [True, False],
        },
        "get_space()",
        get_model,
    )
    assert len(space.probes()) == 2 + 3
    chosen = {
        "width": 5,
        "kind": "deep",
        "optimizer": "sgd",
        "momentum": 0.5,
        "optimizer_option.nesterov": True,
    }
    settings = settings_of(space.applied({**GIVEN, "model_params": Given({"other": 1})}, chosen))
    assert settings.model_params == {"other": 1, "width": 5, "kind": "deep"}
    assert (settings.optimizer, settings.momentum, settings.epochs) == ("sgd", 0.5, 3)
    assert settings.optimizer_option == {"nesterov": True}
    assert "momentum" not in next(one for one in space.probes() if one["optimizer"] == "adam")


def test_a_space_is_tried_with_the_options_before_anything_starts():
    every = space_of({"mode": ["easgd", "synchronous"], "every": (1, 5)}, "get_space()")
    with pytest.raises(
        ConfigurationError, match=r"the search would try mode = synchronous, every = 1: .*'every'"
    ):
        every.check(GIVEN)
    without_loss = {name: one for name, one in GIVEN.items() if name != "loss"}
    with pytest.raises(ConfigurationError, match=r"^--loss is missing"):  # whatever the search tries
        space_of({"epochs": (1, 2)}, "x").check({k: v for k, v in without_loss.items() if k != "epochs"})
    space_of(
        {"mode": ["easgd", "synchronous"], "every": {"low": 1, "high": 5, "when": {"mode": "easgd"}}}, "x"
    ).check(GIVEN)
    with pytest.raises(ConfigurationError, match="'epochs' is both searched and given"):
        space_of({"epochs": (1, 5)}, "get_space()").check(GIVEN)


def test_the_first_trial_has_the_defaults_that_can_be_searched():
    def make(width=64, depth=3, kind="flat", rest=None):
        pass

    table = {
        "width": (16, 256, "log"),
        "depth": [1, 2],  # 3 is not among them
        "kind": ["steep", "flat"],
        "rest": (0.0, 1.0),  # None is no number
        "batch": {"low": 50, "high": 200, "step": 50},
        "mode": ["easgd", "steady"],
        "every": {"low": 1, "high": 20, "when": {"mode": "easgd"}},
        "optimizer": ["adam", "sgd"],
        "learning_rate": (1e-3, 0.1, "log"),
        "momentum": {"low": 0.0, "high": 0.9, "step": 0.1, "when": {"optimizer": "sgd"}},
    }
    plain = {"width": 64, "kind": "flat", "batch": 100, "mode": "steady", "optimizer": "sgd"}
    space = space_of(table, "x", make)
    assert defaults(space, {}, make) == plain | {"momentum": 0.0}
    assert defaults(space, {}, make, learning_rate=0.01)["learning_rate"] == 0.01
    assert "learning_rate" not in defaults(space, {}, make, learning_rate=0.5)
    every = space_of({"every": (1, 20)}, "x")
    assert defaults(every, {"mode": Given("easgd")}, None) == {"every": 10}


def test_a_model_that_takes_anything_is_given_anything():
    space = space_of({"depth": (1, 2)}, "get_space()", lambda **options: options)
    assert space.applied({}, {"depth": 2})["model_params"].value == {"depth": 2}


# -- the command line ----------------------------------------------------------------------------------

GOOD = ["--model", "m.py", "--train", "a.h5", "--loss", "mse"]
WRONG_FLAGS = {
    "an unknown option": (["--n-folds", "2"], "did you mean '--n-fold'?"),
    "an unknown engine": (["--hyper-opt", "bayesan"], "did you mean 'bayesian'?"),
    "an option of trainings": (["--epochs", "five"], "--epochs 'five' is not possible"),
    "no fold": (["--n-fold", "0"], "at least 1"),
    "folds and a list": (["--n-fold", "2", "--val", "a.h5"], "leave --val out, or --n-fold"),
    "labels of no folds": (["--fold-labels", "labels"], "there are none; add --n-fold, e.g. --n-fold 5"),
    "folds and a share": (["--n-fold", "2", "--hold-out", "0.2"], "give one of the two"),
    "groups of no folds": (["--fold-groups", "run"], "--fold-groups splits samples"),
    "an export of no kind": (["--export", "s.txt"], "--export 's.txt': its suffix gives the format"),
    "an export to nowhere": (["--export", "a.h5/s.db"], "--export a.h5/s.db cannot write"),
    "a tracker": (["--log-to", "wandb"], "--log-to is an option of nnlo train alone: trials"),
    "one fold": (["--fold", "1/2"], "a search sets it itself; use --n-fold (see"),
    "a tree": (["--mode", "easgd", "--sub-servers", "2"], "a trial has no tree of servers"),
    "elastic without a checkpoint": (
        ["--elastic"],
        "there are none; add --checkpoint, or leave --elastic out",
    ),
    "no time": (["--until", "soon"], "seconds from now, a time such as"),
    "a space that is missing": (["--space", "no.toml"], "--space no.toml cannot be read"),
    "nothing to search": ([], "there is no search space: write get_space()"),
    "a model that is missing": (["--model", "no.py"], "no.py cannot be read"),
}


@pytest.mark.parametrize(("words", "expected"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_what_cannot_be_is_refused_before_anything_is_made(words, expected, capsys):
    pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
    before = sorted(Path().rglob("*"))
    assert main(["tune", *GOOD, *words]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("nnlo tune: ")
    assert expected in told.err
    assert "Traceback" not in told.err
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before


def test_a_file_may_say_everything(tmp_path):
    Path("s.toml").write_text(
        'model = "m.py"\nloss = "mse"\nn_fold = 3\nepochs = 2\nfold_groups = "run"\nexport = "s.db"\n'
        "[space]\nwidth = {low = 1, high = 4, log = true}\n"
    )
    request = read_request({"config": "s.toml", "n_fold": "2", "learning_rate": "0.5"}, [])
    assert request.search.n_fold == 2
    space = space_of(request.table, request.place, get_model)
    Path("again.toml").write_text(search_text(request, space))
    again = read_request({"config": "again.toml"}, [])
    assert again.search == request.search
    assert space_of(again.table, again.place, get_model) == space
    assert settings_of(space.applied(again.given, {})).learning_rate == 0.5
    assert again.given["model"].value == str(tmp_path / "m.py")


# -- folds ---------------------------------------------------------------------------------------------

CLASSES, RUNS = np.repeat([0, 1], [8, 4]), np.arange(12) // 2


def samples(**datasets):
    h5py = pytest.importorskip("h5py", reason="h5py is an extra")
    with h5py.File("a.h5", "w") as file:
        for name, values in {"features": np.ones((12, 2)), "labels": CLASSES, **datasets}.items():
            file[name] = values
    return lambda **options: parts(
        ["a.h5"],
        {"features": "features", "labels": "labels"},
        settings_of({**GIVEN, "fold": Given("1/4"), **{name: Given(one) for name, one in options.items()}}),
    )


TEXTS = np.array([b"e", b"mu"])[CLASSES]


@pytest.mark.parametrize("labels", [CLASSES, CLASSES[:, None], np.eye(2)[CLASSES], TEXTS], ids=str)
def test_folds_are_cut_by_the_labels_in_the_files(labels):
    training, validation = samples(kind=labels)(fold_labels="kind")
    assert np.bincount(CLASSES[validation]).tolist() == [2, 1]
    assert sorted([*training, *validation]) == list(range(12))


def test_a_hold_out_is_cut_by_the_texts_that_a_vocabulary_makes_labels_of():
    samples(kind=TEXTS)
    reading = {"features": "features", "labels": "kind", "vocabulary": ["kind"]}
    given = {**GIVEN, "hold_out": Given(0.25), "fold_labels": Given("kind")}
    _, validation = parts(["a.h5"], reading, settings_of(given))
    assert np.bincount(CLASSES[validation]).tolist() == [2, 1]


def test_a_hold_out_is_cut_by_what_the_labels_adaptor_returns():
    samples(raw=CLASSES + 10)
    given = {**GIVEN, "hold_out": Given(0.75), "fold_labels": Given("get_labels")}
    reading = {"features": "features", "labels": "raw", "adapt_labels": lambda raw: np.eye(2)[raw - 10]}
    training, validation = parts(["a.h5"], reading, settings_of(given))
    assert np.bincount(CLASSES[validation]).tolist() == [6, 3]
    assert sorted([*training, *validation]) == list(range(12))
    _, whole = parts(
        ["a.h5"], reading, settings_of({**given, "hold_out": Given(0.26), "fold_labels": Given("labels")})
    )
    assert len(whole) == 3
    with pytest.raises(ConfigurationError, match="must be from 1/100"):
        settings_of({**given, "hold_out": Given(0.001)})
    with pytest.raises(ConfigurationError, match="give one of the two"):
        settings_of({**given, "fold": Given("1/5")})


@pytest.mark.parametrize("kind", WITH_TEXTS)
def test_folds_are_cut_by_texts_in_every_format(kind, tmp_path):
    for package in ("pyarrow", "uproot", "zarr"):
        pytest.importorskip(package, reason="the environment for MPICH has no readers of files")
    kinds, runs = np.array(["tau", "e"])[CLASSES], np.array(["Ann", "Bob", "Cy", "Di", "Ed", "Flo"])[RUNS]
    written = {"x": np.arange(12.0), "kind": kinds, "run": runs}
    files = [
        make(kind, tmp_path / name, {key: values[some] for key, values in written.items()})
        for name, some in (("a", slice(5)), ("b", slice(5, 12)))
    ]
    reading = {"features": ["x", "run"], "labels": "kind", "vocabulary": ["kind", "run:9"]}

    def cut(adapted=None, **options):
        asked = {name: Given(one) for name, one in options.items()}
        return parts(
            files, {**reading, "adapt_labels": adapted}, settings_of({**GIVEN, "fold": Given("1/4"), **asked})
        )

    wanted = cut(fold_labels="kind")
    assert np.bincount(CLASSES[wanted[1]]).tolist() == [2, 1]
    seen = []

    def hot(indices):  # e is 1 and tau 2, as in the training
        seen.extend(indices.tolist())
        return np.eye(2)[2 - indices]

    for adapted in (None, hot):
        for found, one in zip(cut(adapted, fold_labels="get_labels"), wanted, strict=True):
            np.testing.assert_array_equal(found, one)
    assert seen[-12:] == (2 - CLASSES).tolist()
    training, validation = cut(fold_groups="run", fold_labels="get_labels")
    assert not set(RUNS[training]) & set(RUNS[validation])
    reading["vocabulary"] = Vocabulary({"kind": {"e": 1, "tau": 1}, "run": dict.fromkeys(runs.tolist(), 1)})
    for found, one in zip(cut(hot, fold_labels="get_labels"), wanted, strict=True):
        np.testing.assert_array_equal(found, one)
    del reading["vocabulary"]
    reading["features"] = "x"
    with pytest.raises(ConfigurationError, match=r"kind has the type .*texts.*--vocabulary"):
        cut(hot, fold_labels="get_labels")


def test_folds_are_cut_by_the_groups_in_the_files(monkeypatch):
    monkeypatch.setattr(_selection, "_PIECE", 5)
    cut = samples(run=RUNS, patient=np.array([b"Ann", b"Bob", b"Cy", b"Di", b"Ed", b"Flo"])[RUNS])
    for name in ("run", "patient"):
        training, validation = cut(fold_groups=name)
        assert not set(RUNS[training]) & set(RUNS[validation])
        training, validation = cut(fold_groups=name, fold_labels="labels")
        assert not set(RUNS[training]) & set(RUNS[validation])
        assert len(validation) in (2, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"fold_labels": "kind"}, r"--fold-labels kind: .*has no 'kind'.*labels"),
        ({"fold_labels": "both"}, r"--fold-labels both is a group of 2 datasets; name a dataset with"),
        (
            {"fold_groups": "features"},
            r"--fold-groups features has rows of shape \[2\], which are not one-hot",
        ),
        ({"fold_labels": "rare"}, r"--fold-labels rare: folds=4 with labels: 5 has 1 of 12 samples"),
        ({"fold_groups": "labels"}, r"--fold-groups labels: folds=4 of 2 groups: .* at most folds=2"),
        ({"fold_labels": "name"}, r"--fold-labels name: folds=4 with labels: 'tau' has 1 of 12 samples"),
        ({"fold_groups": "text"}, r"--fold-groups text: folds=4 of 1 groups: .* at most folds=1"),
    ],
)
def test_datasets_that_cannot_cut_folds_are_refused_by_name(options, expected):
    rare = np.where(np.arange(12) == 3, 5, 0)
    names = np.where(rare, b"tau", b"mu")
    cut = samples(
        **{"rare": rare, "both/a": CLASSES, "both/b": CLASSES, "text": np.array([b"a"] * 12)}, name=names
    )
    with pytest.raises(ConfigurationError, match=expected):
        cut(**options)


def test_a_fold_is_asked_for_with_what_cuts_it():
    with pytest.raises(
        ConfigurationError, match=r"--fold-groups needs --fold or --hold-out; add one, e\.g\."
    ):
        settings_of({**GIVEN, "fold_groups": Given("run")})
    search = SearchSettings(n_fold=4, fold_groups="run")
    given = search.folded(GIVEN, 1)
    assert (settings_of(given).parts, settings_of(given).fold_groups) == ((range(1, 2), 4), "run")
    assert SearchSettings().folded(GIVEN, 0) == GIVEN


# -- figures of merit ----------------------------------------------------------------------------------

HISTORY = {"val_loss": [3.0, 1.0, 2.0], "val_accuracy": [0.1, 0.9, 0.5]}


@pytest.mark.parametrize(
    ("objective", "maximize", "value", "upward"),
    [
        (None, None, 2.0, False),
        ("val_loss:best", None, 1.0, False),
        ("val_accuracy", None, 0.5, True),
        ("val_accuracy:best", None, 0.9, True),
        ("val_accuracy:min", None, 0.1, False),
        ("val_loss:last", True, 2.0, True),
    ],
)
def test_figures_of_merit(objective, maximize, value, upward):
    figure = figure_of(objective, maximize, None, list(HISTORY))
    assert (figure.of(HISTORY), figure.maximize) == (value, upward)


def test_figures_that_trainings_will_not_have_are_refused():
    with pytest.raises(ConfigurationError, match="did you mean 'val_loss'"):
        figure_of("val_los", None, None, list(HISTORY))
    with pytest.raises(ConfigurationError, match="did you mean 'best'"):
        figure_of("val_loss:bets", None, None, list(HISTORY))
    with pytest.raises(ConfigurationError, match="return a finite number"):
        merit(lambda model: "good", None)


# -- ranks ---------------------------------------------------------------------------------------------


def ranks(count, gpus=0, host="a"):
    return locate([{"host": host, "cores": 8, "gpus": gpus}] * count)


def test_ranks_are_cut_into_blocks_and_these_into_folds():
    layout = BlockLayout.of(ranks(13), 6, 2)
    assert [layout.block_of(rank) for rank in (0, 1, 6, 7, 12)] == [0, 0, 0, 1, 1]
    assert [list(layout.cell_of(rank)) for rank in (0, 5, 7)] == [[0], [4, 5, 6], [7, 8, 9]]
    assert (
        layout.summary(RankOptions(), 2)
        == "1 coordinator, 2 blocks of 2 folds, each 1 serving and 2 training"
    )
    assert (
        BlockLayout.of(ranks(7), 3, 2)
        .summary(RankOptions(), 2)
        .endswith("1 serving and 2 training, fold after fold")
    )
    assert BlockLayout.of(ranks(4), None, 1).cell_size == 3


def test_uneven_layouts_are_refused_with_the_arithmetic():
    expected = "12 - 1 coordinator = 11 ranks.*multiple of --block-size 6.*Start 7 or 13 ranks"
    with pytest.raises(ConfigurationError, match=expected):
        BlockLayout.of(ranks(12), 6, 2)
    settings = settings_of({**GIVEN, "servers": Given("2")})
    with pytest.raises(ConfigurationError, match=r"fewer than group_size=1\. Start 7 ranks"):
        BlockLayout.of(ranks(5), 2, 1).check(settings)


@pytest.mark.parametrize(
    ("size", "ranks_of", "told", "refused"),
    [
        (4, {"servers": Given("0")}, "1 block of 3 together", ""),
        (4, {"group_size": Given("2")}, "1 block of 1 serving and 2 training in groups of 2", ""),
        (5, {"group_size": Given("2")}, "", "3 worker ranks, which is not a multiple of group_size=2"),
        (5, {"servers": Given("0"), "group_size": Given("2")}, "", "makes 2 workers without a server"),
    ],
)
def test_groups_in_trials_fit_the_block_or_are_refused_before_the_search(size, ranks_of, told, refused):
    settings, layout = settings_of({**GIVEN, **ranks_of}), BlockLayout.of(ranks(size), None, 1)
    if refused:
        with pytest.raises(ConfigurationError, match=refused):
            layout.check(settings)
        return
    layout.check(settings)
    assert layout.summary(settings.ranks, 1) == f"1 coordinator, {told}"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"search_ranks": 2, "lockstep": True},
            r"--lockstep with --search-ranks 2: .*leave one of them out$",
        ),
        (
            {"search_ranks": 2, "hyper_opt": "qmc"},
            r"--search-ranks 2 with 'qmc', .*leave --search-ranks out$",
        ),
        ({"elastic": True, "lockstep": True}, r"^--lockstep with --elastic: .*leave one of them out$"),
        (
            {"elastic": True, "spares": 1},
            r"^--elastic with --spares 1 is not possible: .*leave one of them out$",
        ),
        ({"hyper_opt": "grid", "lockstep": True}, r'--lockstep with --hyper-opt "grid": .*--lockstep out$'),
    ],
)
def test_what_does_not_go_together_is_refused_in_flags(asked, said):
    with pytest.raises(ConfigurationError, match=said):
        SearchSettings(**asked)


def test_spares_are_the_last_ranks_and_take_no_gpu():
    layout = BlockLayout.of(ranks(8), None, 1, 1, spares=2)
    assert [list(block) for block in layout.blocks] == [[2, 3, 4, 5]]
    assert layout.summary(RankOptions(), 1).startswith("1 coordinator, 1 choosing, 2 spare, 1 block of")
    with pytest.raises(ConfigurationError, match=r"8 - 1 coordinator - 2 spares = 5 ranks"):
        BlockLayout.of(ranks(8), 3, 1, spares=2)
    env = {"CUDA_VISIBLE_DEVICES": "4,5"}
    share_host(ranks(5, gpus=2), 4, None, env, search_turns(0, 1))
    assert env["CUDA_VISIBLE_DEVICES"] == ""


def test_search_ranks_are_in_no_block_and_take_no_gpu():
    layout = BlockLayout.of(ranks(9), 3, 1, 2)
    assert [list(block) for block in layout.blocks] == [[3, 4, 5], [6, 7, 8]]
    assert (
        layout.summary(RankOptions(), 1) == "1 coordinator, 2 choosing, 2 blocks of 1 serving and 2 training"
    )
    with pytest.raises(ConfigurationError, match=r"- 2 search ranks = 5 ranks.* or --search-ranks 1"):
        BlockLayout.of(ranks(8), 3, 1, 2)
    seen = []
    for rank in range(5):
        env = {"CUDA_VISIBLE_DEVICES": "4,5"}
        share_host(ranks(5, gpus=2), rank, None, env, search_turns(2))
        seen.append(env["CUDA_VISIBLE_DEVICES"])
    assert seen == ["", "", "", "4", "5"]


def test_the_coordinator_takes_no_gpu_and_the_others_take_turns():
    seen = []
    for rank in range(4):
        env = {"CUDA_VISIBLE_DEVICES": "4,5"}
        share_host(ranks(4, gpus=2), rank, None, env, search_turns(0))
        seen.append(env["CUDA_VISIBLE_DEVICES"])
    assert seen == ["", "4", "5", "4"]


# -- folders -------------------------------------------------------------------------------------------


def trial(name, *, config=True, **files):
    home = Path("s", TRIAL, name)
    home.mkdir(parents=True)
    if config:
        home.with_name(f"{name}.json").write_text(json.dumps({"parameters": {"x": 1}, "seed": 7}))
    for stem, content in files.items():
        (home / f"{stem}.json").write_text(content)


def test_a_search_goes_on_in_its_own_folder_only():
    assert claim_search(None, "net", "a = 1\n")[0].name == "net-search-1"
    assert claim_search(None, "net", "a = 1\n")[0].name == "net-search-2"
    folder, goes_on = claim_search("s", "net", "a = 1\nnum_iterations = 3\n")
    assert not goes_on
    assert claim_search("s", "net", "a = 1\nnum_iterations = 9\n") == (folder, True)
    with pytest.raises(ConfigurationError, match="only there is 'a = 1'"):
        claim_search("s", "net", "a = 2\nnum_iterations = 3\n")
    (folder / SEARCH).write_text("num_iterations = 3\n\n[space.width]\nlow = 1\n")
    claim_search("s", "net", "space = {width = {low = 1}}\n")  # the same, written otherwise
    with pytest.raises(ConfigurationError, match=r"only there is 'space\.width\.low = 1'"):
        claim_search("s", "net", "[space.width]\nlow = 2\n")
    (folder / SEARCH).write_text("a = \n")
    with pytest.raises(ConfigurationError, match=r"--run .*search\.toml is not valid TOML"):
        claim_search("s", "net", "a = 1\n")
    Path("t").mkdir()
    Path("t/other").write_text("")
    with pytest.raises(ConfigurationError, match="exists already, without a search"):
        claim_search("t", "net", "")


def test_a_folder_that_another_job_searches_in_is_refused(monkeypatch):
    def taken(folder, doing):
        raise ConfigurationError(f"another job is {doing} in {folder}")

    claim_search("s", "net", "a = 1\n")
    monkeypatch.setattr(folders, "hold", taken)
    for folder in ("s", "new"):
        with pytest.raises(ConfigurationError, match=f"another job is searching in .*{folder}$"):
            claim_search(folder, "net", "a = 1\n")


def test_what_has_not_begun_leaves_nothing():
    folder, _ = claim_search("s", "net", "a = 1\n")
    remove_unused(folder)
    assert not folder.exists()
    folder, _ = claim_search("s", "net", "a = 1\n")
    (folder / JOURNAL).write_text('{"study": []}\n')
    remove_unused(folder)
    (folder / JOURNAL).write_text('{"study": []}\n{"trial": 0}\n')
    assert (folder / SEARCH).exists()


def test_what_was_broken_off_is_removed_or_goes_on():
    trial("0000")
    trial("0001", history="{}")
    trial("0002", history="{}", value='{"value": 3}')
    done = {"trial": 0, "state": "COMPLETE", "user": {"nnlo:folder": "0000"}}
    Path("s", JOURNAL).write_text(json.dumps(done) + '\n{"trial": 1, "sta')
    found = inspect_folder(Path("s"), goes_on=True)
    assert found == Found(("0000",), (("0001", {"x": 1}, 7), ("0002", {"x": 1}, 7)))
    assert sorted(path.name for path in Path("s", TRIAL).glob("*/")) == ["0000", "0002"]
    assert inspect_folder(Path("s"), goes_on=False) == Found(("0000",))
    assert sorted(path.name for path in Path("s", TRIAL).glob("*")) == ["0000", "0000.json"]


def test_what_was_interrupted_goes_on_under_its_name_only():
    left = ("0002", {"x": 1}, 9), ("0003", {"x": 1}, 8)
    found = Found(("0000", "0001"), left)
    assert found.home("0002", {"x": 1}, 5) == ("0002", 9)
    assert found.home("0004", {"x": 1}, 5) == ("0004", 5)
    assert found.home("0003", {"x": 2}, 5) == ("0003-2", 5)
    assert Found(("0001", "0001-2")).home("0001-2", {"x": 1}, 5) == ("0001-3", 5)


def test_the_models_of_the_best_trial_stay_though_another_one_names_its_folder():
    trial("0000")
    model = Path("s", TRIAL, "0000", "weights.pt")
    model.write_bytes(b"")
    folders.drop_models(Path("s"), "0000", best="0000")
    assert model.exists()
    folders.drop_models(Path("s"), "0000", best="0001")
    assert not model.exists()


# -- what is told --------------------------------------------------------------------------------------


def finished(number, value, **changed):
    facts = {
        "number": number,
        "state": "complete" if value is not None else "failed",
        "value": value,
        "params": {"width": 4 + number, "kind": "flat"},
        "folds": (),
        "steps": ((0, 0.5),),
        "block": number % 2,
        "folder": f"{number:04}",
        "began_s": 100.0 + number,
        "ended_s": 104.0 + number,
        "problem": "" if value is not None else "it & <all> failed",
    }
    return FinishedTrial(**facts | changed)


def search(folder, **options):
    request = read_request({"model": "m.py", "loss": "mse", "epochs": "3"}, [])
    object.__setattr__(request, "search", SearchSettings(**options))
    space = space_of({"width": (4, 16, "log"), "kind": ["flat", "<deep>"]}, "x", get_model)
    layout = BlockLayout(blocks=[(1, 2), (3, 4)])
    figure = FigureOfMerit("val_accuracy", "last", True)
    return SearchFacts(
        default={},
        request=request,
        space=space,
        figure=figure,
        layout=layout,
        folder=folder,
        began="",
        began_s=90.0,
    )


def test_the_table_has_a_line_for_each_block_and_one_for_all(tmp_path):
    board = Board(search(tmp_path, num_iterations=6), [finished(0, 0.5), finished(1, None)], 110.0)
    running = [TrialRow(2, 1, 107.0, {"width": 8}, 2, 0.75), TrialRow(3, None, 0.0, {}, 0, None)]
    assert board.rows(running) == [
        "  block 0   idle",
        "  block 1   trial 2       3.0 s  epoch 2/3  val_accuracy 0.7500  width 8",
        "  2 of 6 trials  best val_accuracy 0.5000  about 8.0 s left",
    ]
    best = finished(0, 0.5)
    assert "val_accuracy 0.5000 (best)  4.0 s  width 4" in board.line(best, best)
    assert "failed: it & <all> failed" in board.line(finished(1, None), best)
    assert "trial 1  broken off  4.0 s" in board.line(finished(1, None, problem="broken off: a signal"), best)


def test_a_block_that_helps_is_shown_with_the_trial_it_helps(tmp_path):
    facts = search(tmp_path, num_iterations=6)
    running = [TrialRow(2, 1, 107.0, {"width": 8}, 2, 0.75, (0,))]
    rows = Board(facts, [], 110.0).rows(running)
    assert rows[0] == "  block 0   helps with trial 2"
    assert rows[1].startswith("  block 1   trial 2       3.0 s")
    helped = finished(1, 0.5, helpers=((0, 103.0),))
    assert helped.shifts == [(1, 101.0, 105.0), (0, 103.0, 105.0)]
    assert helped.described()["helpers"] == [[0, 103.0]]
    text = page(facts.for_page, [helped], helped, {}, "few trials")
    assert "blocks trained 75 % of the time" in text
    series = drawn([helped])["Blocks"]["data"]
    assert [bars["y"] for bars in series] == [["block 1", "block 0"], [], []]
    assert series[0]["base"] == [0.0, 2.0]
    assert series[0]["x"] == [4.0, 2.0]


def test_a_trial_from_the_journal_took_as_long_as_it_did():
    optuna = pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
    study = optuna.create_study()
    study.enqueue_trial({})
    trial = study.ask()
    for key, value in {"nnlo:began": 1000.0, "nnlo:seconds": 2.5, "nnlo:block": 1}.items():
        trial.set_user_attr(key, value)
    study.tell(trial, 0.5)  # at another start, long after
    (one,) = all_finished(study)
    assert (one.began_s, one.ended_s, one.block) == (1000, 1002.5, 1)


def test_a_failed_trial_has_no_value_whatever_the_sampler_was_told():
    optuna = pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
    study = optuna.create_study()
    attributes = {"nnlo:failure": "error", "nnlo:error": "ValueError: too wide"}
    study.add_trial(optuna.trial.create_trial(value=0.5, user_attrs=attributes))
    study.add_trial(optuna.trial.create_trial(value=0.5))
    bad, good = all_finished(study)
    assert (bad.state, bad.value, bad.problem) == ("failed", None, "ValueError: too wide")
    assert best_of(FigureOfMerit("loss", "last", False), [bad, good]) is good


def studied(trials):
    optuna = pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
    study = optuna.create_study(direction="maximize")
    for one in trials:
        found = {
            name: optuna.distributions.CategoricalDistribution([value]) for name, value in one.params.items()
        }
        state = optuna.trial.TrialState["FAIL" if one.value is None else "COMPLETE"]
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=one.value,
                params=one.params,
                distributions=found,
                intermediate_values=dict(one.steps),
            )
        )
    return study


def drawn(trials, weights=None):
    """The figures as plotly has them."""
    pytest.importorskip("plotly", reason="the environment for MPICH has no plotly")
    drawings = figures(studied(trials), trials, "val_accuracy", weights or {})
    return {title: told(drawing) for title, drawing in drawings.items()}


def told(drawing):
    """What is given to plotly: its data and its layout."""
    after = drawing.rpartition("Plotly.newPlot(")[2]
    data, end = json.JSONDecoder().raw_decode(after := after[after.index("[") :])
    layout, _ = json.JSONDecoder().raw_decode(after[after.index("{", end) :])
    return {"data": data, "layout": layout}


class Tags(HTMLParser):
    """Sees whether all that is opened is closed, and what is asked of a network."""

    def __init__(self):
        super().__init__()
        self.open, self.asked = [], []

    def handle_starttag(self, tag, attrs):
        self.asked += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


TRIALS = [finished(number, 0.5 + number / 50) for number in range(12)] + [finished(12, None)]


@pytest.mark.parametrize("trials", [[], [finished(0, None)], [finished(0, 0.5)], TRIALS])
@pytest.mark.parametrize("drawings", [{}, {"History": "<div></div>", "Blocks": "<div></div>"}])
def test_the_page_is_whole_and_asks_nothing_of_a_network(trials, drawings, tmp_path):
    good = [one for one in trials if one.value is not None]
    best = good[-1] if good else None
    text = page(search(tmp_path).for_page, trials, best, drawings, "few trials")
    tags = Tags()
    tags.feed(text)
    assert (tags.open, tags.asked) == ([], [f"trials/{one.folder}/" for one in trials])
    assert ("pip install 'nnlo[tune]'" in text) == (not drawings)
    assert text.count("few trials") == bool(good)
    if best is not None:
        assert f"val_accuracy {best.value:.4g} in trial {best.number}" in text
    failed = [one for one in trials if one.value is None]
    assert text.count("it &amp; &lt;all&gt; failed") == bool(failed)  # once, whoever has failed so


@pytest.mark.parametrize("trials", [[], [finished(0, None)], [finished(0, 0.5)], TRIALS])
def test_the_figures_show_every_trial_and_ask_nothing_of_a_network(trials, tmp_path):
    good = [one for one in trials if one.value is not None]
    found = drawn(trials, {"width": 0.75, "kind": 0.25} if good else {})
    titles = ["History", "Importance", "Slices", "Parallel coordinates", "Epochs", "Blocks"]
    assert list(found) == (titles if good else titles[-1:])
    blocks = found["Blocks"]["data"]
    assert sum(len(bars["y"]) for bars in blocks) == len(trials)
    if good:
        assert found["History"]["data"][0]["y"] == [one.value for one in good]
        assert found["Importance"]["data"][0]["y"] == ["width", "kind"]
        assert found["Slices"]["layout"]["yaxis"]["title"]["text"] == "val_accuracy"
    drawings = figures(studied(trials), trials, "val_accuracy", {})
    tags = Tags()
    tags.feed(page(search(tmp_path).for_page, trials, None, drawings, ""))
    assert (tags.open, tags.asked) == ([], [f"trials/{one.folder}/" for one in trials])
    assert len(next(iter(drawings.values()))) > 1_000_000  # the first has plotly in it


def test_without_plotly_there_are_no_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert figures(None, [], "loss", {}) == {}


def test_the_word_on_noise_is_what_the_best_of_equal_trials_gains_by_chance():
    draw, trials, folds = np.random.default_rng(3), 7, 5
    easier = np.array([0.0, 3.0, -1.0, 2.0, 0.5])  # folds differ, alike in all trials
    gains, told_gains = [], []
    for _ in range(2000):
        values = draw.standard_normal((trials, folds)) + easier
        gains.append(values.mean(1).max() - easier.mean())
        told_gains.append(by_chance(values.tolist()))
    assert np.mean(told_gains) == pytest.approx(np.mean(gains), rel=0.05)
    assert by_chance([[0.5], [0.75]]) is None
    assert by_chance([[0.5, 0.75]]) is None
    assert "0.42 of it may be chance" in remark([[0.0, 1.0], [1.0, 0.0]], 2)
    assert "add --n-fold" in remark([(), ()], 2)
    assert remark([()], 1) == ""


def test_the_page_says_what_was_gained(tmp_path):
    table = {"kind": ["flat", "deep"], "width": {"low": 4, "high": 16, "when": {"kind": "deep"}}}
    facts = replace(
        search(tmp_path, n_fold=2), space=space_of(table, "x", get_model), default={"kind": "flat"}
    )
    trials = [
        finished(0, 0.5, params={"kind": "flat"}),
        finished(1, 0.75, params={"kind": "deep", "width": 8}, folds=(0.7, 0.8)),
    ]
    text = page(facts.for_page, trials, trials[1], {}, "")
    assert "0.75 ± 0.05 over 2 folds; the defaults gave 0.5, in trial 0" in text
    threads = drawn(trials)["Parallel coordinates"]["data"]
    assert len([one for one in threads if one["mode"] == "lines"]) == 2  # also the trial without a width


# -- what is written of it -----------------------------------------------------------------------------


def test_the_table_of_options_is_complete():
    rows = re.findall(r"^\| `(--[\w-]+)` \| (.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    defaults = {None: "", False: "no"}
    assert rows == [
        (
            one.flag,
            str(defaults.get(one.default, one.default)),
            one.help + (f": {', '.join(one.choices)}" if len(one.choices) > 2 else ""),
        )
        for one in SEARCH_OPTIONS.values()
    ]


def test_the_search_file_is_named(tmp_path):
    assert SEARCH == "search.toml"
    assert (claim_search(str(tmp_path / "s"), "net", "")[0] / SEARCH).exists()
