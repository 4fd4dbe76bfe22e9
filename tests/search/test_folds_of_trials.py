"""K folds of each trial: side by side or in turn, one value, one end."""

from __future__ import annotations

import math
import statistics
import threading

import numpy as np
import pytest

from tests.helpers.threads import ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.trial import TrialState

from nnlo_common import SGD, ConfigurationError, Downpour, Participant
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._study_trials import RETRY_OF
from nnlo_common.search.coordinator._trial_results import ERROR, FOLDS, SPREAD
from nnlo_common.training._joining import launched

optuna.logging.set_verbosity(optuna.logging.WARNING)
DATA = np.random.default_rng(0).normal(size=(40, 3))


def searched(size, objective, *, study=optuna.create_study, **options):
    """The studies of all ranks."""
    options = {"sampler": "random"} | options
    with ranks(size) as cluster:
        return cluster.run(lambda world: optimize(study(), objective, world=world, **options), timeout_s=30)


def fitted(trial):
    """Rounding errors and all, so that what is equal is the same computation."""
    ridge = trial.suggest_float("ridge", 1e-3, 1)
    training, validation = trial.split(len(DATA))
    x, y = (
        DATA[training, :2],
        DATA[training, 2] + np.random.default_rng(trial.seed).normal(size=len(training)),
    )
    weights = np.linalg.solve(x.T @ x + ridge * np.eye(2), x.T @ y)
    return float(np.mean((DATA[validation, :2] @ weights - DATA[validation, 2]) ** 2))


def facts(study):
    return [(one.params, one.value, one.user_attrs[FOLDS], one.user_attrs[SPREAD]) for one in study.trials]


def test_folds_are_the_same_bit_by_bit_side_by_side_and_in_turn():
    alone = facts(optimize(optuna.create_study(), fitted, n_trials=4, folds=4, sampler="random"))
    in_turn, *_ = searched(2, fitted, n_trials=4, folds=4)
    side_by_side, *others = searched(5, fitted, n_trials=4, folds=4, block_size=4)
    assert alone == facts(in_turn) == facts(side_by_side) == facts(others[-1])
    for _, value, folds, spread in alone:
        assert len(folds) == 4 == len(set(folds))
        assert value == sum(folds) / 4
        assert spread == statistics.stdev(folds)


def test_each_fold_has_the_seed_of_its_own():
    seeds = {}

    def objective(trial):
        seeds[trial.number, trial.fold] = trial.seed
        return 0.0

    searched(5, objective, n_trials=2, folds=2, block_size=2)
    assert len(set(seeds.values())) == len(seeds) == 4


@pytest.mark.parametrize(("size", "block_size", "worlds"), [(13, 6, {3}), (5, 4, {2}), (4, 3, {3})])
def test_a_block_is_cut_into_a_world_for_each_fold_where_it_can_be(size, block_size, worlds):
    found, folds = set(), set()

    def objective(trial):
        world = launched()
        found.add(world.size)
        folds.add(trial.fold)
        lr = trial.suggest_float("lr", 0.01, 0.5)
        with Participant(Downpour(), [np.ones(2, "f4")], optimizer=SGD(lr)) as me:
            for _ in me.batches(range(3)):
                me.gradients[0][:] = me.point[0]
                me.step()
        return float(me.parameters[0][0])

    first, *_ = searched(size, objective, n_trials=4, folds=2, block_size=block_size)
    assert found == worlds
    assert folds == {0, 1}
    assert all(trial.state is TrialState.COMPLETE for trial in first.trials)
    assert all(0 < value < 1 for trial in first.trials for value in trial.user_attrs[FOLDS])


@pytest.mark.parametrize("size", [4, 5])  # in turn, side by side
def test_a_fold_that_fails_ends_the_others(size):
    reached = []

    def objective(trial):
        trial.suggest_float("x", 0, 1)
        if trial.number == 1 and trial.fold == 0:
            raise ValueError("in fold 0")
        for step in range(10_000 if trial.number == 1 else 1):
            trial.report(1.0, step)
            launched().gather_text("")
        reached.append((trial.number, trial.fold))
        return math.nan if trial.number == 2 and trial.fold == 1 else float(trial.fold)

    study, *_ = searched(size, objective, n_trials=4, folds=2, block_size=size - 1)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "FAIL", "COMPLETE"]
    assert "ValueError: in fold 0" in study.trials[1].user_attrs[ERROR]
    assert "the objective returned NaN" in study.trials[2].user_attrs[ERROR]
    # Side by side the other fold may have been broken off before its end.
    assert study.trials[2].user_attrs[FOLDS] in ([0.0, None], *([[None, None]] if size == 5 else []))
    assert not {(1, 0), (1, 1)} & set(reached)


def test_a_trial_is_tried_again_with_all_its_folds():
    seen = []

    def objective(trial):
        seen.append((trial.number, trial.fold))
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 0 and trial.fold == 1:
            raise ValueError("once")
        return x

    study, *_ = searched(2, objective, n_trials=1, folds=2, retries=1)
    assert seen == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert study.trials[1].user_attrs[RETRY_OF] == 0
    assert study.trials[1].params == study.trials[0].params


class Means(optuna.pruners.BasePruner):
    """Prunes trial 1 at its third step, and keeps what it has seen."""

    def __init__(self):
        self.seen = []

    def prune(self, study, trial):
        self.seen.append((trial.number, dict(trial.intermediate_values)))
        return trial.number == 1 and trial.last_step == 2


def test_the_pruner_sees_means_and_all_folds_obey_at_the_same_call():
    calls, pruner = {}, Means()

    def objective(trial):
        for step in range(4 if trial.fold else 3):  # the first fold ends earlier
            trial.report(step + trial.fold, step)
            calls.setdefault((trial.number, trial.fold, launched().rank), []).append(step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return float(trial.fold)

    study, *_ = searched(
        5, objective, n_trials=2, folds=2, block_size=4, study=lambda: optuna.create_study(pruner=pruner)
    )
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[0].intermediate_values == {0: 0.5, 1: 1.5, 2: 2.5, 3: 3.0}
    assert study.trials[1].intermediate_values == {0: 0.5, 1: 1.5, 2: 2.5}
    assert pruner.seen[:3] == [(0, {0: 0.5}), (0, {0: 0.5, 1: 1.5}), (0, {0: 0.5, 1: 1.5, 2: 2.5})]
    assert len(calls) == 8
    assert all(steps == [0, 1, 2] for (number, *_), steps in calls.items() if number == 1)


def test_in_turn_the_first_fold_is_judged():
    pruner = Means()

    def objective(trial):
        for step in range(3):
            trial.report(step + 10.0 * trial.fold, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 1.0

    study = optuna.create_study(pruner=pruner)
    optimize(study, objective, n_trials=2, folds=3, sampler="random")
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]
    assert study.trials[0].intermediate_values == {0: 0.0, 1: 1.0, 2: 2.0}


@pytest.mark.parametrize("size", [1, 9])  # in turn, side by side
def test_wilcoxon_prunes_by_the_values_of_folds(size):
    trained = []

    def objective(trial):
        if size == 1:
            assert not trial.should_prune()
        trial.report(-1e9, 0)  # of no account here
        trained.append((trial.number, trial.fold))
        return float(trial.number + 0.01 * trial.fold)

    with pytest.warns(ExperimentalWarning):
        pruner = optuna.pruners.WilcoxonPruner(p_threshold=0.3)

    def study():
        return optuna.create_study(pruner=pruner)

    found, *_ = searched(size, objective, n_trials=2, folds=8, block_size=max(size - 1, 1), study=study)
    assert found.trials[0].intermediate_values == {fold: 0.01 * fold for fold in range(8)}
    assert found.trials[1].state is TrialState.PRUNED
    if size == 1:
        assert len(trained) < 16
        assert found.trials[1].user_attrs[FOLDS][:2] == [1.0, 1.01]
        assert found.trials[1].user_attrs[FOLDS][-1] is None


def test_folds_that_suggest_differently_are_told():
    def objective(trial):
        return trial.suggest_categorical("x", ["a", "b", trial.fold]) and 0.0

    study, *_ = searched(2, objective, n_trials=1, folds=2)
    assert "suggest 'x' differs between folds" in study.trials[0].user_attrs[ERROR]


def test_the_target_is_for_the_mean_and_ends_the_folds_of_others():
    begun = threading.Event()

    def objective(trial):
        if trial.number == 0:
            begun.wait(10)
            return -1.0 + 2 * trial.fold
        begun.set()
        for step in range(10_000):
            trial.report(1.0, step)
            launched().gather_text("")
        raise AssertionError("was not broken off")

    study, *_ = searched(9, objective, n_trials=9, folds=2, block_size=4, target_objective=0.1)
    assert study.trials[0].value == 0
    assert all("has reached 0.0" in trial.user_attrs[ERROR] for trial in study.trials[1:])


def test_several_objectives_have_the_mean_of_each():
    study = optuna.create_study(directions=["minimize", "maximize"])
    optimize(study, lambda trial: (trial.fold, 4.0 * trial.fold), n_trials=1, folds=3, sampler="random")
    assert study.trials[0].values == [1.0, 4.0]
    assert study.trials[0].user_attrs[FOLDS] == [[0, 0], [1, 4], [2, 8]]
    assert study.trials[0].user_attrs[SPREAD] == [1.0, 4.0]


def test_folds_are_in_the_journal(tmp_path):
    studies = [
        optimize(optuna.create_study(), fitted, n_trials=2, folds=2, journal=tmp_path / "search.jsonl")
        for _ in range(2)
    ]
    assert facts(studies[0]) == facts(studies[1])


def test_a_split_without_folds_is_refused():
    study = optimize(optuna.create_study(), fitted, n_trials=1)
    assert r"this search has no folds; use optimize(..., folds=5)" in study.trials[0].user_attrs[ERROR]


@pytest.mark.parametrize("folds", [0, 2.5, True])
def test_odd_numbers_of_folds_are_refused(folds):
    with pytest.raises(ConfigurationError, match=f"folds={folds}"):
        optimize(optuna.create_study(), fitted, n_trials=1, folds=folds)
