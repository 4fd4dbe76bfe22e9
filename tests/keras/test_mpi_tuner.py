"""Searches with Keras over blocks of ranks under a real mpiexec: 1 coordinator, 2 blocks of 2."""

from __future__ import annotations

import os

import pytest

from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no keras-tuner")
PROGRAM = PROGRAMS / "tune_keras.py"
pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.framework("keras")]
KERAS = {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch"), "TF_CPP_MIN_LOG_LEVEL": "3"}


def lines(*cases):
    done = mpiexec(5, PROGRAM, *cases, timeout_s=180, env=KERAS)
    assert done.returncode == 0, done.stderr
    kinds = ("study:", "grid,", "hyperband,", "evolutionary,")
    return [line for line in done.stdout.splitlines() if line.startswith(kinds)]


def test_keras_trains_in_blocks_and_one_failed_rank_costs_one_trial_only():
    study, grid = lines("study", "grid")
    states = study.removeprefix("study: ").split()
    assert states[2:4] == ["FAIL", "FAIL"]
    assert states.count("FAIL") == 2
    assert {"PRUNED", "COMPLETE"} <= set(states)
    assert "6 trials, ['COMPLETED', 'FAILED']" in grid


@pytest.mark.extended
def test_rounds_of_hyperband_go_on_from_their_checkpoints_and_folds_train_side_by_side():
    hyperband, *folds = lines("hyperband", "folds")
    assert "['COMPLETED']" in hyperband
    assert "6 trials" in folds[0]
    assert "'val_loss of fold 1'" in folds[0]
    assert "'val_loss of fold 2'" in folds[1]


@pytest.mark.extended
def test_trials_train_in_groups():
    grid, evolutionary, hyperband = lines("grouped")
    assert "6 trials, ['COMPLETED', 'FAILED']" in grid
    assert "6 trials, ['COMPLETED']" in evolutionary
    assert "['COMPLETED']" in hyperband


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("ranks", "times"),
    [
        (3, 4),
        pytest.param(3, 20, marks=pytest.mark.extended),
        pytest.param(5, 20, marks=pytest.mark.extended),
    ],
)
def test_searches_that_overwrite_each_other_all_end(ranks, times, tmp_path):
    program = PROGRAM.with_name("tune_overwrite.py")
    done = mpiexec(ranks, program, str(tmp_path), str(times), timeout_s=360, env=KERAS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("searched") == times


@pytest.mark.extended
@pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies")
def test_a_spare_takes_over_from_a_first_rank_that_is_killed():
    program = PROGRAM.with_name("tune_keras_takeover.py")
    done = mpiexec(4, program, timeout_s=180, options=["--with-ft", "ulfm"], env=KERAS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("which coordinated the search, has died; rank 3 on") == 1
    assert done.stdout.count("6 completed, owner 3\n") == 1
    assert done.stdout.count("6 completed, owner None\n") == 2


@pytest.mark.extended
@pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies")
def test_a_search_outlives_a_rank_that_is_killed():
    program = PROGRAM.with_name("tune_keras_deaths.py")
    done = mpiexec(5, program, timeout_s=180, options=["--with-ft", "ulfm"], env=KERAS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("has died; its block gets no more trials. Blocks left: 1") == 1
    assert done.stdout.count("5 completed in 6 tries\n") == 4
