"""Searches over blocks of ranks, with threads as ranks."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections import defaultdict

import numpy as np
import pytest

from tests.helpers.threads import no_new_threads, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna
from optuna.trial import TrialState

from nnlo_common import SGD, ConfigurationError, Downpour, Participant
from nnlo_common.base._file_access import _held
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._study_trials import RETRY_OF
from nnlo_common.search.coordinator._trial_results import ERROR
from nnlo_common.training._joining import launched

optuna.logging.set_verbosity(optuna.logging.WARNING)


def quadratic(trial):
    x = trial.suggest_float("x", -1, 1)
    n = trial.suggest_int("n", 1, 2**40, log=True)
    c = trial.suggest_categorical("c", ["a", None, 3])
    trial.set_user_attr("seen", [x, n, c])
    return x**2 + (c == "a")


def searched(size, objective, *, study=optuna.create_study, **options):
    """The studies of all ranks."""
    with ranks(size) as cluster:
        return cluster.run(lambda world: optimize(study(), objective, world=world, **options), timeout_s=30)


def training(trial, *, fail=lambda rank, step: None, epochs=2):
    """A distributed training in the world of the block."""
    lr = trial.suggest_float("lr", 0.01, 0.5)
    with Participant(Downpour(), [np.ones(2, "f4")], optimizer=SGD(lr)) as me:
        for epoch in range(epochs):
            for step in me.batches(range(6)):
                fail(me.rank, step)
                me.gradients[0][:] = me.point[0]
                me.step()
            trial.report(float(me.parameters[0][0]), epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
    return float(me.parameters[0][0]) ** 2


@pytest.mark.parametrize("size", [2, 5])
def test_all_ranks_have_all_trials_exactly(size):
    first, *others = searched(
        size, quadratic, n_trials=12, sampler="random", block_size=1 if size == 2 else 2
    )
    assert [trial.number for trial in first.trials] == list(range(12))
    for trial in first.trials:
        assert trial.user_attrs["seen"] == [trial.params["x"], trial.params["n"], trial.params["c"]]
        assert trial.value == quadratic(optuna.trial.FixedTrial(trial.params))
    for study in others:
        assert [(one.params, one.values, one.user_attrs) for one in study.trials] == [
            (one.params, one.values, one.user_attrs) for one in first.trials
        ]
        assert study.best_params == first.best_params


def test_alone_it_is_the_search_of_optuna():
    study = optimize(optuna.create_study(), quadratic, n_trials=5, sampler="random", seed=7)
    plain = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=7))
    plain.optimize(quadratic, n_trials=5)
    assert [trial.params for trial in study.trials] == [trial.params for trial in plain.trials]


def test_each_trial_has_its_seed_whichever_block_trains_it():
    seeds = {}

    def objective(trial):
        seeds.setdefault(trial.number, set()).add(trial.seed)
        return 0.0

    searched(5, objective, n_trials=6, block_size=2, seed=3)
    several = dict(seeds)
    seeds.clear()
    optimize(optuna.create_study(), objective, n_trials=6, seed=3)
    assert several == seeds
    assert len(set().union(*seeds.values())) == 6


def test_a_training_has_the_block_for_its_world():
    found = set()

    def objective(trial):
        world = launched()
        found.add((world.rank, world.size))
        return training(trial)

    first, *_ = searched(7, objective, n_trials=4, block_size=3, sampler="random")
    assert found == {(0, 3), (1, 3), (2, 3)}
    assert all(trial.state is TrialState.COMPLETE for trial in first.trials)
    for trial in first.trials:  # as in two workers' alternation: each of 24 steps shrinks by the rate
        assert trial.value < 1
        assert list(trial.intermediate_values) == [0, 1]


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("number", [0, 2])
def test_a_rank_that_fails_fails_its_trial_only(where, number):
    def objective(trial):
        def fail(rank, step):
            if trial.number == number and rank == where and step >= 3:
                raise ZeroDivisionError("in the middle")

        if where == 0 and trial.number == number:
            raise ZeroDivisionError("in the middle")
        return training(trial, fail=fail)

    for study in searched(7, objective, n_trials=5, block_size=3, sampler="random"):
        states = [trial.state for trial in study.trials]
        assert states[number] is TrialState.FAIL
        assert states.count(TrialState.COMPLETE) == 4
        error = study.trials[number].user_attrs[ERROR]
        assert f"on rank {where} of the block, host memory:\nTraceback" in error
        assert "ZeroDivisionError: in the middle" in error


def test_what_has_failed_is_tried_again_and_counts_once():
    lock, failed = threading.Lock(), set()

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        with lock:
            again = x in failed
            failed.add(x)
        if not again:
            raise ValueError("once")
        return x

    study = searched(3, objective, n_trials=4, retries=1, sampler="random")[1]
    assert [trial.state for trial in study.trials].count(TrialState.COMPLETE) == 4
    assert len(study.trials) == 8
    for trial in study.trials:
        if trial.state is TrialState.COMPLETE:
            assert study.trials[trial.user_attrs[RETRY_OF]].params == trial.params


def test_nan_fails_the_trial():
    study = searched(3, lambda trial: math.nan if trial.number == 1 else 1.0, n_trials=3)[0]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "the objective returned NaN" in study.trials[1].user_attrs[ERROR]


@pytest.mark.parametrize("returned", [None, "good", (1.0, 2.0)])
def test_what_is_no_value_is_refused(returned):
    study = optimize(optuna.create_study(), lambda trial: returned, n_trials=1)
    assert f"returned {returned!r}; the study needs a number" in study.trials[0].user_attrs[ERROR]


def test_a_verdict_is_obeyed_by_all_ranks_at_the_same_call():
    calls = {}

    def objective(trial):
        for step in range(5):
            trial.report(float(step), step)
            calls.setdefault((trial.number, launched().rank), []).append(step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return 1.0

    def study():
        return optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=2.5))

    first, *_ = searched(5, objective, n_trials=4, block_size=2, study=study)
    assert {trial.state for trial in first.trials} == {TrialState.PRUNED}
    assert set(map(tuple, calls.values())) == {(0, 1, 2, 3)}
    assert len(calls) == 8


class OddTrialsPruned(optuna.pruners.BasePruner):
    def prune(self, study, trial):
        return trial.number % 2 == 1


def test_a_pruned_training_leaves_nothing_to_the_next():
    def study():
        return optuna.create_study(pruner=OddTrialsPruned())

    first, *_ = searched(7, training, n_trials=8, block_size=3, sampler="random", study=study)
    assert [trial.state.name for trial in first.trials] == ["COMPLETE", "PRUNED"] * 4


def test_one_rank_that_prunes_by_itself_prunes_the_trial():
    def objective(trial):
        def fail(rank, step):
            if rank == 2 and trial.number == 0:
                raise optuna.TrialPruned

        return training(trial, fail=fail)

    study = searched(4, objective, n_trials=2, block_size=3, sampler="random")[0]
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "COMPLETE"]


def test_the_target_stops_all_blocks():
    begun = threading.Event()

    def objective(trial):
        if trial.number == 0:
            begun.wait(10)
            return 0.0
        begun.set()
        for step in range(10_000):
            trial.report(1.0, step)
            launched().gather_text("")
        raise AssertionError("was not broken off")

    study = searched(5, objective, n_trials=50, block_size=2, target_objective=0.5)[0]
    assert study.best_value == 0
    assert len(study.trials) <= 4
    assert all("has reached 0.0" in trial.user_attrs[ERROR] for trial in study.trials[1:])


def test_a_search_that_has_reached_its_target_does_not_go_on(tmp_path):
    path, calls = tmp_path / "search.jsonl", []

    def objective(trial):
        calls.append(trial.suggest_float("x", 0, 1))
        return 0.0 if len(calls) == 2 else 1.0 + calls[-1]

    for target, trained in ((0.5, 2), (0.5, 2), (0.25, 2), (-1.0, 5), (None, 5)):
        study = journalled(path, 5, objective, target_objective=target)
        assert len(calls) == len(study.trials) == trained
    assert journalled(path, 6, objective, target_objective=0.5).best_value == 0
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_objective": "0.5"}, "target_objective='0.5': give a number"),
        ({"target_objective": float("nan")}, "target_objective=nan: give a number"),
        ({"target_objective": True}, "target_objective=True: give a number"),
        ({"seed": "a"}, "seed='a': must be a whole number of at least 0"),
        ({"seed": -1}, "seed=-1: must be a whole number of at least 0"),
        ({"seed": None}, "seed=None: must be a whole number of at least 0"),
    ],
)
def test_what_is_no_number_is_refused_by_name(options, said):
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        optimize(optuna.create_study(), quadratic, n_trials=1, **options)


def test_an_objective_that_is_no_function_is_refused():
    with pytest.raises(ConfigurationError, match=r"objective=0\.5 is not a function; give the function"):
        optimize(optuna.create_study(), 0.5, n_trials=1)


@pytest.mark.parametrize("size", [1, 4])
def test_numbers_of_numpy_can_be_queued_before_and_during_a_search(size, tmp_path):
    ended = []

    def more(study, trial):
        ended.append(trial)
        if len(ended) == 1:  # with two blocks three have begun at most, whichever ends first
            study.enqueue_trial({"n": np.int64(5)}, user_attrs={"why": np.float32(0.5)})

    def study():
        made = optuna.create_study()
        made.enqueue_trial({"n": np.int64(3)}, user_attrs={"why": np.bool_(True)})
        return made

    def objective(trial):
        return trial.suggest_int("n", 1, 9) + trial.user_attrs.get("why", 0)

    options = {"n_trials": 4, "journal": tmp_path / "search.jsonl", "export": tmp_path / "search.log"}
    options |= {"search_ranks": size // 4, "callbacks": [more], "sampler": "random"}
    for _ in range(2):
        found = searched(size, objective, study=study, **options)[0]
        values = {trial.params["n"]: trial.value for trial in found.trials if "why" in trial.user_attrs}
        assert values == {3: 4.0, 5: 5.5}
        assert len(found.trials) == 4


def test_ranks_that_suggest_differently_are_told():
    def objective(trial):
        return trial.suggest_float("x", 0, 1 + launched().rank)

    study = searched(3, objective, n_trials=1, block_size=2)[0]
    assert (
        "rank 1 of the block calls suggest 'x': FloatDistribution(high=2.0"
        in study.trials[0].user_attrs[ERROR]
    )


def test_ranks_that_ask_for_different_searches_are_told():
    def program(world):
        optimize(optuna.create_study(), quadratic, n_trials=3 + (world.rank == 2), world=world)

    with (
        ranks(3) as cluster,
        pytest.raises(ConfigurationError, match="n_trials is 3 on rank 0 but 4 on rank 2"),
    ):
        cluster.run(program)


@pytest.mark.parametrize(
    ("size", "block_size", "said"),
    [
        (6, 2, "5 ranks, which is not a multiple of block_size=2. Start 5 or 7 ranks, or keep 6 with"),
        (3, 4, "2 ranks, fewer than block_size=4. Start 5 ranks, or keep 3 with block_size=1 or 2"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_with_the_arithmetic(size, block_size, said):
    with pytest.raises(ConfigurationError, match=f"{size} - 1 coordinator = {said}"):
        searched(size, quadratic, n_trials=1, block_size=block_size)


def test_a_coordinator_that_fails_ends_the_search():
    class Broken(optuna.samplers.RandomSampler):
        def sample_independent(self, *_):
            raise RuntimeError("no idea")

    with pytest.raises(RuntimeError, match="no idea"):
        searched(5, quadratic, n_trials=3, block_size=2, sampler=Broken())


def test_no_thread_stays_behind():
    with no_new_threads():
        searched(3, quadratic, n_trials=3)


def test_a_gathering_is_passed_by_all_or_none_however_an_alarm_overtakes_it():
    for _ in range(30):
        passed = {}

        def objective(trial, passed=passed):
            world = launched()
            world.gather_text("first")
            if world.rank == 2:
                world.gather_text("second")
                raise ValueError("after it")
            world.gather_text("second")
            passed[world.rank] = True
            world.gather_text("third")

        searched(4, objective, n_trials=1, block_size=3)
        assert passed == {0: True, 1: True}


def journalled(path, n_trials, objective=quadratic, **options):
    study = optuna.create_study()
    return optimize(study, objective, n_trials=n_trials, journal=path, sampler="random", **options)


def test_a_search_goes_on_from_its_journal(tmp_path):
    path = tmp_path / "search.jsonl"
    first = journalled(path, 4)
    again = journalled(path, 4, objective=pytest.fail)  # nothing is left to do
    more = journalled(path, 7)
    facts = [
        [(one.params, one.values, one.user_attrs) for one in study.trials] for study in (first, again, more)
    ]
    assert facts[0] == facts[1] == facts[2][:4]
    assert len(facts[2]) == 7
    assert len({trial.params["x"] for trial in more.trials}) == 7, "a point was drawn twice"


def test_what_the_script_queues_comes_first_and_all_ranks_have_it():
    def queued():
        study = optuna.create_study()
        study.add_trial(optuna.trial.create_trial(value=3.0))
        study.enqueue_trial({"x": 0.25, "n": 7, "c": 3})
        study.enqueue_trial({"x": 0.5}, user_attrs={"why": "a guess"})
        return study

    studies = searched(5, quadratic, study=queued, n_trials=4, block_size=2, sampler="random")
    for study in studies:
        assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 5
        assert [trial.params.get("x") for trial in study.trials[1:3]] == [0.25, 0.5]
        assert study.trials[2].user_attrs["why"] == "a guess"
        for ours, theirs in zip(study.trials, studies[0].trials, strict=True):
            assert (ours.params, ours.values) == (theirs.params, theirs.values)
            assert ours.user_attrs.get("seen") == theirs.user_attrs.get("seen")


def test_what_the_script_queues_again_is_what_the_journal_has(tmp_path):
    tried = []

    def objective(trial):
        x, y = trial.suggest_float("x", -1, 1), trial.suggest_float("y", 0, 1)
        tried.append((x, y))
        if len(tried) == 3:
            raise KeyboardInterrupt
        return x

    def start():
        study = optuna.create_study()
        for x in (0.25, 0.5, 0.75, 1.0):
            study.enqueue_trial({"x": x})
        options = {"n_trials": 5, "journal": tmp_path / "search.jsonl", "sampler": "random"}
        return optimize(study, objective, **options)

    with pytest.raises(KeyboardInterrupt):
        start()
    study = start()
    assert [trial.params["x"] for trial in study.trials[:4]] == [0.25, 0.5, 0.75, 1.0]
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 5
    assert tried[3] == tried[2]  # also what the sampler had chosen
    assert [x for x, _ in tried[:5]] == [0.25, 0.5, 0.75, 0.75, 1.0]
    again = start()
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.trials]
    assert len(tried) == 6


def test_a_queued_trial_goes_on_though_it_was_killed_before_what_it_was_queued_with(tmp_path):
    tried = []

    def objective(trial):
        x = trial.suggest_float("x", -1, 1)
        if not tried:
            tried.append((x, None))
            raise KeyboardInterrupt
        tried.append((x, trial.suggest_categorical("c", ["a", "b"])))
        return x

    def start():
        study = optuna.create_study()
        study.enqueue_trial({"c": "b"})
        return optimize(study, objective, n_trials=2, journal=tmp_path / "search.jsonl", sampler="random")

    with pytest.raises(KeyboardInterrupt):
        start()
    study = start()
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 2
    assert tried[1] == (tried[0][0], "b")
    assert [trial.params for trial in start().trials] == [trial.params for trial in study.trials]
    assert len(tried) == 3


def queued(path, waiting, objective, n_trials=3):
    study = optuna.create_study()
    for params in waiting:
        study.enqueue_trial(params)
    return optimize(
        study, objective, n_trials=n_trials, journal=path, sampler="random", retries=1, failures="ignore"
    )


def test_a_retry_does_not_use_up_a_queued_trial_that_has_its_values(tmp_path):
    calls = []

    def objective(trial):
        calls.append(trial.number)
        if len(calls) == 2:
            raise KeyboardInterrupt
        x, _ = trial.suggest_float("x", 0, 1), trial.suggest_categorical("c", ["a", "b"])
        if len(calls) == 1:
            raise ValueError("once")
        return x

    waiting = [{"x": 0.5, "c": "a"}, {"x": 0.5}, {"x": 0.25}]
    with pytest.raises(KeyboardInterrupt):
        queued(tmp_path / "search.jsonl", waiting, objective)
    for _ in range(2):
        study = queued(tmp_path / "search.jsonl", waiting, objective)
    complete = [trial for trial in study.trials if trial.state is TrialState.COMPLETE]
    assert [trial.state for trial in study.trials].count(TrialState.FAIL) == 1
    assert sorted(trial.params["x"] for trial in complete) == [0.25, 0.5, 0.5]
    assert len(calls) == 5
    again = queued(tmp_path / "search.jsonl", waiting, objective)
    assert [trial.params for trial in again.trials] == [trial.params for trial in study.trials]


def test_an_older_journal_without_what_trials_were_queued_with_goes_on(tmp_path):
    path = tmp_path / "search.jsonl"
    tried = []

    def objective(trial):
        tried.append((trial.suggest_float("x", 0, 1), trial.suggest_float("y", 0, 1)))
        if len(tried) == 2:
            raise KeyboardInterrupt
        return tried[-1][0]

    waiting = [{"x": 0.5}, {"x": 0.25}]
    with pytest.raises(KeyboardInterrupt):
        queued(path, waiting, objective)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    older = [{name: one for name, one in line.items() if name != "fixed"} for line in lines]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in older))
    study = queued(path, waiting, objective)
    assert [trial.params["x"] for trial in study.trials[:2]] == [0.5, 0.25]
    assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
    assert tried[2] == tried[1]


HOLDER = """
import sys
import optuna
from nnlo_common.search._journal import Journal
journal = Journal(sys.argv[1], optuna.create_study())
print("held", flush=True)
sys.stdin.read()
"""


def test_a_journal_belongs_to_one_job_at_a_time(tmp_path):
    path = tmp_path / "search.jsonl"
    journalled(path, 2)
    command = [sys.executable, "-c", HOLDER, str(path)]
    # Another process, since a second search of this one may have it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = path.read_text()
        told = f"process {holder.pid} on {os.uname().nodename}) is searching with the journal {path}"
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            journalled(path, 3)
        assert path.read_text() == before
        holder.kill()
    assert len(journalled(path, 3).trials) == 3


def test_wherever_the_journal_was_torn_each_trial_is_counted_once(tmp_path):
    path = tmp_path / "search.jsonl"
    journalled(path, 3)
    whole = path.read_bytes()
    finished = [line for line in whole.splitlines(keepends=True) if b'"state"' in line]
    ends = [whole.index(line) + len(line) for line in finished]
    for cut in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        study = journalled(path, 3)
        assert [trial.state for trial in study.trials] == [TrialState.COMPLETE] * 3
        kept = sum(cut >= end for end in ends)
        assert [trial.params["x"] for trial in study.trials[:kept]] == [
            trial.params["x"] for trial in journalled(path, 3).trials[:kept]
        ]


def test_what_was_running_is_trained_again_with_its_parameters(tmp_path):
    path = tmp_path / "search.jsonl"
    begun = []

    def objective(trial):
        begun.append(trial.suggest_float("x", 0, 1))
        if len(begun) == 2:
            raise KeyboardInterrupt  # as good as a kill: nothing is written any more
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        journalled(path, 3, objective=objective)
    study = journalled(path, 3, objective=objective)
    assert begun[2] == begun[1]
    assert len(study.trials) == 3


@pytest.mark.parametrize("lost", [[0], [1], [0, 2], [0, 1, 2]])
def test_a_trial_keeps_its_name_under_another_number(lost, tmp_path):
    path = tmp_path / "search.jsonl"
    names = defaultdict(set)

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        names[x].add(trial.name)
        return x

    journalled(path, 3, objective=objective)
    for n_trials in (4, 6):
        lines = path.read_text().splitlines(keepends=True)
        kept = [one for one in lines if "state" not in (told := json.loads(one)) or told["trial"] not in lost]
        path.write_text("".join(kept))  # as if killed while these were running, once and soon once more
        lost = [n_trials - 1]
        journalled(path, n_trials, objective=objective)
    assert len(names) == 6
    assert sorted(map(sorted, names.values())) == [[f"{number:04}"] for number in range(6)]


def test_a_fold_has_a_name_of_its_own():
    names = set()

    def objective(trial):
        names.add(trial.name)
        return 0.0

    optimize(optuna.create_study(), objective, n_trials=2, folds=2, sampler="random")
    assert names == {"0000-fold1", "0000-fold2", "0001-fold1", "0001-fold2"}


def test_a_retried_trial_counts_once_in_the_journal(tmp_path):
    path = tmp_path / "search.jsonl"
    seen = set()

    def objective(trial):
        x = trial.suggest_float("x", 0, 1)
        if x not in seen:
            seen.add(x)
            raise ValueError("once")
        return x

    journalled(path, 2, objective=objective, retries=1)
    for _ in range(2):
        assert len(journalled(path, 2, objective=pytest.fail).trials) == 4


def test_another_study_does_not_go_on_from_a_journal(tmp_path):
    path = tmp_path / "search.jsonl"
    journalled(path, 1)
    with pytest.raises(ConfigurationError, match=r"begins with .*MINIMIZE.*but this study is .*MAXIMIZE"):
        optimize(optuna.create_study(direction="maximize"), quadratic, n_trials=1, journal=path)
    path.write_text("hello\n")
    with pytest.raises(ConfigurationError, match="holds a line that is no JSON object"):
        journalled(path, 1)
    assert not [lock for lock in _held if lock.parent == tmp_path], "what is refused keeps others out"


@pytest.mark.parametrize("size", [1, 3])
def test_a_resumed_search_says_once_from_where(tmp_path, size):
    journal, told = tmp_path / "search.jsonl", []
    searched(size, quadratic, n_trials=2, journal=journal)
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = optuna.logging.get_logger("optuna.study")
    logger.addHandler(handler)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        searched(size, quadratic, n_trials=3, journal=journal)
    finally:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logger.removeHandler(handler)
    line = f"The search resumes from {journal}, with 2 finished trials of 3."
    assert [one for one in told if "resumes" in one] == [line]
