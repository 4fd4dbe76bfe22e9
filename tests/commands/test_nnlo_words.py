"""Flags and values of NNLO's command lines, answered with ours."""

from __future__ import annotations

import re

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.commands._nnlo_words import NNLO_FLAGS, in_our_words
from nnlo_common.commands.train._command_line import given_by, read
from nnlo_common.commands.train._settings import OPTIONS
from nnlo_common.commands.tune._request import ALL_OPTIONS

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


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"early_stopping": "val_loss,~<,4"}, "write --early-stopping 4 --early-stopping-metric val_loss"),
        ({"target_metric": "val_acc,>,0.9"}, "write --target-metric 'val_acc > 0.9'"),
        ({"hyper_opt": "genetic"}, "write --hyper-opt evolutionary"),
    ],
)
def test_a_value_in_its_spelling_is_answered_with_ours(given, answer):
    with pytest.raises(ConfigurationError, match=f"is NNLO's spelling; {re.escape(answer)}$"):
        given_by(REQUIRED | given, [], ALL_OPTIONS, "tune")


def test_our_spelling_is_taken():
    settings = read(REQUIRED | {"target_metric": "val_acc > 0.9", "early_stopping": "4"}, [])
    assert (settings.target_metric, settings.early_stopping) == ("val_acc > 0.9", 4)
