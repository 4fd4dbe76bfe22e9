"""Searches whose coordinator is killed, and others besides: no trial is lost or trained twice."""

from __future__ import annotations

import pytest

from tests.chaos.coordinator_strikes import CoordinatorStrike, coordinator_strikes, strike_coordinator
from tests.helpers.jobs import running_mpi

pytest.importorskip("optuna", reason="the environment for MPICH has no Optuna")

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.timeout(400),
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies"),
]


@pytest.mark.parametrize("strike", coordinator_strikes(seed=1, count=8), ids=str)
def test_no_death_of_a_coordinator_loses_a_trial(strike, tmp_path):
    strike_coordinator(strike, tmp_path).check_times()


def test_a_search_with_two_spares_ends_also_if_nobody_dies(tmp_path):
    strike_coordinator(CoordinatorStrike("nobody", "random", 2, {}), tmp_path)
