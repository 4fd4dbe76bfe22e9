"""In lock-step a parallel search is the same bit for bit, whatever the pace of its blocks."""

from __future__ import annotations

import math
import random
import threading

import pytest

from tests.helpers.threads import ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, distribution_to_json
from optuna.trial import TrialState

from nnlo_common import ConfigurationError
from nnlo_common.search import optimize
from nnlo_common.search._journal import Journal
from nnlo_common.search._search_messages import (
    Done,
    Halt,
    ParameterRequest,
    PruneRequest,
    Start,
    TrialReport,
)
from nnlo_common.search.coordinator._trial_results import ERROR
from nnlo_common.search.samplers._bayesian import BayesianSampler
from nnlo_common.search.samplers._engines import engine
from tests.helpers.searches import study_coordinator

optuna.logging.set_verbosity(optuna.logging.ERROR)
X, Y = (distribution_to_json(FloatDistribution(-1, 1)) for _ in "xy")
C = distribution_to_json(CategoricalDistribution(["plain", "bent"]))
MEDIAN = optuna.pruners.MedianPruner(n_startup_trials=2)
HALVING = optuna.pruners.SuccessiveHalvingPruner()
HYPERBAND = optuna.pruners.HyperbandPruner()


def told(study):
    """All that repeats of a study."""
    return [
        (trial.number, trial.state, trial.params, trial.values, trial.intermediate_values)
        for trial in study.trials
        if "broken off" not in trial.user_attrs.get(ERROR, "")
    ]


def objective(run):
    """What a block does, as a generator of messages; two of the trials fail."""
    x = (yield ParameterRequest(run, "x", X)).value
    bent = (yield ParameterRequest(run, "c", C)).value
    y = (yield ParameterRequest(run, "y", Y)).value if bent else 0.3  # a parameter that not all trials have
    for step in range(3):
        yield TrialReport(run, (x - 0.2) ** 2 + y**2 + step, step)
        if (yield PruneRequest(run)).value:
            return Done(run, "pruned")
    if run in (3, 9):
        return Done(run, "failed", error="by accident")
    return Done(run, "complete", ((x - 0.2) ** 2 + y**2,))


def searched(timing, *, sampler="tpe", pruner=MEDIAN, blocks=3, n_trials=24, lockstep=True, **options):
    """A search in which chance decides which block goes on next."""
    pace = random.Random(timing)
    study = optuna.create_study(pruner=pruner)
    study.sampler = engine(sampler, 1, n_trials, study)
    if isinstance(study.sampler, BayesianSampler):
        study.sampler.choosers = math.inf  # as for any search in lock-step: how long it takes must not matter
    machine = study_coordinator(
        study, blocks=blocks, n_trials=n_trials, retries=1, lockstep=lockstep, **options
    )
    slow = pace.randrange(blocks)
    training, waiting = {}, machine.begin()
    while True:
        for post in waiting:
            if isinstance(post.message, Start):
                run = objective(post.message.run)
                training[post.team] = run, next(run)
            elif isinstance(post.message, Halt):
                training[post.team] = None, Done(post.message.run, "halted", error="broken off")
        if not training:
            return study
        machine.think()
        team = pace.choice([team for team in training for _ in range(1 if team == slow else 9)])
        run, message = training.pop(team)
        waiting = machine.handle(team, message)
        if isinstance(message, Done):
            continue
        answer = next((post.message for post in waiting if post.team == team), None)
        try:
            training[team] = run, run.send(answer)
        except StopIteration as end:
            training[team] = run, end.value


@pytest.mark.parametrize("sampler", ["random", "tpe", "bayesian", "evolutionary", "qmc"])
def test_any_timing_gives_the_same_study(sampler):
    first, *others = [told(searched(timing, sampler=sampler)) for timing in range(6)]
    assert all(other == first for other in others)
    assert {state.name for _, state, *_ in first} >= {"COMPLETE", "FAIL", "PRUNED"}


@pytest.mark.parametrize("pruner", [HALVING, HYPERBAND])
def test_any_timing_gives_the_same_verdicts(pruner):
    first, *others = [told(searched(timing, pruner=pruner)) for timing in range(6)]
    assert all(other == first for other in others)


def test_without_lockstep_timing_decides():
    assert len({str(told(searched(timing, lockstep=False))) for timing in range(6)}) > 1


def test_another_seed_is_another_search():
    assert told(searched(0, seed=1)) != told(searched(0, seed=2))


def test_the_first_in_order_that_is_good_enough_ends_the_search():
    found = [searched(timing, sampler="random", target=0.3, n_trials=60) for timing in range(6)]
    first, *others = map(told, found)
    assert all(other == first for other in others)
    assert first[-1][3][0] <= 0.3
    assert len(first) < 60


def test_each_trial_knows_of_exactly_those_as_many_before_as_there_are_blocks():
    seen = {}

    class Looking(optuna.samplers.RandomSampler):
        def sample_independent(self, study, trial, name, distribution):
            states = [one.state.is_finished() for one in study.get_trials(deepcopy=False)]
            assert len(states) == trial.number + 1
            seen.setdefault(trial.number, set()).add(states.count(True))
            return super().sample_independent(study, trial, name, distribution)

    for timing in range(4):
        searched(timing, sampler=Looking(seed=1), n_trials=12)
    assert len(seen) == 12, "two more are trials tried again, with the same parameters"
    assert seen == {number: {max(0, number - 2)} for number in seen}


def test_what_a_journal_holds_is_a_beginning_of_the_search(tmp_path):
    path = tmp_path / "search.jsonl"
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler())
    journal = Journal(path, study)
    machine = study_coordinator(study, blocks=3, n_trials=9, lockstep=True, record=journal)
    machine.begin()
    assert machine.handle(1, Done(1, "complete", (1.0,))) == [], "the block waits for those before"
    machine.handle(0, Done(0, "complete", (1.0,)))
    train = {0: 3, 1: 4, 2: 2}
    machine.handle(1, Done(4, "complete", (1.0,)))
    machine.interrupt("the time is up")
    machine.handle(0, Done(train[0], "halted", error="broken off"))
    machine.handle(2, Done(train[2], "complete", (1.0,)))
    journal.close()
    assert machine.over
    states = [trial.state for trial in study.trials]
    assert states == [TrialState.COMPLETE] * 3 + [TrialState.FAIL] * 2, "trial 4 had ended, but not trial 3"
    assert path.read_text().count('"state": "COMPLETE"') == 3


def test_ranks_of_uneven_pace_find_the_same():
    found = []
    for late in range(3):

        def objective(trial, late=late):
            x = trial.suggest_float("x", -1, 1)
            if trial.number % 3 == late:
                threading.Event().wait(5e-3)
            return x**2 + trial.suggest_int("n", 0, 9)

        def program(world, objective=objective):
            study = optuna.create_study()
            return optimize(study, objective, n_trials=15, sampler="tpe", lockstep=True, world=world)

        with ranks(4) as cluster:
            found.append(told(cluster.run(program, 180)[1]))
    assert found[0] == found[1] == found[2]


def test_one_process_is_a_search_of_one_block():
    def quadratic(trial):
        return trial.suggest_float("x", -1, 1) ** 2

    def once(world=None):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler())
        return optimize(study, quadratic, n_trials=14, seed=4, lockstep=True, world=world)

    with ranks(2) as cluster:
        assert told(cluster.run(once, 180)[0]) == told(once())


@pytest.mark.filterwarnings("ignore:WilcoxonPruner is experimental")
def test_what_would_not_repeat_is_refused():
    study = optuna.create_study(pruner=optuna.pruners.WilcoxonPruner())
    with (
        ranks(3) as cluster,
        pytest.raises(ConfigurationError, match=r"which ends first is chance.*multiple of 2"),
    ):
        cluster.run(
            lambda world: optimize(
                study, lambda trial: 0.0, n_trials=2, folds=2, block_size=2, lockstep=True, world=world
            )
        )
    with pytest.raises(ConfigurationError, match=r"lockstep=True with search_ranks=2: .*leave one of them"):
        optimize(study, lambda trial: 0.0, n_trials=2, lockstep=True, search_ranks=2)
