"""The tuner of keras-tuner over blocks: threads as ranks where a trial is a formula, and real fits alone."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.threads import DyingMail, HeldMail, MortalMail, no_new_threads, ranks

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")
import keras
import keras_tuner

import nnlo_keras.tune._tuner
from nnlo_common import ConfigurationError, PeerLostError
from nnlo_common.base._signals import Interrupts
from nnlo_common.commands._cli import main
from nnlo_common.search._search_messages import Done, End, Note, Start
from nnlo_common.search.coordinator._coordinator import Coordinator
from nnlo_common.search.coordinator._time_left import TimeLeft
from nnlo_common.testing import InjectedFault
from nnlo_common.training._joining import launched
from nnlo_keras.tune import MPITuner, SamplerOracle
from nnlo_keras.tune._data import Folds, held_out
from nnlo_keras.tune._oracle import RESULT, OracleTrials
from nnlo_keras.tune._tuner import EarlyEnd

pytestmark = [
    pytest.mark.framework("keras"),
    # keras-tuner asks threads for their names in an old way.
    pytest.mark.filterwarnings("ignore:.*(currentThread|getName).* is deprecated"),
    pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

STOCK = {
    "random": lambda: keras_tuner.oracles.RandomSearchOracle("loss", max_trials=8, seed=1),
    "bayesian": lambda: keras_tuner.oracles.BayesianOptimizationOracle("loss", max_trials=6, seed=1),
    "hyperband": lambda: keras_tuner.oracles.HyperbandOracle("loss", max_epochs=4, factor=2, seed=1),
    "grid": lambda: keras_tuner.oracles.GridSearchOracle("loss", seed=1),
}
KINDS = [
    pytest.param(
        kind,
        marks=pytest.mark.skipif(
            kind == "bayesian" and importlib.util.find_spec("sklearn") is None,
            reason="keras-tuner's Bayesian oracle needs scikit-learn, which it does not bring",
        ),
    )
    for kind in STOCK
]


class Formula(MPITuner):
    """Its trials train nothing."""

    def __init__(self, *args, value=None, **options):
        self.value = value or (lambda hp: hp.get("x") ** 2)
        super().__init__(None, *args, **options)

    def _populate_initial_space(self):
        if self.has_directory:
            self._declare_first(space := self.oracle.get_space())
            self.oracle.update_space(space)

    def _declare_first(self, hp):
        hp.Float("x", -1, 1, step=0.5)  # the others are found by trials

    def _declare(self, hp):
        hp.Float("x", -1, 1, step=0.5)
        hp.Boolean("more")
        with hp.conditional_scope("more", [True]):
            hp.Int("late", 1, 2)

    def run_trial(self, trial, *args, **options):
        self._declare(trial.hyperparameters)
        return {"loss": self.value(trial.hyperparameters)}


def searched(size, folder, oracle=STOCK["random"], *, rounds=1, **options):
    """The tuners of all ranks."""

    def program(world):
        for _ in range(rounds):
            tuner = Formula(oracle(), directory=folder, project_name="p", world=world, **options)
            tuner.search(verbose=0)
        return tuner

    with ranks(size) as cluster:
        return cluster.run(program, timeout_s=60)


def found(tuner):
    return {
        one.trial_id: (one.status, one.hyperparameters.values, one.score)
        for one in tuner.oracle.trials.values()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_oracle_ends_as_it_does_alone_and_all_ranks_know_all(tmp_path, kind):
    first, *others = searched(5, tmp_path / "blocks", STOCK[kind], block_size=2)
    (alone,) = searched(1, tmp_path / "alone", STOCK[kind])
    assert len(found(first)) == len(found(alone))
    assert all(status == "COMPLETED" for status, _, _ in found(first).values())
    for tuner in others:
        assert found(tuner) == found(first)
        assert tuner.get_best_hyperparameters()[0].values == first.get_best_hyperparameters()[0].values


def in_uneven_time(timing):
    """A value that takes its time, differently with each number; of some trials there is none."""
    pace = random.Random(timing)

    def value(hp):
        time.sleep(pace.choice([0, 0, 0.002, 0.02]))
        return math.nan if hp.get("x") == 0.5 and not hp.get("more") else hp.get("x") ** 2 + hp.get("more")

    return value


LOCKSTEP = [*KINDS, *(pytest.param(name, id=f"sampler {name}") for name in ("tpe", "evolutionary", "grid"))]


@pytest.mark.parametrize("kind", LOCKSTEP)
def test_in_lockstep_the_pace_of_blocks_does_not_matter(tmp_path, kind):
    def repeated(timing):
        options = {} if kind in STOCK else {"objective": "loss", "max_trials": 14, "seed": 3}
        first, *_ = searched(
            4,
            tmp_path / str(timing),
            STOCK.get(kind, lambda: kind),
            lockstep=True,
            value=in_uneven_time(timing),
            **options,
        )
        return found(first), first.oracle.start_order, first.oracle.end_order

    once = repeated(1)
    trials, started, ended = once
    assert ended == started == list(trials)
    assert [repeated(timing) for timing in (2, 3)] == [once, once]


def test_without_lockstep_an_oracle_hears_of_trials_as_they_end(tmp_path):
    def program(world):
        first_is_slow = iter([0.3])
        tuner = Formula(
            STOCK["random"](),
            directory=tmp_path,
            world=world,
            value=lambda hp: time.sleep(next(first_is_slow, 0.0) if world.rank == 1 else 0.0) or 0.0,
        )
        tuner.search(verbose=0)
        return tuner.oracle.start_order, tuner.oracle.end_order

    with ranks(3) as cluster:
        started, ended = cluster.run(program, timeout_s=60)[0]
    assert sorted(ended) == started != ended


def test_conditional_parameters_that_a_block_has_found_reach_the_oracle(tmp_path):
    first, *_ = searched(3, tmp_path, STOCK["grid"])
    late = {values.get("late") for _, values, _ in found(first).values()}
    assert late == {None, 1, 2}
    assert len(found(first)) == 5 + 5 * 2


def test_one_rank_writes_and_the_layout_is_keras_tuners(tmp_path):
    searched(5, tmp_path, block_size=2)
    names = {str(path.relative_to(tmp_path / "p")) for path in (tmp_path / "p").rglob("*") if path.is_file()}
    names.remove("in-use")  # ours, as long as a job searches here
    assert names == {"oracle.json", "tuner0.json", *(f"trial_{number}/trial.json" for number in range(8))}


def test_the_directory_has_a_page(tmp_path, capsys):
    first, *_ = searched(5, tmp_path, block_size=2)
    assert main(["report", str(tmp_path)]) == 0
    best = first.oracle.get_best_trials()[0]
    assert f"is {int(best.trial_id)}, loss {best.score:.4g}: x " in capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    assert "minimize loss: 8 complete" in page
    assert '<a href="p/trial_0/">trial_0</a>' in page


def bad(hp):
    """Whether this is the second value of x in a grid, and the first that it comes with."""
    return hp.get("x") == -0.5 and not hp.get("more")


def faulty(kind, rank=0):
    """Fails the second point of a grid, on one rank of the block."""

    def value(hp):
        world = launched()
        if bad(hp) and (world is None or world.rank == rank):
            raise kind("in the middle")
        return hp.get("x") ** 2

    return value


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_trial_is_counted_as_keras_tuner_does_and_keeps_its_traceback(tmp_path, rank):
    first, *_ = searched(5, tmp_path, STOCK["grid"], block_size=2, value=faulty(ValueError, rank))
    failed = [one for one in first.oracle.trials.values() if one.status == "FAILED"]
    assert {one.hyperparameters.values["x"] for one in failed} == {-0.5}
    assert all("ValueError: in the middle" in one.message for one in failed)
    assert all(f"on rank {rank} of the block" in one.message for one in failed)


def test_too_many_failures_in_a_row_end_the_search_on_all_ranks(tmp_path):
    def value(hp):
        raise ValueError("always")

    caught = []

    def program(world):
        tuner = Formula(STOCK["random"](), directory=tmp_path, block_size=2, world=world, value=value)
        with pytest.raises(RuntimeError, match="consecutive failures exceeded the limit of 3"):
            tuner.search(verbose=0)
        caught.append(world.rank)

    with ranks(5) as cluster:
        cluster.run(program, timeout_s=60)
    assert sorted(caught) == [0, 1, 2, 3, 4]


def test_a_fatal_error_ends_the_search_and_other_blocks_are_broken_off(tmp_path):
    def program(world):
        tuner = Formula(
            STOCK["grid"](),
            directory=tmp_path,
            block_size=2,
            world=world,
            value=faulty(keras_tuner.errors.FatalError),
        )
        with pytest.raises(keras_tuner.errors.FatalError, match="in the middle"):
            tuner.search(verbose=0)
        return len(tuner.oracle.end_order)

    with ranks(5) as cluster:
        assert max(cluster.run(program, timeout_s=60)) < 9  # of 15


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
@pytest.mark.filterwarnings("ignore:All-NaN axis")  # keras-tuner's, of a metric that has been NaN only
def test_a_score_that_is_no_number_is_a_failure(tmp_path, score, size):
    value = lambda hp: score if bad(hp) else hp.get("x") ** 2  # noqa: E731
    first, *_ = searched(size, tmp_path, STOCK["grid"], block_size=2, value=value)
    assert {values["x"] for status, values, _ in found(first).values() if status == "FAILED"} == {-0.5}
    assert all(math.isfinite(one.score) for one in first.oracle.get_best_trials(5))


def test_a_trial_is_tried_again_as_often_as_its_oracle_has_it(tmp_path):
    tries = []

    def value(hp):
        tries.append(hp.get("x"))
        if len(tries) == 1:
            raise ValueError
        return hp.get("x") ** 2

    oracle = lambda: keras_tuner.oracles.RandomSearchOracle(  # noqa: E731
        "loss", max_trials=4, seed=1, max_retries_per_trial=1
    )
    first, *_ = searched(3, tmp_path, oracle, value=value)
    assert {status for status, _, _ in found(first).values()} == {"COMPLETED"}
    assert len(tries) == 5


@pytest.mark.parametrize("kind", [*KINDS, "sampler"])
def test_a_search_that_was_killed_goes_on(tmp_path, kind):
    class Killed(BaseException):
        pass

    oracle = STOCK.get(kind, lambda: SamplerOracle("evolutionary", objective="loss", max_trials=8, seed=0))
    trained = []

    def value(hp):
        trained.append(hp.values.copy())
        if len(trained) == 4:
            raise Killed
        return hp.get("x") ** 2

    with pytest.raises(Killed):
        searched(1, tmp_path, oracle, value=value)
    (tmp_path / "p" / "trial_9").mkdir()  # chosen, but not yet known to the oracle
    first = next((tmp_path / "p").glob("trial_0*")) / "trial.json"
    orphan = json.loads(first.read_text()) | {"trial_id": "9"}
    (tmp_path / "p" / "trial_9" / "trial.json").write_text(json.dumps(orphan))
    (again,) = searched(1, tmp_path, oracle, value=value)
    (whole,) = searched(1, tmp_path / "whole", oracle)
    assert len(found(again)) == len(found(whole))
    assert {status for status, _, _ in found(again).values()} == {"COMPLETED"}
    assert len(trained) == len(found(again)) + 1


@pytest.mark.parametrize("size", [1, 5])
def test_a_training_that_leaves_at_a_signal_ends_the_search_and_is_no_failure(tmp_path, size):
    left = threading.Event()

    def value(hp):
        if hp.get("x") == 0 and not left.is_set():
            if launched() is None or launched().rank == 1:
                left.set()
                raise SystemExit(75)
            launched().gather_text("")
        return hp.get("x") ** 2

    def program(world):
        tuner = Formula(
            STOCK["grid"](), directory=tmp_path, project_name="p", world=world, value=value, block_size=2
        )
        with pytest.raises(SystemExit, match="75"):
            tuner.search(verbose=0)
        return [one.status for one in tuner.oracle.trials.values()]

    with ranks(size) as cluster:
        states = cluster.run(program, timeout_s=60)
    assert set(states[0]) <= {"COMPLETED", "RUNNING"}
    assert "RUNNING" in states[0]
    first, *_ = searched(size, tmp_path, STOCK["grid"], block_size=2)
    assert {status for status, _, _ in found(first).values()} == {"COMPLETED"}
    assert len(found(first)) == len(first.oracle.end_order) == 15


def struck(size, folder, victim, kind, oracle=STOCK["random"], *, left=3, held=None, **options):
    """The tuners of all ranks, of which one dies with a letter; rank `held` begins no second trial before."""
    died = threading.Event()

    def program(world):
        if world.rank == victim:
            world.mail = lambda: DyingMail(world, kind, left, died)
        elif world.rank == held:
            world.mail = lambda: HeldMail(world, "Start", died)
        tuner = Formula(oracle(), directory=folder, project_name="p", world=world, block_size=2, **options)
        tuner.search(verbose=0)
        return tuner

    with ranks(size) as cluster:
        return cluster.run(program, timeout_s=60)


@pytest.mark.parametrize("left", [1, 2, 5, 12, 21, 34])
@pytest.mark.parametrize(("kind", "folds"), [("random", 1), ("random", 2), ("grid", 1), ("hyperband", 1)])
def test_a_spare_takes_over_from_a_dead_first_rank(tmp_path, kind, folds, left):
    begun = []

    def value(hp):
        begun.append(1)
        return hp.get("x") ** 2

    def program(world):
        if world.rank == 0:
            world.mail = lambda: MortalMail(world, left, after=left % 2 == 0)
        tuner = Formula(
            STOCK[kind](),
            directory=tmp_path,
            project_name="p",
            world=world,
            folds=folds,
            value=value,
            spares=1,
        )
        tuner.search(verbose=0)
        return tuner

    told = pytest.warns(RuntimeWarning, match="rank 0 on memory, which coordinated the search, has died")
    with told, ranks(4) as cluster:
        dead, *tuners = cluster.run(program, timeout_s=60)
    assert isinstance(dead, InjectedFault)
    for tuner in tuners:
        assert {status for status, _, _ in found(tuner).values()} == {"COMPLETED"}
        assert found(tuner) == found(tuners[0])
        assert len(tuner.oracle.end_order) == len(set(tuner.oracle.end_order)) == len(tuner.oracle.trials)
    assert len(begun) == len(tuners[0].oracle.trials) * folds
    assert tuners[-1].has_directory
    again = Formula(STOCK[kind](), directory=tmp_path, project_name="p", world=None, value=value)
    assert found(again) == found(tuners[0])


def test_lockstep_with_spares_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="lockstep=True with spares=1 is not possible"):
        Formula(STOCK["random"](), directory=tmp_path, lockstep=True, spares=1)


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize(("kind", "folds"), [("Start", 1), ("RunOutcome", 1), ("Start", 2)])
@pytest.mark.parametrize("lockstep", [False, True], ids=["free", "lockstep"])
def test_a_dead_rank_costs_its_block_only(tmp_path, victim, kind, folds, lockstep):
    def oracle():
        return keras_tuner.oracles.RandomSearchOracle("loss", max_trials=8, seed=1, max_retries_per_trial=1)

    held = None if lockstep else 3  # in lockstep no block is ahead of the others
    with pytest.warns(RuntimeWarning, match=f"rank {victim} on memory has died; its block gets no more"):
        tuners = struck(5, tmp_path, victim, kind, oracle, folds=folds, lockstep=lockstep, held=held)
    assert isinstance(tuners.pop(victim), InjectedFault)
    for tuner in tuners:
        assert [status for status, _, _ in found(tuner).values()] == ["COMPLETED"] * 8
    assert sorted(tuners[0].oracle._run_times.values()) == [1] * 7 + [2]


def test_a_trial_whose_rank_dies_has_failed_where_none_is_tried_again(tmp_path):
    with pytest.warns(RuntimeWarning, match="rank 1 on memory has died"):
        first, *_ = struck(5, tmp_path, 1, "RunOutcome")
    (failed,) = [one for one in first.oracle.trials.values() if one.status != "COMPLETED"]
    assert failed.status == "FAILED"
    assert failed.message == "rank 1 on memory, which trained it, has died (killed, crashed or out of memory)"


def test_the_last_block_ends_the_job_and_the_same_command_goes_on(tmp_path):
    goes_on = f"has died, and with it the last block. Rerun the same command to resume from {tmp_path}/p"
    with (
        pytest.warns(RuntimeWarning, match="Blocks left: 0"),
        pytest.raises(PeerLostError, match=re.escape(f"rank 2: on memory {goes_on}")),
    ):
        struck(3, tmp_path, 2, "RunOutcome")
    first, *_ = searched(3, tmp_path, block_size=2)
    assert sorted(status for status, _, _ in found(first).values()) == ["COMPLETED"] * 7 + ["FAILED"]


def test_a_rank_that_dies_when_all_is_done_is_not_missed(tmp_path):
    first, *_ = struck(3, tmp_path, 2, "End", left=1)
    assert [status for status, _, _ in found(first).values()] == ["COMPLETED"] * 8


@pytest.mark.parametrize("size", [1, 3])
def test_without_time_nothing_is_begun_and_the_same_command_goes_on(tmp_path, size):
    with pytest.warns(RuntimeWarning, match="no more trials begin: the longest took 0 s, and less time is"):
        tuners = searched(size, tmp_path, until=1e-9)
    assert [found(tuner) for tuner in tuners] == [{}] * size
    first, *_ = searched(size, tmp_path, until=3600)
    assert len(found(first)) == 8


@pytest.mark.filterwarnings("ignore:no more trials begin")  # where the other block has none just then
@pytest.mark.parametrize("size", [1, 5])
def test_what_runs_when_the_time_is_up_is_trained_again(tmp_path, size, monkeypatch):
    """It is up once the third trial has begun."""
    begun = threading.Event()
    monkeypatch.setitem(
        Coordinator.__init__.__kwdefaults__, "clock", lambda: time.time() + 7200 * begun.is_set()
    )

    def program(world):
        def value(hp):
            if hp.get("x") == 0:
                begun.set()
                if launched() is None:
                    EarlyEnd(Interrupts(), TimeLeft(end_s=0.0)).on_train_batch_begin(0)
                while True:  # until the search is over, which a rank hears where it takes part
                    launched().gather_text("")
            return hp.get("x") ** 2

        tuner = Formula(
            STOCK["grid"](),
            directory=tmp_path,
            project_name="p",
            world=world,
            value=value,
            block_size=2,
            until=3600,
        )
        tuner.search(verbose=0)
        return [one.status for one in tuner.oracle.trials.values()]

    with ranks(size) as cluster:
        states = cluster.run(program, timeout_s=60)
    assert "RUNNING" in states[0]
    begun.clear()
    first, *_ = searched(size, tmp_path, STOCK["grid"], block_size=2)
    assert [status for status, _, _ in found(first).values()] == ["COMPLETED"] * 15


def completed(coordinator, team, run):
    """What is answered when a team has trained a trial."""
    space = keras_tuner.HyperParameters()
    space.Float("x", -1, 1, step=0.5)
    result = {"reports": [[0, {"loss": 1.0}]], "hyperparameters": space.get_config()}
    assert coordinator.handle(team, Note(run, RESULT, result)) == []
    return coordinator.handle(team, Done(run, "complete", (0.0,)))


def test_what_was_complete_when_others_were_broken_off_counts(tmp_path):
    tuner = Formula(STOCK["random"](), directory=tmp_path, project_name="p")
    tuner.oracle.verbose = 0
    coordinator = Coordinator(OracleTrials(tuner), blocks=2)
    first, second = (post.message.run for post in coordinator.begin())
    assert len(coordinator.interrupt("the time is up")) == 2
    assert completed(coordinator, 0, first) == []
    ends = coordinator.handle(1, Done(second, "halted", error="broken off"))
    assert [(post.team, post.message.interrupted) for post in ends] == [
        (0, "the time is up"),
        (1, "the time is up"),
    ]
    assert [one.status for one in tuner.oracle.trials.values()] == ["COMPLETED", "RUNNING"]


def test_an_oracle_that_computes_is_asked_again_but_not_for_ever(tmp_path):
    class Computing(keras_tuner.oracles.RandomSearchOracle):
        patience = 3

        def populate_space(self, trial_id):
            self.patience -= 1
            return super().populate_space(trial_id) if self.patience == 0 else {"status": "IDLE"}

    tuner = Formula(Computing("loss", max_trials=2, seed=1), directory=tmp_path, project_name="p")
    tuner.oracle.verbose = 0
    coordinator = Coordinator(source := OracleTrials(tuner), blocks=1)
    assert [coordinator.begin(), coordinator.look()] == [[], []]
    (start,) = coordinator.look()
    posts = completed(coordinator, 0, start.message.run)
    while not coordinator.over:
        posts = coordinator.look()
    assert [type(post.message) for post in posts] == [End]
    assert "the oracle waits for a trial, but none is running" in str(source.failure)
    assert posts[0].message.trials[0]["failure"] == ["RuntimeError", str(source.failure)]


def test_a_trial_begins_if_the_longest_so_far_would_end_in_time(tmp_path):
    tuner = Formula(STOCK["random"](), directory=tmp_path, project_name="p")
    tuner.oracle.verbose = 0
    now_s = [0.0]
    coordinator = Coordinator(
        OracleTrials(tuner), blocks=1, time_left=TimeLeft(end_s=100.0), clock=lambda: now_s[0]
    )

    def trained(posts, seconds):
        now_s[0] += seconds
        (run,) = [post.message.run for post in posts]
        return completed(coordinator, 0, run)

    posts = trained(trained(coordinator.begin(), 30.0), 20.0)
    assert [type(post.message) for post in posts] == [Start]  # 50 + 30 <= 100
    with pytest.warns(RuntimeWarning, match="the longest took 40 s"):
        posts = trained(posts, 40.0)
    assert [type(post.message) for post in posts] == [End]
    assert coordinator.look() == []
    tuner.save()
    again = Formula(STOCK["random"](), directory=tmp_path, project_name="p")
    assert again.get_state() == tuner.get_state()


def test_without_its_first_rank_a_search_ends(tmp_path):
    problem = "rank 0: on memory has died; it coordinated the search. Rerun the same command to resume from "
    with pytest.raises(PeerLostError, match=problem):
        struck(5, tmp_path, 0, "Done")


def test_a_directory_that_another_job_has_is_refused_on_all_ranks(tmp_path, monkeypatch):
    def taken(folder, doing):
        raise ConfigurationError(f"another job is {doing} in {folder}")

    monkeypatch.setattr(nnlo_keras.tune._tuner, "hold", taken)

    def program(world):
        tuner = Formula(STOCK["grid"](), directory=tmp_path, project_name="p", world=world)
        with pytest.raises(ConfigurationError, match=r"another job is searching in .*p$"):
            tuner.search(verbose=0)

    with ranks(3) as cluster:
        cluster.run(program, timeout_s=60)
    assert not list(tmp_path.rglob("oracle.json"))


def test_half_a_file_is_refused_by_name(tmp_path):
    searched(1, tmp_path)
    oracle = tmp_path / "p" / "oracle.json"
    oracle.write_text(oracle.read_text()[:40])
    with pytest.raises(ConfigurationError, match=r"is not JSON.*overwrite=True"):
        Formula(STOCK["random"](), directory=tmp_path, project_name="p")


def test_folds_side_by_side_are_those_one_after_another(tmp_path):
    def program(block):
        def run(world):
            tuner = Folded(
                STOCK["random"](), directory=tmp_path / str(block), block_size=block, folds=2, world=world
            )
            tuner.search(np.arange(10.0), verbose=0)
            return tuner

        return run

    results = []
    for size, block in [(1, 1), (3, 2), (4, 3)]:
        with ranks(size) as cluster:
            first, *_ = cluster.run(program(block), timeout_s=60)
        metrics = {one.trial_id: one.metrics.get_config() for one in first.oracle.trials.values()}
        results.append(metrics)
    assert results[0] == results[1] == results[2]
    assert set(results[0]["0"]["metrics"]) == {"loss", "loss of fold 0", "loss of fold 1"}


@pytest.mark.parametrize(("fold", "kept"), [(None, True), (0, True), (1, False)])
def test_of_folds_side_by_side_the_first_only_writes_the_files_of_the_trial(fold, kept, tmp_path):
    def build(hp):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    tuner = MPITuner(build, "random", objective="loss", max_trials=1, folds=2, directory=tmp_path)
    tuner._fold = fold
    trial = tuner.oracle.create_trial("rank")
    tuner.run_trial(trial, np.ones((8, 1)), np.ones((8, 1)), verbose=0)
    written = {path.name for path in Path(tuner.get_trial_dir(trial.trial_id)).iterdir()}
    assert ({"build_config.json", "checkpoint.weights.h5"} <= written) is kept
    assert ("build_config.json" in written) is kept


class Folded(Formula):
    """Its trials add up what they train on."""

    run_trial = MPITuner.run_trial

    def __init__(self, *args, **options):
        MPITuner.__init__(self, lambda hp: None, *args, **options)

    def _executed(self, trial, fold, checkpoint, args, options):
        (x,), options = held_out(args, options, self._folds, fold, int(self.oracle.seed))
        return {"loss": float(x.sum() + trial.hyperparameters.Float("x", -1, 1, step=0.5))}


def test_what_cannot_be_is_refused_by_name(tmp_path):
    oracle = STOCK["random"]()
    for options, problem in [
        ({"oracle": "best"}, "'best' is not known"),
        ({"oracle": 3}, "oracle=3 is not an oracle"),
        ({"oracle": oracle, "seed": 0}, "MPITuner(seed=...) with an oracle"),
        ({"distribute": "down"}, "distribute='down' is not known: use 'agn'"),
        ({"block_size": 0}, "block_size"),
        ({"folds": 0}, "folds"),
        ({"until": "noon"}, "until='noon': give seconds"),
        ({"oracle": "tpe", "lockstep": True}, "MPITuner(lockstep=True) without seed="),
        ({"hypermodel": None}, "Received `hypermodel=None`: give MPITuner a function that builds"),
        ({"oracle": oracle, "tune_new_entries": False}, "MPITuner(tune_new_entries=...) with an oracle"),
    ]:
        with pytest.raises(ConfigurationError, match=re.escape(problem)):
            MPITuner(**({"hypermodel": lambda hp: None, "directory": tmp_path} | options))


def spaces(size, folder, **options):
    """The tuners of all ranks, whose build finds `x` and `y`, by a sampler's name."""

    class Found(Formula):
        def _declare_first(self, hp):
            hp.Float("x", -1, 1)
            hp.Int("y", 1, 9)

        _declare = _declare_first

    def program(world):
        tuner = Found("random", directory=folder, world=world, objective="loss", max_trials=4, **options)
        tuner.search(verbose=0)
        return tuner

    with ranks(size) as cluster:
        return cluster.run(program, timeout_s=60)


@pytest.mark.parametrize("size", [1, 3])
def test_a_given_space_is_searched_as_keras_tuner_does(tmp_path, size):
    given = keras_tuner.HyperParameters()
    given.Float("x", 0.25, 0.5)
    for tuner in spaces(size, tmp_path / "fixed", seed=1, hyperparameters=given, tune_new_entries=False):
        values = [found for _, found, _ in found(tuner).values()]
        assert len({one["x"] for one in values}) == 4
        assert all(0.25 <= one["x"] <= 0.5 for one in values)
        assert all(one.get("y", 1) == 1 for one in values), "a new entry was tuned"
    assert [one.name for one in given.space] == ["x"], "the given object has got entries of the search"
    for tuner in spaces(size, tmp_path / "open", seed=1, hyperparameters=given):
        assert len({one["y"] for _, one, _ in found(tuner).values()}) > 1


def test_entries_that_may_not_come_are_an_error(tmp_path):
    given = keras_tuner.HyperParameters()
    given.Float("x", 0.25, 0.5)
    with pytest.raises(RuntimeError, match="`allow_new_entries` is `False`"):
        spaces(1, tmp_path, hyperparameters=given, allow_new_entries=False)


def test_retries_of_a_sampler_are_those_of_its_oracle(tmp_path):
    tuner = Formula("random", objective="loss", directory=tmp_path, max_retries_per_trial=2)
    assert tuner.oracle.max_retries_per_trial == 2


def test_searches_that_begin_at_once_do_not_take_their_directory_from_each_other(tmp_path):
    first, *_ = searched(3, tmp_path, rounds=5, overwrite=True)
    assert len(found(first)) == 8


def test_ranks_without_the_directory_do_not_empty_it(tmp_path):
    """Else one that comes late would remove what the first has written by then."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "of the first rank").touch()

    def program(world):
        if world.rank:
            Formula(STOCK["random"](), directory=tmp_path, project_name="p", overwrite=True, world=world)

    with ranks(3) as cluster:
        cluster.run(program, timeout_s=60)
    assert (tmp_path / "p" / "of the first rank").exists()


@pytest.mark.parametrize(
    ("folds", "trained"),
    [([(range(3), range(3, 10))], 3.0), (((one, [9]) for one in ([0, 1], [2, 5])), 4.0)],
    ids=["one", "drawn"],
)
def test_folds_of_ones_own_are_those_that_train(folds, trained, tmp_path):
    tuner = Folded(STOCK["random"](), directory=tmp_path, folds=folds)
    tuner.search(np.arange(10.0), verbose=0)
    for trial in tuner.oracle.trials.values():
        assert trial.score - trial.hyperparameters.get("x") == trained


def test_ranks_that_do_not_make_blocks_are_refused_on_all_of_them(tmp_path):
    def program(world):
        tuner = Formula(STOCK["random"](), directory=tmp_path, block_size=3, world=world)
        with pytest.raises(ConfigurationError, match="4 ranks, which is not a multiple of block_size=3"):
            tuner.search()

    with ranks(5) as cluster:
        cluster.run(program, timeout_s=60)


def test_folds_of_ones_own_and_validation_split():
    x, y = np.arange(6), np.arange(6) * 10
    own = Folds([([0, 1], [2]), ([2], [0])])
    (a, b), options = held_out((x, y), {}, own, 1, 0)
    assert (a.tolist(), b.tolist()) == ([2], [20])
    assert [one.tolist() for one in options["validation_data"]] == [[0], [0]]
    (a,), options = held_out((x,), {"y": y, "validation_split": 0.5, "epochs": 3}, Folds(1), None, 0)
    assert (a.tolist(), options["y"].tolist(), options["epochs"]) == ([0, 1, 2], [0, 10, 20], 3)
    assert [one.tolist() for one in options["validation_data"]] == [[3, 4, 5], [30, 40, 50]]
    _, options = held_out((x,), {"sample_weight": y}, own, 0, 0)
    held, labels, weights = options["validation_data"]
    assert (held.tolist(), labels, weights.tolist()) == ([2], None, [20])
    with pytest.raises(ConfigurationError, match="folds= has no fold"):
        Folds([])
    with pytest.raises(ConfigurationError, match="folds=2 sets validation samples apart"):
        held_out((x, y), {"validation_data": (x, y)}, own, 0, 0)


@pytest.mark.parametrize("sampler", ["random", "evolutionary", "tpe"])
def test_samplers_fill_spaces_of_any_kind(tmp_path, sampler):
    class Wide(Formula):
        def _declare_first(self, hp):
            self._declare(hp)

        def _declare(self, hp):
            hp.Int("a", 1, 64, step=2, sampling="log")
            hp.Int("b", 1, 9, step=4)
            hp.Float("c", 1e-3, 1, sampling="reverse_log")
            hp.Float("d", 1e-3, 1, sampling="log")
            hp.Choice("e", ["u", "v"])
            hp.Choice("f", [1, 2, 4], ordered=True)
            hp.Fixed("g", 7)
            with hp.conditional_scope("e", ["u"]):
                hp.Float("h", 0, 1)
            with hp.conditional_scope("e", ["v"]):
                hp.Int("i", 5, 6)

    def searched_wide(name, max_trials):
        tuner = Wide(
            sampler,
            objective=keras_tuner.Objective("loss", "min"),
            max_trials=max_trials,
            seed=0,
            directory=tmp_path / name,
            value=lambda hp: hp.get("d") + (hp.get("e") == "u"),
        )
        tuner.search(verbose=0)
        return [one.hyperparameters.values for one in tuner.oracle.trials.values()]

    first = searched_wide("first", 12)
    assert first == searched_wide("second", 12)  # although the seed is 0
    assert len(first) == 12
    for values in first:
        assert values["a"] in {1, 2, 4, 8, 16, 32, 64}
        assert values["b"] in {1, 5, 9}
        assert 1e-3 <= values["c"] <= 1
        assert values["f"] in {1, 2, 4}
        assert values["g"] == 7
        assert 0 <= values["h"] <= 1 if values["e"] == "u" else values["i"] in {5, 6}
        assert ("h" in values) is (values["e"] == "u")
    longer = searched_wide("first", 16)
    assert longer[:12] == first
    assert len({json.dumps(values) for values in longer}) == 16


def test_a_small_space_is_used_up(tmp_path):
    class Small(Formula):
        def _declare_first(self, hp):
            hp.Choice("x", [0, 1, 2])

        def _declare(self, hp):
            self._declare_first(hp)

    tuner = Small("evolutionary", objective="loss", max_trials=50, seed=1, directory=tmp_path)
    with no_new_threads():
        tuner.search(verbose=0)
    assert sorted(one.hyperparameters.get("x") for one in tuner.oracle.trials.values()) == [0, 1, 2]
    assert threading.current_thread() is threading.main_thread()


def line(hp):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(hp.Float("rate", 1e-3, 1e-2)), "mse")
    return model


def test_a_subclass_prepares_the_data_of_each_execution_where_keras_tuner_has_it(tmp_path):
    class Preparing(MPITuner):
        def _build_and_fit_model(self, trial, x, *args, **options):
            history = super()._build_and_fit_model(trial, x, 2 * x, *args, **options)
            prepared.append((trial.trial_id, history.params["epochs"]))
            return history

    prepared = []
    oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=2, seed=1)
    tuner = Preparing(line, oracle, executions_per_trial=2, directory=tmp_path, project_name="p")
    tuner.search(np.ones((8, 1)), epochs=3, verbose=0)
    assert prepared == [("0", 3)] * 2 + [("1", 3)] * 2
    assert [one.status for one in tuner.oracle.trials.values()] == ["COMPLETED"] * 2


def test_a_subclass_that_fits_in_a_way_of_its_own_does_so_on_every_rank_of_a_block(tmp_path):
    class Own(MPITuner):
        def _build_and_fit_model(self, trial, *args, **options):
            fitted.append((trial.trial_id, self._world.rank, args, options["callbacks"][0].patience))
            return {"loss": trial.hyperparameters.get("rate")}

    def program(world):
        oracle = keras_tuner.oracles.RandomSearchOracle("loss", max_trials=3, seed=1)
        tuner = Own(line, oracle, block_size=2, world=world, directory=tmp_path, project_name="p")
        tuner.search("data", callbacks=[keras.callbacks.EarlyStopping(patience=7)], verbose=0)
        return found(tuner)

    fitted = []
    with ranks(3) as cluster:
        first, *others = cluster.run(program, timeout_s=60)
    assert sorted(fitted) == [(str(trial), rank, ("data",), 7) for trial in range(3) for rank in (1, 2)]
    assert [score for _, _, score in first.values()] == [values["rate"] for _, values, _ in first.values()]
    assert others == [first] * 2
