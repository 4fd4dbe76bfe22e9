"""Methods of a tuner that a subclass overrides: each has its effect in searches over blocks or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.threads import ranks

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")
import keras
import keras_tuner

from nnlo_common import ConfigurationError
from nnlo_keras.tune import MPITuner

pytestmark = [
    pytest.mark.framework("keras"),
    # keras-tuner asks threads for their names in an old way.
    pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # keras-tuner, of a run_trial that reports its metrics itself.
    pytest.mark.filterwarnings("ignore:The use case of calling:DeprecationWarning"),
]
SIZES = pytest.mark.parametrize("size", [1, 5])


class Square(MPITuner):
    """Its trials train nothing; `seen` has what was called, of all ranks."""

    seen: list

    def _populate_initial_space(self):
        if self.has_directory:
            (space := self.oracle.get_space()).Float("x", -1, 1)
            self.oracle.update_space(space)

    def run_trial(self, trial, *args, **options):
        return {"loss": trial.hyperparameters.get("x") ** 2, "other": 2.0}

    def note(self, name, *what):
        rank = 0 if self._world is None else self._world.rank
        self.seen.append((name, rank, *what))


def searched(kind, size, folder, **options):
    """The tuners of all ranks after a search of four trials, in blocks of two ranks."""
    kind.seen = []

    def program(world):
        oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=4, seed=1)
        tuner = kind(None, oracle, directory=folder, project_name="p", world=world, block_size=2, **options)
        tuner.search(verbose=0)
        return tuner

    with ranks(size) as cluster:
        return cluster.run(program, timeout_s=60)


def metrics(tuner):
    return {one.trial_id: one.metrics.get_config() for one in tuner.oracle.trials.values()}


class ReportsTwice(Square):
    def _run_and_update_trial(self, trial, *args, **options):
        loss = self.run_trial(trial, *args, **options)["loss"]
        for step, value in ((1, loss + 2), (2, loss + 1)):
            self.oracle.update_trial(trial.trial_id, {"loss": value, "twice": 2 * value}, step=step)


class ReportsAsBefore(Square):
    def _run_and_update_trial(self, trial, *args, **options):
        super()._run_and_update_trial(trial, *args, **options)
        self.note("best", self.oracle.get_trial(trial.trial_id).metrics.get_best_value("loss"))


class ReportsItself(Square):
    """As tuners did before a `run_trial` returned its metrics."""

    def run_trial(self, trial, *args, **options):
        for step in range(3):
            self.oracle.update_trial(
                trial.trial_id, {"loss": abs(step - 1) + trial.hyperparameters.get("x") ** 2}, step=step
            )


@SIZES
@pytest.mark.parametrize("kind", [ReportsTwice, ReportsItself, ReportsAsBefore, Square])
def test_what_a_subclass_reports_reaches_the_oracle_as_it_does_alone(tmp_path, kind, size):
    first, *others = searched(kind, size, tmp_path / "blocks")
    (alone,) = searched(kind, 1, tmp_path / "alone")
    assert len(metrics(first)) == 4
    for trial_id, config in metrics(first).items():
        loss = first.oracle.trials[trial_id].hyperparameters.get("x") ** 2
        observed = {name: one["observations"] for name, one in config["metrics"].items()}
        if kind is ReportsTwice:
            assert observed["loss"] == [{"value": [loss + 2], "step": 1}, {"value": [loss + 1], "step": 2}]
            assert [one["value"] for one in observed["twice"]] == [[2 * loss + 4], [2 * loss + 2]]
        elif kind is ReportsItself:
            assert [one["value"] for one in observed["loss"]] == [[1 + loss], [loss], [1 + loss]]
            assert first.oracle.trials[trial_id].best_step == 1
        else:
            assert observed["loss"] == [{"value": [loss], "step": 0}]
            assert observed["other"] == [{"value": [2.0], "step": 0}]
    if size == 1:
        assert metrics(first) == metrics(alone)
    assert [metrics(one) for one in others] == [metrics(first)] * (size - 1)


def test_a_subclass_sees_on_each_rank_of_a_block_what_it_has_reported(tmp_path):
    first, *_ = searched(ReportsAsBefore, 5, tmp_path)
    scores = sorted(one.score for one in first.oracle.trials.values())
    assert sorted(value for _, _, value in ReportsAsBefore.seen) == sorted(2 * scores)
    assert {rank for _, rank, _ in ReportsAsBefore.seen} <= {1, 2, 3, 4}


def test_a_subclass_that_reports_nothing_ends_the_search_on_all_ranks(tmp_path):
    class Silent(Square):
        def _run_and_update_trial(self, trial, *args, **options):
            self.run_trial(trial, *args, **options)

    def program(world):
        oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=4, seed=1)
        tuner = Silent(None, oracle, directory=tmp_path, world=world, block_size=2)
        with pytest.raises(keras_tuner.errors.FatalError, match=r"no loss; call self\.oracle\.update_trial"):
            tuner.search(verbose=0)

    with ranks(3) as cluster:
        cluster.run(program, timeout_s=60)


def test_a_way_of_ones_own_to_judge_errors_is_for_one_process(tmp_path):
    class Judging(Square):
        def _try_run_and_update_trial(self, trial, *args, **options):
            self.note("tried")
            super()._try_run_and_update_trial(trial, *args, **options)

    searched(Judging, 1, tmp_path)
    assert Judging.seen == [("tried", 0)] * 4
    told = r"Judging overrides _try_run_and_update_trial, .*; override run_trial or _run_and_update_trial"
    with pytest.raises(ConfigurationError, match=told):
        searched(Judging, 5, tmp_path)


class Noting(Square):
    """Overrides what surrounds trials."""

    def on_search_begin(self):
        self.note("search begins")
        super().on_search_begin()

    def on_search_end(self):
        self.note("search ends")
        super().on_search_end()

    def pre_create_trial(self):
        self.note("choose")
        super().pre_create_trial()

    def on_trial_begin(self, trial):
        self.note("trial begins", trial.trial_id)
        super().on_trial_begin(trial)

    def on_trial_end(self, trial):
        self.note("trial ends", trial.trial_id)
        super().on_trial_end(trial)

    def search(self, *args, **options):
        self.note("search")
        super().search(*args, **options)

    def run_trial(self, trial, *args, **options):
        loss = trial.hyperparameters.get("x") ** 2
        self.save_model(trial.trial_id, {"loss": loss}, step=3)
        return loss

    def save_model(self, trial_id, model, step=0):
        self.note("save", trial_id)
        Path(self.get_trial_dir(trial_id), "model.json").write_text(json.dumps(model | {"step": step}))

    def load_model(self, trial):
        return json.loads(Path(self.get_trial_dir(trial.trial_id), "model.json").read_text())

    def get_best_models(self, num_models=1):
        self.note("best")
        return super().get_best_models(num_models)

    def get_state(self):
        return super().get_state() | {"own": 7}

    def set_state(self, state):
        self.note("state", state["own"])
        super().set_state(state)


@SIZES
def test_what_surrounds_trials_is_called_once_by_the_first_rank(tmp_path, size):
    searched(Noting, size, tmp_path)
    names = {name for name, *_ in Noting.seen}
    called = {name: [one for one in Noting.seen if one[0] == name] for name in names}
    assert called["search begins"] == [("search begins", 0)]
    assert called["search ends"] == [("search ends", 0)]
    assert sorted(rank for _, rank in called["search"]) == list(range(size))
    for name in ("trial begins", "trial ends"):
        assert sorted(called[name]) == [(name, 0, str(trial)) for trial in range(4)]
    assert len(called["choose"]) >= 4
    assert {rank for _, rank in called["choose"]} == {0}
    assert "state" not in called


@SIZES
def test_a_model_is_saved_once_and_loaded_by_all_ranks(tmp_path, size):
    tuners = searched(Noting, size, tmp_path)
    saved = [one for one in Noting.seen if one[0] == "save"]
    assert sorted(trial for _, _, trial in saved) == ["0", "1", "2", "3"]
    assert {rank for _, rank, _ in saved} <= {0, 1, 3}  # the first of each block
    best = min(one.score for one in tuners[0].oracle.trials.values())
    for tuner in tuners:
        assert tuner.get_best_models() == [{"loss": best, "step": 3}]
    assert [one for one in Noting.seen if one[0] == "best"] == [("best", rank) for rank in range(size)]


@SIZES
def test_a_tuners_own_state_is_saved_and_comes_back_where_the_directory_is(tmp_path, size):
    searched(Noting, size, tmp_path)
    searched(Noting, size, tmp_path)
    assert [one for one in Noting.seen if one[0] == "state"] == [("state", 0, 7)]


@SIZES
def test_summaries_are_printed_once(tmp_path, size, capsys):
    class Telling(Square):
        def results_summary(self, num_trials=10):
            super().results_summary(num_trials)

        def search_space_summary(self, extended=False):
            super().search_space_summary(extended)

    tuners = searched(Telling, size, tmp_path)
    capsys.readouterr()
    for tuner in tuners:
        tuner.results_summary(2)
        tuner.search_space_summary()
    told = capsys.readouterr().out
    assert told.count("Showing 2 best trials") == 1
    assert told.count("Default search space size: 1") == 1


def line(hp):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-2)), "mse")
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["class", "object"])
@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end"])
def test_each_hook_of_a_training_is_called_by_itself(tmp_path, hook, how):
    called = []

    def note(*args, **options):
        called.append(args)

    kind = type("Hooked", (MPITuner,), {hook: note} if how == "class" else {})
    oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=2, seed=1)
    tuner = kind(line, oracle, directory=tmp_path, project_name="p")
    if how == "object":
        setattr(tuner, hook, note)
    tuner.search(np.ones((8, 1)), np.ones((8, 1)), batch_size=4, epochs=3, verbose=0)
    assert len(called) == 2 * 3 * (1 if "epoch" in hook else 2)
