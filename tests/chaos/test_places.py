"""Trainings in which a worker is killed, and the second spare trains in its place from the next epoch on."""

from __future__ import annotations

import pytest

from tests.chaos.dying import Death
from tests.chaos.places import PlacesStrike, places_strikes, strike_places
from tests.helpers.jobs import running_mpi

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.framework("torch"),
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="MPICH ends a job in which a rank dies"),
    pytest.mark.sampled(2),
]


@pytest.mark.parametrize(
    ("algorithm", "assignment", "deaths", "servers"),
    [
        ("Synchronous", "static", (Death(2, "step", 1, 7),), 1),
        ("Downpour", "dynamic", (Death(3, "step", 1, 7), Death(1, "end", 4)), 2),
        pytest.param(
            *("EASGD", "static", (Death(1, "part", 0, 2), Death(0, "evaluation", 4)), 1),
            marks=pytest.mark.extended,
        ),
        ("Downpour", "dynamic", (Death(3, "step", 1, 7), Death(0, "end", 4)), 1),
    ],
    ids=lambda one: "; ".join(map(str, one)) if isinstance(one, tuple) else str(one),
)
def test_a_spare_trains_in_a_dead_workers_place(algorithm, assignment, deaths, servers, tmp_path):
    """Also if a server dies later, whose place the first spare takes."""
    strike = PlacesStrike("chosen", "torch", algorithm, assignment, deaths, servers)
    assert strike_places(strike, tmp_path).end == "place taken"


def test_a_server_that_dies_before_its_first_copy_ends_nnlo_train(tmp_path):
    """What fails on one rank ends the others, and the same command resumes."""
    strike = PlacesStrike("server", "train", "Downpour", "static", (Death(0, "time", 0, 1, 0.0),))
    assert strike_places(strike, tmp_path).end in ("ended and resumed", "went on")


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strike", [*places_strikes(1, 39), *places_strikes(1, 13, servers=2)], ids=str)
def test_no_death_keeps_a_place_free_or_loses_samples(strike, tmp_path):
    strike_places(strike, tmp_path).check_times()
