"""Directories of keras-tuner that somebody else has written: each problem is one error with a name."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nnlo_common import ConfigurationError

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras_tuner", reason="the environment for MPICH has no frameworks")

import keras_tuner

from nnlo_keras.tune import MPITuner, _block_search

pytestmark = pytest.mark.framework("keras")


def tuner(folder: Path, error: Exception | None = None) -> Any:
    """Return a tuner whose oracle and own state cannot be set."""

    def fail(*_: object) -> None:
        if error is not None:
            raise error

    return SimpleNamespace(
        project_dir=str(folder),
        state_file=str(folder / "tuner0.json"),
        oracle=SimpleNamespace(reload=fail, trials={}, start_order=[], end_order=[]),
        set_state=fail,
    )


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("oracle.json", "[" * 100_000, "nested too deeply"),
        ("oracle.json", "9" * 400, "digits"),
        ("trial_1/trial.json", "{", "not JSON"),
        ("tuner0.json", None, "a pipe"),
        ("trial_1/trial.json", None, "a pipe"),
    ],
)
def test_files_that_keras_tuner_could_not_read_are_refused(
    tmp_path: Path, name: str, content: str | None, told: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path) if content is None else path.write_text(content)
    with pytest.raises(ConfigurationError, match=f"the search in .* cannot resume: .*{told}"):
        _block_search.read(tuner(tmp_path))


@pytest.mark.parametrize(
    "error", [KeyError("trials"), TypeError("NoneType"), RecursionError(), OverflowError()]
)
def test_what_keras_tuner_raises_about_a_state_is_one_error(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(ConfigurationError, match="cannot resume: one of its files is not of a search"):
        _block_search.read(tuner(tmp_path, error))


@pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated")  # keras-tuner's
def test_the_directory_of_another_oracle_is_refused_in_the_words_of_keras_tuner(tmp_path: Path) -> None:
    class Tuner(MPITuner):
        def run_trial(self, trial: Any, *_: Any, **__: Any) -> float:
            return trial.hyperparameters.Float("x", 0, 1)

    def search(oracle: type) -> None:
        told = oracle(objective=keras_tuner.Objective("loss", "min"), max_trials=1)
        Tuner(None, told, directory=str(tmp_path)).search()

    search(keras_tuner.oracles.RandomSearchOracle)
    with pytest.raises(RuntimeError, match="pass `overwrite=True` when creating the `Tuner`"):
        search(keras_tuner.oracles.BayesianOptimizationOracle)
