"""Flags and values of NNLO's command lines, answered with ours."""

from __future__ import annotations

import ast
import re

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands.train._command_line import NNLO_FLAGS, given_by, in_our_words, read
from nnlo_common.commands.train._python_file import check_no_old_space, check_source
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._request import ALL_OPTIONS
from nnlo_common.commands.tune._search_space import space_of

EARLY = "write --early-stopping 4 --early-stopping-metric val_loss"
REQUIRED = {"model": "net.json", "train": ["a.h5"], "loss": "mse"}


@pytest.mark.parametrize("flag", NNLO_FLAGS)
def test_a_flag_is_answered_with_options_that_exist(flag):
    with pytest.raises(ConfigurationError, match=re.escape(f"{flag} is an option of NNLO; here ")) as refused:
        read(REQUIRED, [flag, "2"])
    ours = {option.flag for option in ALL_OPTIONS.values()} | {option.flag for option in OPTIONS.values()}
    answer = str(refused.value).partition("; here ")[2].partition(" (see")[0]
    for named in re.findall(r"(?<!its )(--[a-z-]+)", answer.replace("mpiexec --output-filename", "")):
        assert named in ours, f"{flag} is answered with {named}, which does not exist"


@pytest.mark.parametrize("flag", NNLO_FLAGS)
def test_a_flag_that_we_have_ourselves_is_not_among_them(flag):
    assert flag not in {option.flag for option in OPTIONS.values()}


def test_underscores_and_values_in_one_word_are_known_too():
    with pytest.raises(ConfigurationError, match=r"--n_masters is an option of NNLO; here write --servers N"):
        read(REQUIRED, ["--n_masters=2"])
    assert in_our_words("--n-slaves") is None


def test_all_words_of_a_line_are_answered_at_once():
    line = ["--n-processes", "1", "--n-masters=1", "--sync-every", "-5", "--epoch", "5"]
    with pytest.raises(ConfigurationError) as refused:
        read(REQUIRED | {"early_stopping": "val_loss,~<,4"}, line)
    assert str(refused.value).splitlines() == [
        "5 words are not possible (see nnlo train --help):",
        "--n-processes is an option of NNLO; here leave it out: each rank that trains is a worker",
        "--n-masters is an option of NNLO; here leave it out: one server is the default",
        "--sync-every is an option of NNLO; here write --every N",
        "there is no option --epoch; did you mean '--epochs'?",
        f"--early-stopping 'val_loss,~<,4' is NNLO's spelling; {EARLY}",
    ]


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"early_stopping": "val_loss,~<,4"}, "write --early-stopping 4 --early-stopping-metric val_loss"),
        ({"target_metric": "val_acc,>,0.9"}, "write --target-metric 'val_acc > 0.9'"),
        ({"hyper_opt": "genetic"}, "write --hyper-opt evolutionary"),
    ],
)
def test_a_value_in_its_spelling_is_answered_with_ours(given, answer):
    with pytest.raises(ConfigurationError, match=f"is NNLO's spelling; {re.escape(answer)} \\(see"):
        given_by(REQUIRED | given, [], ALL_OPTIONS, "tune")


def test_the_values_of_early_are_in_the_answer():
    answer = "here write --early-stopping 4 --early-stopping-metric val_loss (see"
    for words in (["--early", "val_loss,~<,4"], ["--early=val_loss,~<,4"]):
        with pytest.raises(ConfigurationError, match=re.escape(answer)):
            read(REQUIRED, words)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("n_masters = 2", "has 'n_masters', an option of NNLO; here write --servers N"),
        ("sync-every = 2", "has 'sync_every', an option of NNLO; here write --every N"),
        (
            "early_stopping = 'val_loss,~<,4'",
            "early_stopping 'val_loss,~<,4' is NNLO's spelling; write --early-stopping 4",
        ),
    ],
)
def test_its_words_in_a_file_of_options_are_answered_too(line, answer, tmp_path):
    (tmp_path / "run.toml").write_text(line)
    with pytest.raises(ConfigurationError, match=re.escape(answer)):
        read(REQUIRED | {"config": str(tmp_path / "run.toml")}, [])


RANGES = """
from skopt.space import Real, Integer, Categorical

def get_model(rate=0.1, width=8, kind="a"):
    pass

get_model.parameter_range = [
    Real(low=1e-3, high=1, prior="log-uniform", name="rate"),
    Integer(8, 64, name="width"),
    Categorical(["a", "b"], name="kind"),
]
"""
DATA = """
from nnlo.train.data import H5Data

class Jets(H5Data):
    def __init__(self):
        super().__init__(features_name="jets", labels_name="mass")

def get_model():
    pass
"""


def test_a_model_file_of_nnlo_is_answered_with_our_functions(tmp_path):
    path = tmp_path / "m.py"
    path.write_text(RANGES)
    check_source(path)  # trains as it is
    with pytest.raises(ConfigurationError) as refused:
        check_no_old_space(path)
    ours = '{"rate": (0.001, 1.0, "log"), "width": (8, 64), "kind": ["a", "b"]}'
    assert str(refused.value).endswith(f"def get_space():\n    return {ours}")
    space = space_of(ast.literal_eval(ours), "ours", model_of)
    assert [one.name for one in space.parameters] == ["rate", "width", "kind"]
    path.write_text(RANGES + "\ndef get_space():\n    return {}\n")
    check_no_old_space(path)
    path.write_text(DATA)
    with pytest.raises(ConfigurationError, match='return "jets", lambda') as refused:
        check_source(path)
    assert 'def get_labels():\n    return "mass"' in str(refused.value)


def model_of(rate=0.1, width=8, kind="a"):
    return rate, width, kind


def test_our_spelling_is_taken():
    settings = read(REQUIRED | {"target_metric": "val_acc > 0.9", "early_stopping": "4"}, [])
    assert (settings.target_metric, settings.early_stopping) == ("val_acc > 0.9", 4)
