"""Callbacks of a search: the first rank calls them after each trial; `Study.stop` in one ends the search."""

from __future__ import annotations

import pytest

from tests.helpers.threads import ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, TrialState

from nnlo_common import ConfigurationError
from nnlo_common.search import optimize
from nnlo_common.search._search_messages import Done, Start
from nnlo_common.search.coordinator._trial_results import ERROR
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.WARNING)


def quadratic(trial):
    return trial.suggest_float("x", -1, 1) ** 2


def searched(size, objective=quadratic, **options):
    """The studies of all ranks."""
    options = {"n_trials": 12, "sampler": "random", **options}
    with ranks(size) as cluster:
        return cluster.run(
            lambda world: optimize(optuna.create_study(), objective, world=world, **options), timeout_s=30
        )


def states(study):
    return [trial.state for trial in study.trials]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_trial_is_seen_once_when_the_study_has_it_and_on_one_rank(size):
    seen = []

    def see(study, trial):
        assert type(trial) is FrozenTrial
        assert study.trials[trial.number].value == trial.value
        trial.user_attrs["scribbled"] = True  # in a copy
        seen.append(trial.number)

    first, *_ = searched(size, callbacks=[see])
    assert sorted(seen) == list(range(12))
    assert not any("scribbled" in trial.user_attrs for trial in first.trials)


@pytest.mark.parametrize("size", [1, 2])
def test_what_optuna_counts_ends_the_search_there(size):
    for study in searched(size, callbacks=[MaxTrialsCallback(4)]):
        assert states(study) == [TrialState.COMPLETE] * 4


@pytest.mark.parametrize("options", [{}, {"lockstep": True}, {"search_ranks": 1}])
def test_running_trials_end_and_no_others_begin(options):
    first, *others = searched(4, callbacks=[MaxTrialsCallback(3)], **options)
    began = [trial for trial in first.trials if "not begun" not in trial.user_attrs.get(ERROR, "")]
    assert all(trial.state is TrialState.COMPLETE for trial in began)
    assert 3 <= len(began) < 3 + 3  # each of the blocks may have been training one
    assert all(states(study) == states(first) for study in others)


def test_a_stop_in_lockstep_repeats():
    def searching():
        return searched(4, callbacks=[MaxTrialsCallback(5)], lockstep=True, seed=3)[0]

    once, again = searching(), searching()
    assert [(one.params, one.state) for one in once.trials] == [
        (one.params, one.state) for one in again.trials
    ]
    assert len(once.trials) < 12


def test_a_trial_chosen_ahead_does_not_begin_after_a_stop():
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    machine = study_coordinator(study, blocks=2, n_trials=9, callbacks=[MaxTrialsCallback(1)])
    machine.begin()
    assert machine.think()
    assert machine.handle(0, Done(0, "complete", (0.5,))) == []
    posts = machine.handle(1, Done(1, "complete", (0.5,)))
    assert not any(isinstance(post.message, Start) for post in posts)
    assert machine.over
    assert states(study) == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.FAIL]
    assert study.trials[2].user_attrs[ERROR] == "not begun: a callback stopped the study"


def test_a_trial_that_is_retried_is_seen_when_it_has_ended_for_good():
    seen = []

    def objective(trial):
        value = quadratic(trial)
        if trial.number == 0:
            raise ZeroDivisionError
        return value

    study = optimize(
        optuna.create_study(),
        objective,
        n_trials=3,
        retries=1,
        callbacks=[lambda study, trial: seen.append((trial.number, trial.state))],
    )
    assert len(study.trials) == 4
    assert [number for number, _ in seen] == [1, 2, 3]


def test_what_fails_after_a_stop_is_not_queued_again():
    study = optuna.create_study()
    machine = study_coordinator(study, blocks=2, n_trials=9, retries=1, callbacks=[MaxTrialsCallback(1)])
    machine.begin()
    machine.handle(0, Done(0, "complete", (0.5,)))
    machine.handle(1, Done(1, "failed", error="why"))
    assert machine.over
    assert states(study) == [TrialState.COMPLETE, TrialState.FAIL]


def test_a_failed_trial_is_seen_and_one_broken_off_is_not():
    seen = []

    def objective(trial):
        if trial.number == 1:
            raise ZeroDivisionError
        return float(trial.number)

    optimize(
        optuna.create_study(), objective, n_trials=3, callbacks=[lambda _, trial: seen.append(trial.state)]
    )
    assert seen == [TrialState.COMPLETE, TrialState.FAIL, TrialState.COMPLETE]
    seen.clear()
    study = optuna.create_study()
    machine = study_coordinator(
        study, blocks=2, n_trials=3, target=0.0, callbacks=[lambda _, trial: seen.append(trial.number)]
    )
    machine.begin()
    machine.handle(0, Done(0, "complete", (-1.0,)))
    machine.handle(1, Done(1, "halted", error="broken off"))
    assert seen == [0]


@pytest.mark.parametrize("size", [1, 3])
def test_the_terminator_of_optuna_ends_a_search(size):
    from optuna.terminator import BaseTerminator, TerminatorCallback

    class AfterSix(BaseTerminator):
        def should_terminate(self, study):
            return len(study.trials) >= 6

    with pytest.warns(FutureWarning, match="terminator"):
        callback = TerminatorCallback(AfterSix())
    first, *_ = searched(size, callbacks=[callback])
    assert 6 <= len(first.trials) < 6 + 3


@pytest.mark.parametrize("callbacks", [MaxTrialsCallback(3), [MaxTrialsCallback(3), "stop"]])
def test_what_is_no_list_of_functions_is_refused_by_name(callbacks):
    with pytest.raises(ConfigurationError, match=r"callbacks=.*give a list of functions"):
        optimize(optuna.create_study(), quadratic, n_trials=3, callbacks=callbacks)
