"""What kind a failure is, and what it tells the sampler."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.trial import TrialState

from nnlo_common import ConfigurationError, DivergedError
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._trial_results import ERROR, FAILURE, kind_of

optuna.logging.set_verbosity(optuna.logging.ERROR)


class OutOfMemoryError(RuntimeError):
    """As torch names its own."""


class ResourceExhaustedError(Exception):
    """As TensorFlow does."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out of memory"),
        (np._core._exceptions._ArrayMemoryError((2**40,), np.dtype("f8")), "out of memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out of memory"),
        (ResourceExhaustedError("OOM when allocating tensor"), "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), "out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (DivergedError("NaN"), "diverged"),
        (RuntimeError("shapes differ"), "error"),
        (ValueError("out of memory"), "error"),
    ],
)
def test_out_of_memory_is_told_apart(error, kind):
    def objective(trial):
        raise error

    study = optimize(optuna.create_study(), objective, n_trials=1)
    assert kind == kind_of(error) == study.trials[0].user_attrs[FAILURE]


def too_large(trial):
    size = trial.suggest_float("size", 0, 1)
    if size > 0.5:
        raise MemoryError
    return (size - 0.6) ** 2


def searched(failures, **options):
    return optimize(
        optuna.create_study(), too_large, n_trials=options.pop("n_trials", 12), failures=failures, **options
    )


def failed(study):
    return [trial for trial in study.trials if FAILURE in trial.user_attrs]


def test_ignored_failures_have_failed():
    study = searched("ignore", sampler="random")
    assert {trial.state for trial in failed(study)} == {TrialState.FAIL}
    assert len(failed(study)) > 2


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_failures_may_have_the_worst_value_so_far(direction):
    study = optuna.create_study(direction=direction)
    optimize(study, too_large, n_trials=12, failures="worst", sampler="random")
    values = []
    for trial in study.trials:
        if trial in failed(study):
            worst = max if direction == "minimize" else min
            assert trial.value == (worst(values) if len(values) > 1 else None)
            assert "MemoryError" in trial.user_attrs[ERROR]
        else:
            values.append(trial.value)
    assert FAILURE not in study.best_trial.user_attrs


@pytest.mark.parametrize("failures", ["worst", "constraint"])
@pytest.mark.parametrize("values", [(0.5, None), (0.5, None, 0.5, None)])
def test_a_failure_is_never_as_good_as_the_best(failures, values):
    told = iter(values)

    def objective(trial):
        trial.suggest_float("x", 0, 1)
        value = next(told)
        if value is None:
            raise MemoryError
        return value

    study = optimize(optuna.create_study(), objective, n_trials=len(values), failures=failures)
    assert [trial.value for trial in study.trials] == [*values]
    assert {trial.state for trial in failed(study)} == {TrialState.FAIL}


@pytest.mark.parametrize("sampler", ["tpe", "evolutionary"])
def test_failures_may_break_a_constraint_which_samplers_avoid(sampler):
    ignoring, avoiding = (
        len(failed(searched(how, sampler=sampler, n_trials=30, seed=1))[4:])
        for how in ("ignore", "constraint")
    )
    assert avoiding < ignoring


def test_failures_have_the_constraints_of_the_others_too():
    def objective(trial):
        value = too_large(trial)
        trial.set_constraint("small", -1.0)
        return value

    study = optimize(optuna.create_study(), objective, n_trials=14, failures="constraint", sampler="gp")
    keys = {tuple(trial.constraints) for trial in study.trials if trial.state is TrialState.COMPLETE}
    assert keys == {("small", FAILURE)}
    assert study.best_trial.constraints[FAILURE] < 0


def test_only_the_last_try_tells_the_sampler():
    study = searched("worst", sampler="random", retries=1)
    for trial in failed(study):
        tried_again = any(one.user_attrs.get("nnlo:retry of") == trial.number for one in study.trials)
        assert (trial.state is TrialState.FAIL) == (tried_again or not trial.values)


def test_unknown_ways_are_refused():
    with pytest.raises(ConfigurationError, match="failures='best' is not known: use 'ignore', 'worst' or"):
        searched("best")
