"""Searches over blocks of ranks under a real mpiexec: 1 coordinator, 2 blocks of 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import mpiexec

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")
PROGRAM = Path(__file__).with_name("mpi") / "tune_all.py"
pytestmark = [pytest.mark.slow, pytest.mark.mpi, pytest.mark.framework("torch"), pytest.mark.timeout(120)]


def lines(*cases):
    done = mpiexec(5, PROGRAM, *cases, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_torch_trains_in_blocks_and_one_failed_rank_costs_one_trial_only():
    plain, pruned, *faulty = lines("plain", "pruned", "faults")
    assert plain.startswith("plain: ['COMPLETE', 'COMPLETE', 'COMPLETE', 'COMPLETE'")
    assert "PRUNED" in pruned
    assert len(faulty) == 4


@pytest.mark.extended
def test_sixty_trials_in_one_process_leave_nothing_behind():
    assert lines("many") == []
