"""Trials that train in groups of ranks: they end as all others do, also in the middle of a step."""

from __future__ import annotations

import threading

import pytest

from tests.helpers.group_cases import SIZES, batches_of, close, gradient_of, merged, train_grouped
from tests.helpers.numpy_cases import CASES, initial
from tests.helpers.threads import flat, on_ranks, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common import ConfigurationError, Participant
from nnlo_common.search import optimize

optuna.logging.set_verbosity(optuna.logging.ERROR)
LAYOUTS = [
    (7, 3, {"group_size": 2}),
    (7, 3, {"servers": 0}),
    (11, 5, {"group_size": 2}),
    (5, 2, {"servers": 0}),
]


def train(case, at_step=lambda role, step: None, **layout):
    """Train a case in the present world, and return the parameters."""
    algorithm, optimizer = CASES[case].algorithm, CASES[case].optimizer
    with Participant(algorithm, initial(), optimizer=optimizer and optimizer(), **layout) as me:
        if me.role == "server 0":
            at_step(me.role, 1)
            at_step(me.role, 3)
        for step, samples in enumerate(me.batches(batches_of(SIZES, 0))):
            value, start = gradient_of(flat(me.point), samples), 0
            for part in me.gradients:
                part.flat[:] = value[start : start + part.size]
                start += part.size
            at_step(me.role, step)
            me.step(len(samples))
    return flat(me.parameters)


def searched(size, block_size, objective, trials=5):
    """The states of the trials."""

    def program(world):
        study = optuna.create_study(pruner=optuna.pruners.NopPruner())
        optimize(study, objective, n_trials=trials, block_size=block_size, sampler="random", world=world)
        return [trial.state.name for trial in study.trials]

    with ranks(size) as cluster:
        found = cluster.run(program, 180)
    assert all(one == found[0] for one in found)
    return found[0]


@pytest.mark.parametrize(("size", "block_size", "layout"), LAYOUTS)
def test_a_trial_trains_as_outside_of_a_search(size, block_size, layout):
    found = []
    lock = threading.Lock()

    def objective(trial):
        trial.suggest_float("x", 0, 1)
        vector = train("synchronous", **layout)
        with lock:
            found.append(vector)
        return float(vector.sum())

    assert searched(size, block_size, objective) == ["COMPLETE"] * 5
    assert len(found) == 5 * block_size
    members = layout.get("group_size", block_size)
    if block_size - layout.get("servers", 1) == members:  # one group
        expected, _, _ = train_grouped("synchronous", merged(SIZES, members), epochs=1)
        assert all(close(vector, expected) for vector in found)
    else:
        # Of an odd number of rounds one group has the last: the other's parameters are those of its own end.
        def outside(world):
            return train_grouped("synchronous", SIZES, world=world, epochs=1, **layout)[0]

        alone = on_ranks(block_size, outside)
        assert all(any(close(vector, one) for one in alone) for vector in found)
        for one in alone:
            assert sum(close(vector, one) for vector in found) == 5 * sum(
                close(one, other) for other in alone
            )


class Fault(Exception):
    pass


@pytest.mark.parametrize("role", ["server 0", "worker 0", "worker 0, member 1", "lead"])
@pytest.mark.parametrize("case", ["downpour", "localsgd_lag"])
def test_a_rank_that_fails_in_a_step_costs_one_trial(role, case):
    layout = {"servers": 0} if role == "lead" else {"group_size": 2}

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)

        def fail(here, step):
            if trial.number in (1, 3) and here == role and step == trial.number:
                raise Fault("in the middle")

        train(case, fail, **layout)
        return x

    expected = ["COMPLETE", "FAIL", "COMPLETE", "FAIL", "COMPLETE"]
    assert searched(7, 3, objective) == expected


def test_other_ways_to_add_up_gradients_are_refused_in_a_trial():
    said = []

    def objective(trial):
        try:
            train("downpour", servers=0, all_reduce="shared")
        except ConfigurationError as error:
            said.append(str(error))
        return 0.0

    assert searched(3, 2, objective, trials=1) == ["COMPLETE"]
    assert len(said) == 2
    assert all("all_reduce='shared' in a trial of a search" in one for one in said)


@pytest.mark.parametrize("layout", [{"group_size": 2}, {"servers": 0}])
def test_a_trial_that_is_pruned_in_an_epoch_frees_its_group(layout):
    def objective(trial):
        x = trial.suggest_float("x", 0, 1)

        def prune(role, step):
            if trial.number % 2 and step == 2 and role in ("worker 0", "lead"):
                raise optuna.TrialPruned

        train("downpour", prune, **layout)
        return x

    assert searched(7, 3, objective) == ["COMPLETE", "PRUNED"] * 2 + ["COMPLETE"]
