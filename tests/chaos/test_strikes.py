"""Trainings of both frameworks in which a rank is killed: they go on, or end clearly, and never hang."""

import os
import re

import pytest

from tests.chaos.strikes import (
    FRAMEWORKS,
    LAUNCHER,
    Strike,
    judge,
    judge_resumed,
    run,
    strike_and_judge,
    strikes,
)
from tests.helpers.jobs import alone, running_mpi

pytestmark = [pytest.mark.mpi, pytest.mark.sampled(2)]
OPEN_MPI = running_mpi() == "Open MPI"
needs_ulfm = pytest.mark.skipif(not OPEN_MPI, reason="MPICH ends a job in which a rank dies")

INSTALLED = tuple(
    name for name in FRAMEWORKS if name in os.environ.get("NNLO_TEST_FRAMEWORKS", "").split(",")
)


@needs_ulfm
@pytest.mark.framework("torch")
@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(Strike("torch", "Synchronous", 1, 2, moment="part"), marks=pytest.mark.extended),
        Strike("torch", "EASGD", 2, 3, moment="part"),
    ],
    ids=lambda strike: strike.algorithm,
)
def test_a_training_goes_on_without_a_dead_worker(strike, tmp_path):
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    assert not outcome.late
    assert f"nnlo: rank {strike.victim} on " in outcome.text
    assert f"finished: ('rank {strike.victim} on " in outcome.text


@needs_ulfm
@pytest.mark.framework("torch")
def test_the_death_of_a_server_ends_the_job_with_the_checkpoint_that_the_same_command_goes_on_from(tmp_path):
    strike = Strike("torch", "Downpour", 2, 1, moment="part", turn=2)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "ended"
    newest = max((tmp_path / "run").glob("checkpoint-??????"))
    assert f"nnlo: rerun the same command to resume from {newest}\n" in outcome.text
    assert len(re.findall(r"nnlo: rank \d of 4 on \S+ failed", outcome.text)) == 1
    assert "/nnlo_" not in outcome.text  # the user can do nothing about our frames
    judge_resumed(strike, run(strike, tmp_path, kill=False), tmp_path)


@needs_ulfm
@pytest.mark.parametrize(
    ("framework", "algorithm"),
    [
        pytest.param("torch", "Downpour", marks=pytest.mark.framework("torch")),
        pytest.param("keras", "EASGD", marks=pytest.mark.framework("keras")),
    ],
)
def test_a_spare_takes_the_place_of_a_dead_server(framework, algorithm, tmp_path):
    """It dies within its part of a checkpoint; each sample of each epoch is trained on once, all the same."""
    strike = Strike(framework, algorithm, 1, 0, moment="part", turn=2, spares=1)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    assert not outcome.late
    assert re.search(
        r"rank 0 on \S+, the server, has died; rank 3 serves in its place, from a copy", outcome.text
    )
    assert "finished: ('rank 0 on " in outcome.text


@needs_ulfm
@pytest.mark.parametrize(
    ("framework", "algorithm"),
    [
        pytest.param("torch", "Downpour", marks=pytest.mark.framework("torch")),
        pytest.param("torch", "EASGD", marks=pytest.mark.framework("torch")),
        pytest.param("keras", "Downpour", marks=pytest.mark.framework("keras")),
    ],
)
def test_a_worker_takes_the_place_of_a_dead_server(framework, algorithm, tmp_path):
    """It trains no more; the others train on each sample of each epoch that it has not used."""
    strike = Strike(framework, algorithm, 1, 0, moment="part", turn=2, heir=True)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    assert not outcome.late
    words = r"rank 0 on \S+, the server, has died; rank 1 serves in its place and trains no more, from a copy"
    assert re.search(words, outcome.text)
    assert "finished: ('rank 0 on " in outcome.text


@needs_ulfm
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.framework("torch")
def test_one_spare_takes_the_place_of_either_of_two_servers(victim, tmp_path):
    strike = Strike("torch", "Downpour", 2, victim, moment="part", turn=2, spares=1)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    words = rf"rank {victim} on \S+, server {victim}, has died; rank 4 serves in its place"
    assert re.search(rf"{words}, from a copy of [\d.]+ s before", outcome.text)
    assert re.search(rf"finished: \('{words}", outcome.text)


@needs_ulfm
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.framework("torch")
def test_of_two_servers_each_has_a_worker_that_takes_its_place(victim, tmp_path):
    strike = Strike("torch", "Downpour", 2, victim, moment="part", turn=2, heir=True)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "finished"
    assert not outcome.late
    words = rf"rank {victim} on \S+, server {victim}, has died; rank {2 + victim} serves in its place"
    assert re.search(rf"{words} and trains no more, from a copy of [\d.]+ s before", outcome.text)
    assert re.search(rf"finished: \('{words}", outcome.text)


@pytest.mark.extended
@pytest.mark.framework("torch")
def test_a_job_whose_launcher_is_killed_leaves_no_process_and_resumes(tmp_path):
    strike = Strike("torch", "Downpour", 1, LAUNCHER, 0.8, ulfm=False)
    outcome = run(strike, tmp_path)
    assert judge(strike, outcome, tmp_path) == "ended"
    judge_resumed(strike, run(strike, tmp_path, kill=False), tmp_path)


@pytest.mark.extended
@pytest.mark.framework("torch")
def test_a_job_whose_server_is_killed_within_a_write_resumes_from_the_checkpoint_before(tmp_path):
    strike = Strike("torch", "Downpour", 1, 0, moment="manifest", turn=2, ulfm=False)
    assert strike_and_judge(strike, tmp_path).end == "ended and resumed"


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.skipif(len(INSTALLED) < 2, reason="torch and keras are not both in NNLO_TEST_FRAMEWORKS")
@pytest.mark.parametrize("strike", strikes(seed=6, count=100, ulfm=OPEN_MPI), ids=str)
def test_no_death_makes_a_job_hang_or_lose_samples(strike, tmp_path):
    strike_and_judge(strike, tmp_path).check_times()


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=pytest.mark.framework(name)) for name in FRAMEWORKS]
)
def test_nothing_grows_while_a_training_goes_on_and_on(framework):
    length = ("--seconds", "60", "--exchanges", "1000")
    outcome = alone("-m", "tests.chaos.soak", "--framework", framework, *length, timeout_s=300)
    print(outcome.stdout)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
