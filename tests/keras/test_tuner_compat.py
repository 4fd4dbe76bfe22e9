"""The parts of keras-tuner that are not public are still what `nnlo_keras.tune._compat` takes them for."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")
import keras
import keras_tuner
import numpy as np

from nnlo_common import ConfigurationError
from nnlo_keras.tune import _compat

pytestmark = [
    pytest.mark.framework("keras"),
    # keras-tuner asks threads for their names in an old way.
    pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
CHANGED = f"keras-tuner {keras_tuner.__version__} differs from 1.4.8: mend nnlo_keras/tune/_compat.py;"
METHODS = {
    keras_tuner.Oracle: [
        "_duplicate",
        "_get_oracle_fname",
        "_get_trial_dir",
        "_random_values",
        "_save_trial",
    ],
    keras_tuner.oracles.GridSearchOracle: ["_compare"],
    keras_tuner.Tuner: [
        "_build_and_fit_model",
        "_build_hypermodel",
        "_configure_tensorboard_dir",
        "_deepcopy_callbacks",
        "_get_build_config_fname",
        "_get_checkpoint_fname",
        "_get_tuner_fname",
        "_populate_initial_space",
        "_run_and_update_trial",
        "_try_build",
        "_try_run_and_update_trial",
    ],
}


def made(folder, kind=keras_tuner.oracles.RandomSearchOracle, **options):
    """An oracle with one parameter, and a tuner that gives it its directory."""
    space = keras_tuner.HyperParameters()
    space.Choice("x", [0, 1, 2], default=0)
    oracle = kind("loss", max_trials=3, seed=1, hyperparameters=space, **options)
    oracle.verbose = 0

    class Tuner(_compat.HookedTuner):
        def run_trial(self, trial, *args, **kwargs):
            return trial.hyperparameters.get("x")

    return oracle, Tuner(oracle, directory=folder, project_name="p")


def ended(oracle, trial, status="COMPLETED"):
    oracle.update_trial(trial.trial_id, {"loss": 1.0})
    trial.status = status
    oracle.end_trial(trial)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in METHODS.items() for name in names]
)
def test_a_method_is_there(kind, name):
    assert callable(getattr(kind, name, None)), f"{CHANGED} there is no {kind.__name__}.{name}"


def test_an_oracle_writes_two_kinds_of_files_and_may_leave_it_to_others(tmp_path):
    oracle, _ = made(tmp_path)
    first = oracle.create_trial("one")
    for path in (_compat.file_of_oracle(oracle), _compat.trial_file(oracle, first.trial_id)):
        assert json.loads(Path(path).read_text()), f"{CHANGED} it does not write {path}"
    saved = []
    _compat.redirect_saves(oracle, lambda: saved.append("all"), lambda trial: saved.append(trial.trial_id))
    second = oracle.create_trial("two")
    assert sorted(saved) == sorted(["all", second.trial_id]), f"{CHANGED} oracles save otherwise"
    assert not Path(_compat.trial_file(oracle, second.trial_id)).exists(), CHANGED


def test_a_trial_to_be_tried_again_waits_in_a_queue(tmp_path):
    oracle, _ = made(tmp_path, max_retries_per_trial=1)
    trials = [oracle.create_trial(name) for name in ("one", "two")]
    for trial in trials:
        ended(oracle, trial, "INVALID")
    names = [trial.trial_id for trial in trials]
    assert _compat.waiting_retries(oracle) == names, f"{CHANGED} its queue for retries is another"
    _compat.replace_retries(oracle, names[:1])
    assert oracle.create_trial("one").trial_id == names[0], f"{CHANGED} nothing is taken from its queue"
    assert _compat.waiting_retries(oracle) == [], CHANGED


def test_a_grid_goes_on_when_its_lists_are_filled_again(tmp_path):
    oracle, tuner = made(tmp_path, keras_tuner.oracles.GridSearchOracle)
    found = [oracle.create_trial("one") for _ in range(1)]
    ended(oracle, found[0])
    tuner.save()
    again, _ = made(tmp_path, keras_tuner.oracles.GridSearchOracle)
    _compat.refill_grid(again)
    trial = again.create_trial("one")
    assert trial.hyperparameters.get("x") == 1, f"{CHANGED} a grid that goes on begins elsewhere"


def test_a_seed_may_be_zero(tmp_path):
    chosen = set()
    for folder in ("first", "second"):
        oracle, _ = made(tmp_path / folder)
        _compat.set_seed(oracle, 0)
        chosen.add((oracle.seed, oracle.create_trial("one").hyperparameters.get("x")))
    assert {seed for seed, _ in chosen} == {0}, f"{CHANGED} a seed of 0 is replaced"
    assert len(chosen) == 1, f"{CHANGED} random values depend on more than _seed_state"


def test_what_was_tried_is_known_until_the_space_is_used_up(tmp_path):
    oracle, _ = made(tmp_path)
    assert 0 < _compat.most_collisions(oracle) < math.inf, CHANGED
    tried = [oracle.create_trial(name).hyperparameters.values for name in "abc"]
    assert all(_compat.is_duplicate(oracle, values) for values in tried), f"{CHANGED} trials are not noted"
    assert not _compat.is_duplicate(oracle, {"x": 7}), CHANGED
    assert _compat.random_values(oracle) is None, f"{CHANGED} values by chance are drawn twice"
    fresh, _ = made(tmp_path / "fresh")
    assert _compat.random_values(fresh).keys() == {"x"}, CHANGED


def history(**values):
    found = keras.callbacks.History()
    found.history = values
    return found


@pytest.mark.parametrize(
    ("results", "loss", "step"),
    [
        (0.5, 0.5, 0),
        ({"loss": 0.5, "other": 1}, 0.5, 0),
        (history(loss=[3.0, 1.0, 2.0]), 1.0, 1),
        ([history(loss=[1.0, 2.0]), history(loss=[4.0, 3.0, 2.0])], 1.5, 1),
    ],
)
def test_what_a_trial_returns_becomes_metrics_and_the_best_epoch(tmp_path, results, loss, step):
    objective = keras_tuner.Objective("loss", "min")
    _compat.validate_results(results, objective, "fit()")
    assert _compat.metrics_of(results, objective)["loss"] == loss, f"{CHANGED} metrics are taken otherwise"
    oracle, tuner = made(tmp_path)
    trial = oracle.create_trial("rank")
    given = []
    tuner.run_trial = lambda *args, **options: given.append((*args, options)) or results
    tuner._ran_and_reported(trial, "data", epochs=2)
    assert given == [(trial, "data", {"epochs": 2})], CHANGED
    (observed,) = trial.metrics.get_history("loss")
    assert (observed.value, observed.step) == ([loss], step), f"{CHANGED} a report is another"


def test_a_tuner_catches_the_errors_of_trials_by_a_step_that_subclasses_change():
    class Judging(_compat.HookedTuner):
        def _try_run_and_update_trial(self, *args, **options):
            pass

    assert not _compat.judges_failures(_compat.HookedTuner), CHANGED
    assert _compat.judges_failures(Judging), CHANGED


def test_what_a_trial_must_not_return_is_refused():
    with pytest.raises(keras_tuner.errors.FatalTypeError, match="None"):
        _compat.validate_results(None, keras_tuner.Objective("loss", "min"), "fit()")


def test_metrics_have_means():
    assert _compat.mean_metrics([{"a": 1, "b": 0}, {"a": 2}]) == {"a": 1.5, "b": 0.0}, CHANGED


def test_callbacks_save_the_best_epoch_and_call_the_hooks(tmp_path):
    class Hooks:
        def __getattr__(self, name):
            return lambda *args, **options: called.append(name)

    called, file = [], tmp_path / "best.weights.h5"
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    saver = _compat.best_epoch_saver(keras_tuner.Objective("loss", "min"), str(file))
    model.fit(
        np.ones((4, 1)), np.ones((4, 1)), verbose=0, callbacks=[saver, _compat.hook_callback(Hooks(), 0)]
    )
    assert file.exists(), f"{CHANGED} SaveBestEpoch has not saved"
    assert {"on_epoch_begin", "on_batch_begin", "on_batch_end", "on_epoch_end"} <= {*called}, CHANGED


def test_a_tuner_builds_by_the_step_that_is_changed(tmp_path):
    class Finishing(_compat.HookedTuner):
        def _finished_model(self, hp, model):
            model.finished = True
            return model

    def build(hp):
        return keras.Sequential([keras.Input((1,)), keras.layers.Dense(hp.Int("width", 1, 2))])

    oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=1)
    tuner = Finishing(oracle, build, directory=tmp_path, project_name="p")
    assert [hp.name for hp in oracle.get_space().space] == ["width"], f"{CHANGED} no space is found at first"
    assert tuner._built_model(oracle.get_space()).finished, f"{CHANGED} _try_build does not _build_hypermodel"
    assert Path(tuner.state_file) == tmp_path / "p" / "tuner0.json", f"{CHANGED} the tuner's file is another"
    for path in (tuner._weights_file("7"), tuner._build_config_file("7")):
        assert Path(path).parent == tmp_path / "p" / "trial_7", f"{CHANGED} a trial's file is {path}"
    callback = keras.callbacks.EarlyStopping(patience=7)
    (copied,) = tuner._copied_callbacks([callback])
    assert copied is not callback, f"{CHANGED} callbacks are not copied"
    assert copied.patience == 7, CHANGED
    parameters = inspect.signature(keras_tuner.Tuner._configure_tensorboard_dir).parameters
    assert [*parameters] == ["self", "callbacks", "trial", "execution"], f"{CHANGED} {parameters}"


def test_a_tuner_fits_by_a_step_that_is_changed_and_that_subclasses_change(tmp_path):
    class Fitting(_compat.HookedTuner):
        def _built_and_fitted(self, trial, *args, **options):
            return [trial, *args, options]

    class Changing(Fitting):
        def _build_and_fit_model(self, trial, *args, **kwargs):
            return super()._build_and_fit_model(trial, *args, more=True, **kwargs)

    oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=1)
    tuner = Changing(oracle, lambda hp: keras.Sequential(), directory=tmp_path, project_name="p")
    assert tuner._fitted(7, "x", epochs=2) == [7, "x", {"epochs": 2, "more": True}], CHANGED
    parameters = inspect.signature(keras_tuner.Tuner._build_and_fit_model).parameters
    assert [*parameters] == ["self", "trial", "args", "kwargs"], f"{CHANGED} {parameters}"


def test_a_rank_without_the_directory_begins_without_it(tmp_path, capsys):
    oracle, tuner = made(tmp_path)
    tuner.save()

    class Other(type(tuner)):
        has_directory = False

    capsys.readouterr()
    other = Other(oracle, directory=tmp_path, project_name="p")
    assert capsys.readouterr().out == "", f"{CHANGED} it looks for the tuner's file otherwise"
    assert other.state_file == tuner.state_file


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: _compat.waiting_retries(SimpleNamespace()), "SimpleNamespace._retry_queue"),
        (lambda: _compat.set_seed(SimpleNamespace(), 1), "SimpleNamespace._seed_state"),
        (lambda: _compat._utility("best"), "keras_tuner.src.engine.tuner_utils.best"),
    ],
)
def test_what_is_missing_is_named_with_the_version(call, part):
    expected = f"keras-tuner {keras_tuner.__version__} has no {part}, which MPITuner needs; install"
    with pytest.raises(ConfigurationError, match=expected):
        call()


def test_nothing_else_reaches_into_keras_tuner():
    parts = [
        "keras_tuner.src",
        "_ordered_ids",
        "_populate_next",
        "_retry_queue",
        "_seed_state",
        "_max_collisions",
    ]
    parts += [f".{name}(" for names in METHODS.values() for name in names]
    for path in Path(_compat.__file__).parent.glob("*.py"):
        if path.name != "_compat.py":
            assert not [part for part in parts if part in path.read_text()], path
