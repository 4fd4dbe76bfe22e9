"""Trainings of both frameworks in which a rank is killed: they go on, or end clearly, and never hang."""

import os
from pathlib import Path

import pytest
from chaos.strikes import FRAMEWORKS, Strike, judge, run, strikes
from launch import running_mpi

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies"),
]

INSTALLED = tuple(
    name for name in FRAMEWORKS if name in os.environ.get("NNLO_TEST_FRAMEWORKS", "").split(",")
)


def strike_and_judge(strike: Strike, folder: Path) -> None:
    first = folder / "first"
    first.mkdir()
    if judge(strike, run(strike, first), first) == "ended":
        again = folder / "again"
        again.mkdir()
        assert run(strike, again, kill=False).status == 0


@pytest.mark.skipif("torch" not in INSTALLED, reason="torch is not in NNLO_TEST_FRAMEWORKS")
@pytest.mark.parametrize(
    "strike",
    [Strike("torch", "Synchronous", 1, 2, 0.8), Strike("torch", "EASGD", 2, 3, 0.5)],
    ids=lambda strike: strike.algorithm,
)
def test_a_training_goes_on_without_a_dead_worker(strike, tmp_path):
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    assert not outcome.late
    assert f"nnlo: rank {strike.victim} on " in outcome.text
    assert f"finished: ('rank {strike.victim} on " in outcome.text


@pytest.mark.skipif("torch" not in INSTALLED, reason="torch is not in NNLO_TEST_FRAMEWORKS")
def test_the_death_of_a_server_ends_the_job_with_a_line(tmp_path):
    strike = Strike("torch", "Downpour", 1, 0, 0.5)
    assert judge(strike, run(strike, tmp_path), tmp_path) == "ended"


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.skipif(len(INSTALLED) < 2, reason="torch and keras are not both in NNLO_TEST_FRAMEWORKS")
@pytest.mark.parametrize("strike", strikes(seed=6, count=100), ids=str)
def test_no_death_makes_a_job_hang_or_lose_samples(strike, tmp_path):
    strike_and_judge(strike, tmp_path)
