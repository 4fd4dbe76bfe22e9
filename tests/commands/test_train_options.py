"""`nnlo train` before any framework is loaded: options, files of options, model files, folders of runs."""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import sys
import tomllib
import zipfile
from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from nnlo_common import ConfigurationError, MissingExtraError
from nnlo_common.base._file_access import whole
from nnlo_common.cluster._gpus import share_host, train_turns
from nnlo_common.cluster._hosts import locate
from nnlo_common.commands._cli import main
from nnlo_common.commands.train._command_line import read
from nnlo_common.commands.train._job import Job, _joint_problem, brief
from nnlo_common.commands.train._model_file import Loaded, check_model, choose_back_end, load_model
from nnlo_common.commands.train._option import Given, OptionKind, as_toml, read_config
from nnlo_common.commands.train._python_file import frameworks_in, import_file, made_model
from nnlo_common.commands.train._run_folder import claim, config_text, remove_unused, write_json
from nnlo_common.commands.train._run_plan import RunPlan, data_of
from nnlo_common.commands.train._settings import (
    MODE_OPTIONS,
    MODES,
    OPTIONS,
    RANK_FLAGS,
    Settings,
    settings_of,
)
from nnlo_common.commands.train._stopping import Stopping, rises
from nnlo_common.training._rank_options import RankOptions
from tests.helpers.pages import code

LAYER = {"class_name": "Dense", "module": "keras.layers", "config": {"name": "d"}}
LAMBDA = {"class_name": "Lambda", "module": "keras.layers", "config": {"name": "plus"}}
FOREIGN = {"class_name": "Net", "module": "os.path", "config": {}}


def net(*layers):
    return json.dumps({"class_name": "Sequential", "module": "keras", "config": {"layers": list(layers)}})


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("net.json").write_text(net(LAYER))
    Path("a.h5").write_bytes(b"")
    path = list(sys.path)
    yield
    sys.path[:] = path


def refusal(capsys, *arguments):
    """What the command says of these words, in one screen, having done nothing."""
    before = sorted(Path().rglob("*"))
    assert main(["train", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("nnlo train: ")
    assert told.err.count("nnlo train: ") == 1
    assert len(told.err.splitlines()) <= 20
    assert "Traceback" not in told.err
    assert sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts) == before
    return told.err


GOOD = ["--model", "net.json", "--train", "a.h5", "--loss", "mse"]

WRONG_FLAGS = {
    "unknown": (["--epoch", "3"], "no option --epoch; did you mean '--epochs'?"),
    "misspelt": (["--learnin-rate=3"], "did you mean '--learning-rate'?"),
    "far from all": (["--xyzzy"], "no option --xyzzy (see nnlo train --help"),
    "a word too many": (["--batch", "3", "b.h5"], "'b.h5' belongs to no option"),
    "without its value": (["--epochs"], "--epochs: expected one argument"),
    "no number": (
        ["--epochs", "five"],
        "--epochs 'five' is not possible: it must be a whole number at least 1",
    ),
    "half an epoch": (["--epochs", "0.5"], "whole number at least 1"),
    "epochs below 0": (["--epochs", "-3"], "whole number at least 1"),
    "batch 0": (["--batch", "0"], "--batch '0' is not possible"),
    "NaN": (["--learning-rate", "nan"], "a finite number above 0"),
    "infinity": (["--learning-rate", "inf"], "a finite number above 0"),
    "too large to be finite": (["--learning-rate", "1e999"], "a finite number above 0"),
    "rate 0": (["--learning-rate", "0"], "above 0"),
    "momentum 1": (["--momentum", "1"], "at least 0 and below 1"),
    "seed below 0": (["--seed", "-1"], "--seed '-1'"),
    "a huge seed": (["--seed", "9" * 30], "below"),
    "servers below 0": (["--servers", "-1"], "at least 0"),
    "a group of nobody": (["--group-size", "0"], "at least 1"),
    "GPUs below 0": (["--max-gpus", "-1"], "at least 0"),
    "patience 0": (["--early-stopping", "0"], "at least 1"),
    "unknown mode": (["--mode", "easdg"], "did you mean 'easgd'?"),
    "another mode's option": (["--mode", "gem", "--alpha", "3"], "eamsgd, easgd, but the mode is 'gem'"),
    "an impossible option": (["--mode", "easgd", "--beta", "-1"], "EASGD: beta=-1.0"),
    "two that are one": (["--mode", "easgd", "--beta", "1", "--alpha", "0.1"], "one of the two"),
    "half a sub-server": (["--mode", "easgd", "--sub-servers", "0.5"], "a whole number or 'host'"),
    "sub-servers below 0": (["--mode", "easgd", "--sub-servers", "-1"], "sub_servers=-1"),
    "sub-servers of Downpour": (["--sub-servers", "2"], "an option of --mode eamsgd, easgd"),
    "two servers of a tree": (["--mode", "easgd", "--sub-every", "3"], "say how many with sub_servers"),
    "unknown order": (["--mode", "easgd", "--order", "papr"], "did you mean 'paper'?"),
    "EAMSGD of Adam": (["--mode", "eamsgd", "--optimizer", "adam"], "nesterov=true"),
    "EAMSGD without Nesterov": (
        ["--mode", "eamsgd", "--optimizer-option", "nesterov=false"],
        "--optimizer-option nesterov=true",
    ),
    "a decay of nothing": (["--decay", "0.5"], "add one, or leave it out"),
    "a step of cosine": (["--schedule", "cosine", "--decay-every", "3"], "--schedule step or plateau"),
    "a warm-up without end": (["--warm-up", "3", "--epochs", "3"], "takes all of --epochs 3"),
    "a scaled rate of one process": (
        ["--scale-rate", "linear", "--mode", "steady"],
        "leave --scale-rate out",
    ),
    "an unknown law": (["--scale-rate", "cubic"], "--scale-rate"),
    "unknown schedule": (["--schedule", "cosin"], "did you mean 'cosine'?"),
    "no such order of EAMSGD": (["--mode", "eamsgd", "--order", "paper"], "but the mode is 'eamsgd'"),
    "local steps backwards": (["--mode", "downpour", "--local", "-1"], "local_learning_rate=-1.0"),
    "pushes of nothing": (["--mode", "downpour", "--n-push", "0"], "n_push=0"),
    "every nothing": (["--every", "0"], "every=0"),
    "no moving rate's unit": (["--mode", "easgd", "--beta-per", "steps"], "did you mean 'step'?"),
    "GEM of Adam": (["--mode", "gem", "--optimizer", "adam"], "--optimizer sgd --momentum"),
    "no condition": (["--target-metric", "0.9"], "like 'val_accuracy > 0.9'"),
    "a condition of NaN": (["--target-metric", "loss < nan"], "finite"),
    "unknown level": (["--log-level", "inf"], "did you mean 'info'?"),
    "copies to nowhere": (["--copy-command", "cp {src} {dst}"], "add --cache FOLDER"),
    "half a quote": (["--cache", "c", "--copy-command", "cp '{src}"], "fix its quotes"),
    "stops by, never": (["--early-stopping-metric", "loss"], "add --early-stopping EPOCHS"),
    "checkpoint nowhere": (["--checkpoint"], "--checkpoint needs --run"),
    "checkpoint never": (["--checkpoint", "0", "--run", "r"], "at least 1"),
    "checkpoint half": (["--checkpoint", "0.5"], "at least 1"),
    "two folders": (["--checkpoint", "a", "--run", "r"], "--checkpoint 'a' is not possible"),
    "no pairs": (["--optimizer-option", "nesterov"], "pairs like depth=3"),
    "a pair twice": (["--optimizer-option", "a=1", "a=2"], "'a' twice"),
    "two rates": (
        ["--learning-rate", "0.1", "--optimizer-option", "lr=0.5"],
        "--learning-rate 0.1 and --optimizer-option lr=0.5 set the same; give one of the two",
    ),
    "two momenta": (
        ["--momentum", "0.5", "--optimizer-option", "momentum=0.9"],
        "--momentum 0.5 and --optimizer-option momentum=0.9 set the same",
    ),
    "params for a JSON": (["--model-params", "depth=3"], "net.json is not one"),
    "no such folder": (["--train", "no/a.h5"], "there is no such file"),
    "a pattern of nothing": (["--train", "no*.h5"], "matches nothing"),
    "a list that is missing": (["--train", "no.list"], "no.list cannot be read"),
    "remote": (["--train", "root://host//a.h5"], "add --cache"),
    "an empty name": (["--loss", " "], "not empty"),
}


@pytest.mark.parametrize(("words", "expected"), WRONG_FLAGS.values(), ids=WRONG_FLAGS)
def test_flags_that_cannot_be_are_refused(words, expected, capsys):
    assert expected in refusal(capsys, *GOOD, *words)


@pytest.mark.parametrize("command", ["train", "tune", "advise", "predict", "rechunk"])
def test_every_command_says_which_package_a_remote_name_needs(command, capsys, monkeypatch):
    for package in ("fsspec", "pyarrow", "optuna"):
        pytest.importorskip(package, reason="the environment for MPICH has no readers of files")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    Path("m.py").write_text("def get_model():\n    raise RuntimeError('too early')\n")
    np.savez("w.npz", w=np.zeros(1))
    training = ["--model", "m.py", "--loss", "mse", "--train"]
    words = {
        "train": training,
        "tune": [*training[:-1], "--objective", "val_loss", "--hold-out", "0.5", "--train"],
        "advise": training,
        "predict": ["m.py", "--from", "w.npz", "--out", "y.h5", "--data"],
        "rechunk": ["--to", "new"],
    }[command]
    before = sorted(Path().rglob("*"))
    assert main([command, *words, "s3://bucket/a.parquet"]) == 2
    told = "reading s3://bucket/a.parquet needs the package 's3fs', which is not installed. Install it with: "
    assert told + "pip install 'nnlo[s3]'" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("missing", ["--model", "--loss"])
def test_what_is_missing_is_named(missing, capsys):
    at = GOOD.index(missing)
    assert f"{missing} is missing" in refusal(capsys, *GOOD[:at], *GOOD[at + 2 :])


def test_lists_are_looked_at_early(capsys):
    Path("empty.list").write_text("# nothing\n")
    assert "names no file" in refusal(capsys, *GOOD, "--val", "empty.list")
    Path("up.list").write_text("../../none/../a.h5\n")
    assert "there is no such file" in refusal(capsys, *GOOD, "--val", "up.list")
    Path("binary.list").write_bytes(b"\xff\xfe\x00")
    assert "is not text" in refusal(capsys, *GOOD, "--val", "binary.list")


WRONG_FILES = {
    "tabs": ("a.yaml", "epochs: 3\n\tbatch: 2\n", "a.yaml, line 2"),
    "a tag": ("a.yaml", "epochs: !!python/object/apply:os.system ['touch hacked']\n", "could not determine"),
    "an unknown tag": ("a.yaml", "epochs: !mine 3\n", "could not determine"),
    "an alias": (
        "a.yaml",
        "batch: &a 3\nepochs: *a\n",
        "line 2 is not valid YAML for options: aliases are not allowed",
    ),
    "laughs": ("a.yaml", "a: &a [x,x]\nb: &b [*a,*a]\nc: [*b,*b]\n", "aliases are not allowed"),
    "twice in YAML": (
        "a.yaml",
        "epochs: 3\nepochs: 4\n",
        "line 2 is not valid YAML for options: 'epochs' is there twice",
    ),
    "twice, spelt apart": ("a.yaml", "max-gpus: 3\nmax_gpus: 4\n", "'max_gpus' twice"),
    "merged": ("a.yaml", "a: &x {b: 1}\nc:\n  <<: *x\n", "aliases"),
    "a list": ("a.yaml", "- epochs\n- 3\n", "no names of options in it, but list data"),
    "a text": ("a.yaml", "epochs\n", "no names of options in it, but str data"),
    "numbers as names": ("a.yaml", "3: epochs\n", "no names of options"),
    "empty YAML": ("a.yaml", "# nothing\n", "is empty"),
    "two documents": ("a.yaml", "epochs: 3\n---\nbatch: 3\n", "is not valid YAML for options"),
    "an open bracket": ("a.yaml", "metrics: [accuracy\n", "is not valid YAML for options"),
    "no date": ("a.yaml", "run: 2020-13-45\n", "month must be"),
    "a date": ("a.yaml", "run: 2020-12-05\n", "run = datetime.date"),
    "deep YAML": ("a.yaml", "a: " + "[" * 999, "nested too deeply"),
    "no UTF-8": ("a.yaml", b"epochs: \xff", "is not UTF-8"),
    "a list for a number": (
        "a.yaml",
        "epochs: [3]\n",
        "a.yaml: epochs = [3] is not possible: it must be a whole",
    ),
    "truth for a number": ("a.yaml", "epochs: yes\n", "epochs = True"),
    "a half for a whole": ("a.toml", "batch = 2.5\n", "batch = 2.5"),
    "NaN in TOML": ("a.toml", "learning_rate = nan\n", "finite number above 0"),
    "a number for a text": ("a.toml", "loss = 3\n", "loss = 3"),
    "a table for a text": ("a.toml", "[loss]\na = 1\n", "loss = {'a': 1}"),
    "a text for truth": (
        "a.toml",
        "shuffle = 'no'\n",
        "shuffle = 'no' is not possible: it must be true or false",
    ),
    "lists of lists": ("a.toml", "val = [['a.h5']]\n", "a text or a list of texts"),
    "no list at all": ("a.toml", "val = []\n", "a text or a list of texts"),
    "a date in a table": ("a.toml", "[model_params]\na = 2020-01-01\n", "'a', whose value"),
    "a table in a table": ("a.toml", "[model_params.a]\nb = 1\n", "'a', whose value"),
    "twice in TOML": ("a.toml", "epochs = 3\nepochs = 4\n", "is not valid TOML"),
    "no TOML": ("a.toml", "epochs: 3\n", "is not valid TOML"),
    "an unknown name": ("a.toml", "epoch = 3\n", "a.toml has no option 'epoch'; did you mean 'epochs'?"),
    "itself": ("a.toml", "config = 'a.toml'\n", "has no option 'config'"),
    "deep TOML": ("a.toml", "a = " + "[" * 3000, "a.toml"),
    "of its own kind": ("a.ini", "epochs = 3\n", "neither .toml nor .yaml"),
    "a megabyte": ("a.toml", "#" * 1_000_001, "more than 1000000 bytes"),
}


@pytest.mark.parametrize(("name", "text", "expected"), WRONG_FILES.values(), ids=WRONG_FILES)
def test_files_of_options_that_cannot_be_are_refused(name, text, expected, capsys):
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    said = refusal(capsys, *GOOD[:4], "--config", name)
    assert expected in said
    assert name in said
    assert not Path("hacked").exists()


@pytest.mark.parametrize(("name", "problem"), [("no.toml", "No such file"), ("d.toml", "Is a directory")])
def test_files_of_options_that_cannot_be_read_are_refused(name, problem, capsys):
    Path("d.toml").mkdir()
    assert f"--config {name} cannot be read ({problem}" in refusal(capsys, "--config", name)


WRONG_MODELS = {
    "no such file": (None, "no.json", "No such file"),
    "a folder": (None, ".", "it is a folder"),
    "empty": ("", "m.json", "it is empty"),
    "no JSON": ("{", "m.json", "is not valid JSON"),
    "cut off": (net(LAYER)[:-9], "m.json", "is not valid JSON"),
    "a list": ("[1, 2]", "m.json", "so not a Keras model"),
    "other JSON": ('{"weights": [1]}', "m.json", "so not a Keras model"),
    "deep": ("[" * 10_000, "m.json", "nested too deeply"),
    "no text": (b"\xff\xfe\xfd{", "m.json", "is not valid JSON"),
    "a Lambda": (net(LAYER, LAMBDA), "m.json", "the layer 'plus' is a Lambda"),
    "a foreign class": (net(FOREIGN), "m.json", "has a 'Net' of os.path"),
    "no archive": ("text", "m.keras", "is not a complete .keras file"),
    "a pickle": (b"\x80\x04N.", "m.pkl", "add --allow-pickle"),
    "a whole module": (b"PK", "m.pt", "add --allow-pickle"),
    "old weights": (b"\x89HDF", "m.h5", "ends in .h5"),
    "without an ending": ("x", "model", "ends in nothing"),
    "no Python": ("def get_model(:\n", "m.py", "m.py, line 1: "),
    "bytes": (b"\x00\x01", "m.py", "m.py"),
    "no get_model": ("def get_modle(): pass\n", "m.py", "has no get_model; did you mean 'get_modle'?"),
}


@pytest.mark.parametrize(("content", "name", "expected"), WRONG_MODELS.values(), ids=WRONG_MODELS)
def test_files_that_are_no_models_are_refused(content, name, expected, capsys):
    if content is not None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert expected in refusal(capsys, "--model", name, *GOOD[2:])


@pytest.mark.parametrize(
    ("entry", "text", "expected"),
    [
        ("other.json", "{}", "no config.json in it"),
        ("config.json", "{", "is not valid JSON"),
        ("config.json", net(LAMBDA), "is a Lambda"),
    ],
)
def test_archives_that_are_no_models_are_refused(entry, text, expected, capsys):
    with zipfile.ZipFile("m.keras", "w") as archive:
        archive.writestr(entry, text)
    assert expected in refusal(capsys, "--model", "m.keras", *GOOD[2:])


def test_a_damaged_archive_is_refused(capsys):
    with zipfile.ZipFile("m.keras", "w") as archive:
        archive.writestr("config.json", net(LAYER))
    damaged = Path("m.keras").read_bytes().replace(b"Dense", b"Dunce")
    Path("m.keras").write_bytes(damaged)
    assert "config.json in it is damaged" in refusal(capsys, "--model", "m.keras", *GOOD[2:])


WRONG_MODULES = {
    "raises at import": (
        "x = 1\nraise RuntimeError('no licence')\n",
        "line 2: RuntimeError was raised while it was",
    ),
    "imports nothing there": ("import nowhere_to_be_found\n", "ModuleNotFoundError"),
    "leaves at import": ("import sys\nsys.exit(0)\n", "line 2: sys.exit(0) was called while it was imported"),
    "asks": ("name = input()\n", "it reads from the terminal"),
    "reads": ("import sys\nsys.stdin.readline() or 1 / 0\n", "line 2: ZeroDivisionError"),
    "get_model raises": (
        "def get_model():\n    raise ValueError('few layers')\n",
        "line 2: ValueError was raised by",
    ),
    "get_model leaves": (
        "def get_model():\n    raise SystemExit('bye')\n",
        "sys.exit('bye') was called by get_model()",
    ),
    "returns nothing": ("def get_model(): pass\n", "returned None"),
    "returns a number": ("def get_model(): return 3\n", "returned 3, of the type int"),
    "is a number": ("get_model = 3\n", "cannot be called"),
    "wants parameters": ("def get_model(depth): pass\n", "missing a required argument: 'depth'"),
    "raises much": ("def get_model():\n    raise ValueError('line\\n' * 500)\n", "ValueError"),
    "recurses": ("def get_model():\n    return get_model()\n", "RecursionError"),
}


@pytest.mark.parametrize(("text", "expected"), WRONG_MODULES.values(), ids=WRONG_MODULES)
def test_python_files_that_make_no_model_are_refused(text, expected, capsys):
    Path("m.py").write_text(text if "get_model" in text else text + "def get_model(): return 1\n")
    said = refusal(capsys, "--model", "m.py", *GOOD[2:])
    assert expected in said
    assert "m.py" in said


def test_parameters_that_get_model_does_not_take_are_refused(capsys):
    Path("m.py").write_text("def get_model(depth=3, width=2): pass\n")
    said = refusal(capsys, "--model", "m.py", "--model-params", "depht=4", *GOOD[2:])
    assert "get_model(depth=3, width=2)" in said
    assert "did you mean 'depth'?" in said


def test_a_pickle_is_read_if_that_is_asked_for_only(capsys):
    Path("m.pkl").write_bytes(pickle.dumps({"weights": 1}))
    with pytest.raises(ConfigurationError, match="can run any code"):
        check_model(Settings(model="m.pkl", loss="mse"))
    trusted = Settings(model="m.pkl", loss="mse", allow_pickle=True)
    with pytest.raises(ConfigurationError, match=r"it holds .* of the type dict"):
        load_model(trusted, check_model(trusted))
    Path("m.pkl").write_bytes(b"no pickle")
    with pytest.raises(ConfigurationError, match="UnpicklingError was raised while it was unpickled"):
        load_model(trusted, check_model(trusted))


# What is right.


def test_a_flag_counts_more_than_the_file():
    Path("run.toml").write_text(
        "model = 'net.json'\nloss = 'mse'\nepochs = 3\nlearning-rate = 1e-3\n"
        "[optimizer_option]\na = 1\nb = 2\n"
    )
    settings = read({"config": "run.toml", "epochs": "4", "optimizer_option": ["b=3"]}, [])
    assert (settings.epochs, settings.learning_rate) == (4, 1e-3)
    assert settings.optimizer_option == {"a": 1, "b": 3}


def test_a_folder_of_checkpoints_is_the_folder_of_the_run():
    Path("run.toml").write_text("model = 'net.json'\nloss = 'mse'\ncheckpoint = 'there'\n")
    by_file = read({"config": "run.toml"}, [])
    by_flag = read({"config": "run.toml", "checkpoint": "here"}, [])
    assert (by_file.run, by_file.checkpoint) == ("there", 1)
    assert (by_flag.run, by_flag.checkpoint) == ("here", 1)


def test_both_kinds_of_file_say_the_same():
    Path("a.toml").write_text(
        "model = 'net.json'\nloss = 'mse'\nlearning_rate = 1e-3\nmetrics = ['a']\ncheckpoint = 2\nrun = 'r'\n"
    )
    Path("a.yaml").write_text(
        "model: net.json\nloss: mse\nlearning_rate: 1e-3\nmetrics: a\ncheckpoint: 2\nrun: r\n"
    )
    assert settings_of(read_config("a.toml")) == settings_of(read_config("a.yaml"))


def test_yaml_without_its_package_names_the_line_to_type(monkeypatch):
    Path("a.yaml").write_text("epochs: 3\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'nnlo\[yaml\]'"):
        read_config("a.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("depth=3", 3),
        ("depth=0.5", 0.5),
        ("depth=true", True),
        ("depth=[1, 2]", [1, 2]),
        ("depth=relu", "relu"),
        ('depth="3"', "3"),
        ("depth=a=b", "a=b"),
        ("depth=", ""),
        ("depth=2020-01-01", "2020-01-01"),
        ("depth=1\nother = 2", "1\nother = 2"),
    ],
)
def test_values_of_pairs_are_read_as_toml_or_as_texts(text, value):
    assert Given([text]).read(OPTIONS["model_params"]) == {"depth": value}


def test_a_command_is_split_as_by_a_shell_that_is_not_there():
    line = Given("xrdcp -f '{src}' {dst}; rm x").read(OPTIONS["copy_command"])
    assert line == ("xrdcp", "-f", "{src}", "{dst};", "rm", "x")


@pytest.mark.parametrize("mode", MODES)
def test_every_option_of_every_mode_is_taken(mode):
    given = {"model": Given("net.json"), "loss": Given("mse"), "mode": Given(mode)}
    for name, option in MODES[mode].options.items():
        default = {"alpha": None, "local_learning_rate": 0.1, "local": 0.1}.get(name, option.default)
        if name in ("n_push", "n_fetch"):
            default = 2
        if default is not None:
            given[name] = Given(default if isinstance(default, bool) else str(default))
    if mode == "eamsgd":
        given["optimizer_option"] = Given({"nesterov": True})
    settings = settings_of(given)
    assert settings.rule() == type(settings.rule())(**vars(settings.rule()))
    assert set(settings.algorithm) == set(given) - {"model", "loss", "mode", "optimizer_option"}
    assert MODES[mode].options.keys() <= MODE_OPTIONS.keys()


words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
names = st.from_regex(r"[a-z_]{1,9}", fullmatch=True)
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain = st.one_of(words, st.booleans(), st.integers(-(2**60), 2**60), numbers)


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    loss=words.filter(str.strip),
    metrics=st.lists(words.filter(str.strip), min_size=1, max_size=3),
    rate=st.floats(1e-300, 1e300),
    params=st.dictionaries(names, st.one_of(plain, st.lists(plain, max_size=3))),
)
def test_what_is_written_as_toml_reads_the_same(loss, metrics, rate, params):
    values = {
        "loss": loss,
        "metrics": metrics,
        "learning_rate": rate,
        "shuffle": False,
        "model_params": params,
    }
    found = tomllib.loads(as_toml(values, OPTIONS))
    assert {"model_params": {}} | found == values


def test_the_configuration_of_a_run_makes_it_again():
    Path("m.py").write_text("def get_model(depth): pass\n")
    arguments = {
        "model": "m.py", "model_params": ["depth=3"], "train": ["a.h5", "root://x//b.h5"], "loss": "mse",
        "mode": "easgd", "alpha": "0.2", "cache": "c", "copy_command": "cp {src} {dst}", "run": "r",
    }  # fmt: skip
    settings = read(arguments, [])
    Path("again.toml").write_text(config_text(settings, 0.25))
    again = read({"config": "again.toml"}, [])
    assert again.model == str(Path("m.py").absolute())
    assert again.train == (str(Path("a.h5").absolute()), "root://x//b.h5")
    assert (again.learning_rate, again.run) == (0.25, None)
    assert again.algorithm == {
        "alpha": 0.2, "every": 10, "lag": 0, "sub_every": 10, "sub_servers": 0,
        "beta_per": "exchange", "order": "step_first", "synchronous": False, "wire": "float32",
    }  # fmt: skip
    same = ("model_params", "mode", "copy_command", "loss", "seed", "epochs", "batch")
    assert [getattr(again, name) for name in same] == [getattr(settings, name) for name in same]


# Values for options that take not any of their kind, and what has to be given with them.
VALUES = {"fold": "1/5", "target_metric": "loss < 0.1", "profile": "10-20", "all_reduce": "mpi"}
VALUES |= {"model": "/n.py", "from": "/f", "cache": "/c", "train": ["/a"], "val": ["/a", "/b"]}
WITH = {
    "all_reduce": {"servers": 0},
    "bucket": {"pad": 3},
    "copy_command": {"cache": "/c"},
    "decay": {"schedule": "step"},
    "decay_every": {"schedule": "step"},
    "early_stopping_metric": {"early_stopping": 3},
    "fold_groups": {"fold": "1/5"},
    "fold_labels": {"fold": "1/5"},
    "mask": {"pad": 3},
    "scale_rate": {"mode": "downpour"},
    "trust": {"layer_rates": "lars"},
    "warm_up": {"epochs": 9},
}
LEFT_OUT = {"run", "log_dir", "log_to", "checkpoint"}  # the last needs the first
ANY = {
    OptionKind.WORD: "a",
    OptionKind.WORDS: ["a", "b"],
    OptionKind.COMMAND: ["a b", "c"],
    OptionKind.WHOLE: 3,
    OptionKind.REAL: 0.5,
    OptionKind.PAIRS: {"a": 1},
}


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - MODE_OPTIONS - LEFT_OUT))
def test_the_configuration_of_a_run_has_every_option(name):
    option = OPTIONS[name]
    value = not option.default if option.kind is OptionKind.FLAG else ANY[option.kind]
    values = {"model": "/m.py", "loss": "mse", **WITH.get(name, {})}
    values[name] = VALUES.get(name, option.choices[-1] if option.choices else value)
    wanted = settings_of({one: Given(value) for one, value in values.items()})
    Path("again.toml").write_text(config_text(wanted, wanted.learning_rate or 0.25))
    again = settings_of(read_config("again.toml"))
    assert replace(again, algorithm={}, learning_rate=wanted.learning_rate) == replace(wanted, algorithm={})


def test_a_run_may_go_on_with_other_options_of_ranks():
    ours = settings(run="r", checkpoint=1)
    text = config_text(ours, 0.25)
    claim(ours, "net", "".join(line for line in text.splitlines(keepends=True) if "group_size" not in line))
    theirs = settings(run="r", checkpoint=1, ranks=RankOptions(group_size=2, spares=1, heir=False))
    folder, resumes = claim(theirs, "net", config_text(theirs, 0.25))
    assert resumes
    assert "group_size = 2" in (folder / "config.toml").read_text()


# The folder of a run.


def settings(**changes):
    return Settings(model="net.json", loss="mse", **changes)


def test_a_folder_is_numbered_and_never_anothers():
    first, _ = claim(settings(), "net", "a = 1\n")
    second, resumes = claim(settings(), "net", "a = 1\n")
    assert (first.name, second.name, resumes) == ("net-1", "net-2", False)
    assert (second / "config.toml").read_text() == "a = 1\n"
    remove_unused(second)
    assert not second.exists()
    (first / "history.json").write_text("{}")
    remove_unused(first)
    assert first.exists()


def test_a_folder_that_is_there_is_refused():
    Path("r").mkdir()
    claim(settings(run="r"), "net", "a = 1\n")  # an empty one is nobody's
    with pytest.raises(ConfigurationError, match="r exists already"):
        claim(settings(run="r"), "net", "a = 1\n")
    with pytest.raises(ConfigurationError, match=r"a\.h5 exists already"):
        claim(settings(run="a.h5"), "net", "")
    with pytest.raises(ConfigurationError, match=r"cannot be written \(Not a directory\)"):
        claim(settings(run="a.h5/r"), "net", "")


def test_more_epochs_continue_a_complete_training():
    ours = settings(run="r", checkpoint=1)
    folder, _ = claim(ours, "net", "a = 1\nepochs = 2\n")
    assert claim(ours, "net", "a = 1\nepochs = 3\n") == (folder, True), "it was interrupted"
    write_json(folder / "history.json", {"center": {"loss": [0.5, 0.25, 0.125]}})
    with pytest.raises(
        ConfigurationError, match="a complete training of --epochs 3; to continue it, give more"
    ):
        claim(ours, "net", "a = 1\nepochs = 3\n")
    with pytest.raises(
        ConfigurationError, match=r"--epochs 2: --run .* was begun with 3; give at least as many"
    ):
        claim(ours, "net", "a = 1\nepochs = 2\n")
    with pytest.raises(ConfigurationError, match="only there is 'a = 1'"):
        claim(ours, "net", "a = 2\nepochs = 5\n")
    assert (folder / "history.json").exists()
    assert claim(ours, "net", "a = 1\nepochs = 5\n") == (folder, True)
    assert not (folder / "history.json").exists()
    assert (folder / "config.toml").read_text() == "a = 1\nepochs = 5\n"


def test_with_checkpoints_the_same_training_goes_on():
    ours = settings(run="r", checkpoint=1)
    folder, resumes = claim(ours, "net", "a = 1\nb = 2\n")
    assert not resumes
    assert claim(ours, "net", "a = 1\nb = 2\n") == (folder, True)
    with pytest.raises(ConfigurationError, match="only there is 'b = 2'"):
        claim(ours, "net", "a = 1\nb = 3\n")
    write_json(folder / "history.json", {"center": {"loss": [0.5]}})
    with pytest.raises(ConfigurationError, match="a complete training"):
        claim(ours, "net", "a = 1\nb = 2\n")
    write_json(folder / "history.json", {"center": [0.5]})
    with pytest.raises(ConfigurationError, match=r"history\.json cannot be read"):
        claim(ours, "net", "a = 1\nb = 2\n")
    (folder / "history.json").unlink()
    (folder / "config.toml").unlink()
    with whole(folder / "other") as fresh:
        fresh.write_text("")
    with pytest.raises(ConfigurationError, match="not the folder of a run"):
        claim(ours, "net", "a = 1\n")


def test_numbers_in_a_row_stand_in_a_line():
    write_json(Path("h.json"), {"center": {"loss": [1.5, 2.5]}, "workers": [{"rank": 1}], "none": []})
    assert '"loss": [1.5, 2.5]' in Path("h.json").read_text()
    assert json.loads(Path("h.json").read_text())["workers"] == [{"rank": 1}]


def test_texts_with_brackets_are_written_as_they_are():
    facts = {"command": "nnlo train --metrics [  a   b ]", "ranks": [{"told": "[ 1,  2 ]"}]}
    write_json(Path("h.json"), facts)
    assert json.loads(Path("h.json").read_text()) == facts


# Python files.


def test_a_python_file_says_everything_but_what_flags_say(tmp_path):
    Path("helper.py").write_text("depth = 3\n")
    Path("m.py").write_text(
        "import helper\n"
        "def get_model(width=1): return width * helper.depth\n"
        "def get_train(): return ['a.h5']\n"
        "def get_val(): return 'b*.h5'\n"
        "def get_features(): return 'jets', lambda x: 2 * x\n"
        "def get_labels(): return 'kind'\n"
    )
    path = tmp_path / "m.py"
    module = import_file(path)
    assert made_model(module, path, {"width": 2}) == 6
    loaded = Loaded(model=None, framework="keras", name="m", path=path, module=module)
    data = data_of(settings(), loaded)
    assert (data.train, data.val) == (("a.h5",), ("b*.h5",))
    assert (data.reading["features"], data.reading["labels"]) == ("jets", "kind")
    assert data.reading["adapt_features"](np.ones(2)).tolist() == [2, 2]
    other = data_of(settings(features_name=("a", "b"), train=("c.h5",), cache="/tmp"), loaded)
    assert (other.reading["features"], other.train) == (("a", "b"), ("c.h5",))
    assert other.reading["adapt_features"](np.ones(1)).tolist() == [2]
    assert other.reading["stage_to"] == "/tmp"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("get_train", "return paths or patterns"),
        ("get_val", "return paths or patterns"),
        ("get_features", "the name of a dataset"),
        ("get_labels", "the name of a dataset"),
    ],
)
def test_a_python_file_that_answers_wrongly_is_refused(function, expected, tmp_path):
    Path("m.py").write_text(f"def get_model(): pass\ndef {function}(): return {{3: 4}}\n")
    loaded = Loaded(
        model=None, framework="keras", name="m", path=tmp_path / "m.py", module=import_file(tmp_path / "m.py")
    )
    with pytest.raises(ConfigurationError, match=f"{function}.. returned .*{expected}"):
        data_of(settings(train=("a.h5",)) if function != "get_train" else settings(), loaded)


def test_frameworks_are_seen_before_a_file_is_run(tmp_path):
    Path("m.py").write_text("def get_model():\n    import torch.nn\n    from keras import layers\n")
    assert frameworks_in(tmp_path / "m.py") == ["keras", "torch"]


# Ranks, hosts and metrics.


def test_ranks_share_the_gpus_of_a_host_that_may_be_used():
    places = locate([{"host": "a", "cores": 8, "gpus": 4}] * 5)
    seen = []
    for rank in range(5):
        env = {}
        share_host(places, rank, 2, env, train_turns())
        seen.append(env["CUDA_VISIBLE_DEVICES"])
    assert seen == ["0", "0", "1", "0", "1"]


@pytest.mark.parametrize(
    ("most", "before", "after"),
    [(0, "4,5", ""), (1, "4,5", "4"), (3, "4,5", "4,5"), (None, "4,5", "4,5")],
)
def test_alone_so_many_gpus_are_seen_as_may_be_used(most, before, after):
    env = {"CUDA_VISIBLE_DEVICES": before}
    share_host(locate([{"host": "a", "cores": 8, "gpus": 2}]), 0, most, env, train_turns())
    assert env == {"CUDA_VISIBLE_DEVICES": after}


def test_without_gpus_nothing_is_set():
    env = {}
    share_host(locate([{"host": "a", "cores": 8, "gpus": 0}]), 0, 0, env, train_turns())
    assert env == {}
    share_host(locate([{"host": "a", "cores": 8, "gpus": 0}] * 2), 1, 0, env, train_turns())
    assert not [name for name in env if name.endswith("VISIBLE_DEVICES")]


def test_what_is_wrong_on_some_ranks_is_said_with_their_names():
    assert _joint_problem([["a", "h"], ["a", "h"]]) == "a"
    assert _joint_problem([["", "h"], ["a", "g"], ["b", "h"]]) == "rank 1 on g: a\nrank 2 on h: b"


def test_a_job_of_one_agrees_with_itself():
    job = Job()
    assert job.share({"a": 1}) == [{"a": 1}]
    with pytest.raises(ConfigurationError, match="wrong") as caught, job.together():
        raise MissingExtraError("wrong", "b", "c")
    assert caught.value.collective


def test_long_texts_are_shortened():
    assert brief("a\n\nb") == "a\nb"
    assert len(brief("a\n" * 100).splitlines()) == 16


def test_metrics_to_stop_by_have_to_be_measured():
    names = ["loss", "accuracy"]
    every = [*names, "val_loss", "val_accuracy"]
    assert Stopping(settings(early_stopping=3), every).by == "val_loss"
    assert Stopping(settings(early_stopping=3), names).by == "loss"
    with pytest.raises(
        ConfigurationError, match=r"--target-metric val_accurac: .* did you mean 'val_accuracy'"
    ):
        Stopping(settings(target_metric="val_accurac > 0.9"), every)
    with pytest.raises(ConfigurationError, match=r"val_ needs --val"):
        Stopping(settings(target_metric="val_accuracy > 0.9"), names)


RISING = """AUC Accuracy BinaryAccuracy BinaryIoU CategoricalAccuracy ConcordanceCorrelation CosineSimilarity
    F1Score FBetaScore IoU MeanIoU OneHotIoU OneHotMeanIoU PearsonCorrelation Precision PrecisionAtRecall
    R2Score Recall RecallAtPrecision SensitivityAtSpecificity SparseCategoricalAccuracy
    SparseTopKCategoricalAccuracy SpecificityAtSensitivity TopKCategoricalAccuracy TrueNegatives
    TruePositives"""


@pytest.mark.parametrize("name", ["acc", "auc_1", "val_auc_12", "f1", "binary_io_u", "r2_score"])
def test_these_metrics_should_rise(name):
    assert rises(name)


@pytest.mark.parametrize("name", ["loss", "val_loss", "mae", "mse_2", "BinaryCrossentropy", "iou_loss", ""])
def test_these_metrics_should_fall(name):
    assert not rises(name)


@pytest.mark.slow
@pytest.mark.framework("keras")
def test_the_metrics_of_keras_rise_as_classes_and_as_keras_logs_them():
    keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
    rising = set()
    for name, kind in vars(keras.metrics).items():
        if isinstance(kind, type):
            required = {"num_classes": 2, "target_class_ids": [0]}
            required |= dict.fromkeys(("recall", "precision", "sensitivity", "specificity"), 0.5)
            wanted = {one: required[one] for one in signature(kind).parameters.keys() & required.keys()}
            logged = name if name == "MeanMetricWrapper" else kind(**wanted).name
            assert rises(name) == rises(logged) == rises(f"val_{logged}_3"), (name, logged)
            rising |= {name} if rises(name) else set()
    assert rising == {*RISING.split()} & {*vars(keras.metrics)}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({}, {"learning_rate": 0.01}),
        ({"optimizer": "AdaDelta"}, {"learning_rate": 1.0}),
        ({"optimizer": "adam"}, {}),
        ({"learning_rate": 0.3, "momentum": 0.5}, {"learning_rate": 0.3, "momentum": 0.5}),
        ({"mode": "gem"}, {"learning_rate": 0.01, "momentum": 0.9}),
        ({"mode": "gem", "momentum": 0.0}, {"learning_rate": 0.01, "momentum": 0.0}),
        ({"mode": "eamsgd"}, {"learning_rate": 0.01, "momentum": 0.9, "nesterov": True}),
    ],
)
def test_an_optimizer_has_sensible_defaults_for_its_algorithm(words, expected):
    assert settings(**words).optimizer_options == expected


def test_rules_seen_epoch_by_epoch_and_replayed_come_to_the_same_end():
    history = {"loss": [0.9, 0.5, float("nan"), 0.5, 0.6], "accuracy": [0.1, 0.3, 0.2, 0.4, 0.4]}
    given = settings(early_stopping=3, target_metric="accuracy > 0.5")
    seen, replayed = Stopping(given, [*history]), Stopping(given, [*history])
    better = [seen.see(dict(zip(history, one, strict=True))) for one in zip(*history.values(), strict=True)]
    assert better == [True, True, False, False, False]
    assert (
        replayed.replay(history)
        == seen.why
        == ("loss has not fallen below 0.5, of epoch 2, in 3 epochs (--early-stopping 3)")
    )
    assert seen.best_epoch == replayed.best_epoch == 1
    assert "more than --early-stopping 3" in seen.remedy
    assert not Stopping(settings(early_stopping=4), [*history]).replay(history)
    by_target = Stopping(settings(target_metric="accuracy > 0.35"), [*history])
    assert by_target.replay(history) == "accuracy is 0.4 (--target-metric 'accuracy > 0.35')"
    assert by_target.remedy.startswith("give another --target-metric")


def test_a_plan_puts_the_rates_of_layers_and_the_algorithm_around_an_optimizer(tmp_path):
    loaded = Loaded(model=None, framework="torch", name="m", path=tmp_path)
    given = settings(mode="localsgd", layer_rates="larc", trust=0.5, ranks=RankOptions(servers=2))
    plan = RunPlan(settings=given, loaded=loaded, data=data_of(settings(train=("a",)), loaded))
    package = SimpleNamespace(
        LocalSGD=lambda *given, **options: ("LocalSGD", *given, options),
        LARC=lambda *given, **options: ("LARC", *given, options),
    )
    inner = ("LARC", "sgd", {"trust": 0.5})
    assert plan.wrapped("sgd", package, model=7) == ("LocalSGD", inner, {"model": 7, "servers": 2})
    assert "--loss mes: not found in PyTorch; did you mean 'mse'?" in str(
        plan.unknown("--loss", "mes", ["mse"])
    )


# What is said about it.


def test_every_field_is_an_option_and_every_option_is_explained():
    names = {one.name.removesuffix("_") for one in fields(Settings)} - {"algorithm", "ranks"}
    assert names | MODE_OPTIONS.keys() | RANK_FLAGS.keys() == OPTIONS.keys()
    assert not [name for name, option in OPTIONS.items() if len(option.help) < 10]


def test_the_help_is_in_groups_and_fits_a_terminal(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 96
    assert re.findall(r"^(\w[\w ]+):$", told, re.MULTILINE)[-6:] == [
        "Model", "Data", "Training", "Algorithm", "Ranks", "What is kept",
    ]  # fmt: skip
    for option in OPTIONS.values():
        assert f"  {option.flag}" in told


def test_the_file_of_options_in_the_guide_is_one():
    (block,) = code("toml", "docs/train.md")
    Path("guide.toml").write_text(block)
    settings = settings_of(read_config("guide.toml"))
    assert (settings.mode, settings.algorithm, settings.cache) == ("easgd", {"every": 5}, "/tmp")
    assert settings.optimizer_option == {"nesterov": True}


def test_no_flag_is_short_for_another(capsys):
    assert "no option --ser" in refusal(capsys, *GOOD, "--ser", "2")


def test_the_kinds_are_told_in_words():
    assert {option.kind for option in OPTIONS.values()} == set(OptionKind)


@pytest.mark.parametrize(
    ("installed", "written", "chosen"),
    [
        (["tensorflow", "torch"], None, None),
        (["torch", "jax"], None, "torch"),
        (["jax"], '{"backend": "tensorflow"}', "jax"),  # which Keras writes, whatever is installed
        (["torch", "jax"], '{"backend": "jax"}', None),
        (["torch"], "no JSON", "torch"),
        ([], None, None),
    ],
)
def test_keras_gets_a_back_end_that_is_installed(installed, written, chosen, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    if written is not None:
        (tmp_path / "keras.json").write_text(written)
    env = {"KERAS_HOME": str(tmp_path)}
    choose_back_end(env)
    assert env.get("KERAS_BACKEND") == chosen
    env = {"KERAS_BACKEND": "mine"}
    choose_back_end(env)
    assert env == {"KERAS_BACKEND": "mine"}


@pytest.mark.parametrize("part", [{"fold": "2/5"}, {"hold_out": 0.2}])
def test_parts_of_the_training_and_files_to_validate_with_are_not_both_taken(part):
    ((name, value),) = part.items()
    flag = f"--{name.replace('_', '-')} {value}"
    with pytest.raises(ConfigurationError) as refused:
        settings(train=("a.h5", "b.h5"), val=("c.h5",), **part)
    assert str(refused.value).endswith(
        f"give one of the two: '{flag}' alone sets samples of a.h5 b.h5 apart, '--val c.h5' alone trains on "
        "all of them"
    )
