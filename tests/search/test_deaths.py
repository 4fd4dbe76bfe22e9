"""Ranks that die in a search, with threads as ranks and under a real mpiexec."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import DyingMail, HeldMail, ranks

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
import optuna

from nnlo_common import SGD, Downpour, Participant, PeerLostError
from nnlo_common.search import optimize
from nnlo_common.search.coordinator._trial_results import ERROR, FAILURE
from nnlo_common.testing import InjectedFault

optuna.logging.set_verbosity(optuna.logging.ERROR)
PROGRAM = PROGRAMS / "tune_deaths.py"
ORPHANS = PROGRAM.with_name("tune_orphans.py")


def training(trial):
    with Participant(
        Downpour(), [np.ones(2, "f4")], optimizer=SGD(trial.suggest_float("lr", 0.01, 0.5))
    ) as me:
        for _ in me.batches(range(6)):
            me.gradients[0][:] = me.point[0]
            me.step()
    return float(me.parameters[0][0])


def searched(size, victim, kind, objective=training, *, held=None, **options):
    """The studies of all ranks, of which one dies; rank `held` begins no second trial before."""
    options = {"n_trials": 6, "block_size": 3, "sampler": "random"} | options
    died = threading.Event()

    def program(world):
        if world.rank == victim:
            world.mail = lambda: DyingMail(world, kind, died=died)
        elif world.rank == held:
            world.mail = lambda: HeldMail(world, "Start", died)
        return optimize(optuna.create_study(), objective, world=world, **options)

    with ranks(size) as cluster:
        return cluster.run(program, 180)


@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Start", "RunOutcome"])
def test_a_dead_rank_costs_its_block_only(victim, kind):
    studies = searched(7, victim, kind, held=4, n_trials=8, retries=1)
    assert isinstance(studies.pop(victim), InjectedFault)
    for study in studies:
        states = [trial.state.name for trial in study.trials]
        assert states.count("COMPLETE") == 8
        failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
        assert [trial.user_attrs[FAILURE] for trial in failed] == ["died"]
        assert f"rank {victim} on memory" in failed[0].user_attrs[ERROR]


@pytest.mark.parametrize(
    ("options", "said"),
    [({}, "starts anew; add journal=FILE to resume"), ({"journal": "x.jsonl"}, "to resume from the journal")],
)
def test_the_last_block_ends_the_job_and_says_what_goes_on(options, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PeerLostError, match=f"rank 2: on memory has died, and with it .*{said}"):
        searched(4, 2, "RunOutcome", **options)


def test_without_its_coordinator_every_rank_ends():
    with pytest.raises(PeerLostError, match="rank 0: on memory has died; it coordinated the search"):
        searched(7, 0, "Done")


@pytest.mark.parametrize(("victim", "kind"), [(0, "Done"), (2, "RunOutcome")])
def test_one_rank_only_tells_what_the_search_cannot_do_without(victim, kind):
    def program(world):
        if world.rank == victim:
            world.mail = lambda: DyingMail(world, kind)
        try:
            optimize(optuna.create_study(), training, n_trials=6, block_size=3, sampler="random", world=world)
        except PeerLostError as lost:
            return lost.said

    with ranks(7 if victim == 0 else 4) as cluster:
        said = cluster.run(program, 180)
    said.pop(victim)
    assert said.count(False) == 1
    assert set(said) == {True, False}


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.extended
def test_the_death_of_the_coordinator_is_told_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if running_mpi() == "MPICH":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    done = mpiexec(5, ORPHANS, timeout_s=60, options=["--with-ft", "ulfm"])
    assert done.returncode
    assert done.stderr.count("rank 0: on ") == 1
    assert done.stderr.count("has died; it coordinated the search. Rerun the same command to resume") == 1


@pytest.mark.slow
@pytest.mark.mpi
def test_a_search_outlives_a_rank_that_is_killed(tmp_path):
    if running_mpi() == "MPICH":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    done = mpiexec(5, PROGRAM, str(tmp_path), timeout_s=60, options=["--with-ft", "ulfm"])
    assert done.returncode == 0, done.stderr
    assert "rank 2 on" in done.stderr
    assert "has died; its block gets no more trials. Blocks left: 1" in done.stderr
    assert done.stdout.splitlines() == ["4 complete, 1 died"] * 4


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize("after_s", [0.0, pytest.param(1.0, marks=pytest.mark.extended)])
def test_a_spare_takes_over_from_a_coordinator_that_is_killed(after_s, tmp_path):
    if running_mpi() == "MPICH":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    program = PROGRAM.with_name("tune_takeover.py")
    options = ["--with-ft", "ulfm"]
    done = mpiexec(6, program, str(tmp_path), str(after_s), timeout_s=120, options=options)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("which coordinated the search, has died; rank 5 on") == 1
    assert done.stdout.splitlines() == ["60 ['COMPLETE']"] * 5
    assert sorted((tmp_path / "begun").read_text().split(), key=int) == [*map(str, range(60))]
    assert (tmp_path / "search.jsonl").read_text().count('"state": "COMPLETE"') == 60


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.mpi
def test_a_search_outlives_a_search_rank_that_is_killed(tmp_path):
    if running_mpi() == "MPICH":
        pytest.skip("MPICH's mpiexec ends the job when a rank dies")
    program = PROGRAM.with_name("tune_searchers.py")
    done = mpiexec(5, program, str(tmp_path), timeout_s=60, options=["--with-ft", "ulfm"])
    assert done.returncode == 0, done.stderr
    assert "search rank 2 on" in done.stderr
    assert "has died. Search ranks left: 1" in done.stderr
    assert done.stdout.splitlines() == ["30 complete"] * 4
