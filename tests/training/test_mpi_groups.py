"""Groups over real MPI: the same proofs as with threads as ranks."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.group_cases import GROUPED, SIZES, close, merged, train_grouped
from tests.helpers.jobs import mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.threads import on_ranks

pytestmark = [pytest.mark.mpi, pytest.mark.slow]

FEW = ("downpour", "easgd", "gem", "localsgd_lag")
REST = tuple(name for name in GROUPED if name not in FEW)


def trained(folder, size, servers, k, names):
    """Run these cases on `size` ranks; what each rank has saved, by case."""
    args = [str(folder), str(servers), str(k), *names]
    done = mpiexec(size, PROGRAMS / "groups_all.py", *args, timeout_s=100)
    assert done.returncode == 0, done.stderr
    return {name: [np.load(folder / f"{name}.rank{rank}.npz") for rank in range(size)] for name in names}


def check_members(found, servers, k):
    """All ranks of a group have the same bits and steps, and each sample is used once in an epoch."""
    for lead in range(servers, len(found), k):
        for rank in range(lead, lead + k):
            assert np.array_equal(found[rank]["vector"], found[lead]["vector"])
            assert found[rank]["steps"] == found[lead]["steps"] > 0
    counts = np.bincount(np.concatenate([one["seen"] for one in found]), minlength=sum(SIZES))
    assert (counts >= 2).all()  # epochs
    # Ranks for which no batch is left repeat the last one, without weight.
    assert counts.sum() == 2 * (sum(SIZES) + SIZES[-1] * (-len(SIZES) % k))


@pytest.mark.parametrize(
    ("servers", "k", "names"),
    [
        (1, 2, FEW),
        pytest.param(1, 2, REST, marks=pytest.mark.extended),
        pytest.param(2, 3, GROUPED, marks=pytest.mark.extended),
    ],
)
def test_one_group_is_one_rank_with_the_large_batch(servers, k, names, tmp_path):
    for name, found in trained(tmp_path, servers + k, servers, k, names).items():
        *_, expected = on_ranks(
            servers + 1,
            lambda world, name=name: train_grouped(name, merged(SIZES, k), world=world, servers=servers),
        )
        check_members(found, servers, k)
        assert all(close(one["vector"], expected[0]) for one in found[servers:]), name


@pytest.mark.parametrize(("k", "names"), [(2, FEW), pytest.param(3, GROUPED, marks=pytest.mark.extended)])
def test_without_a_server_a_group_is_one_process_with_the_large_batch(k, names, tmp_path):
    for name, found in trained(tmp_path, k, 0, k, names).items():
        expected, _, _ = train_grouped(name, merged(SIZES, k))
        check_members(found, 0, k)
        assert all(close(one["vector"], expected) for one in found), name


@pytest.mark.parametrize("names", [FEW, pytest.param(REST, marks=pytest.mark.extended)])
def test_members_stay_equal_bit_for_bit_on_five_ranks(names, tmp_path):
    for found in trained(tmp_path, 5, 1, 2, names).values():
        check_members(found, 1, 2)


@pytest.mark.extended
def test_the_death_of_its_first_rank_costs_a_group():
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    options = ["--with-ft", "ulfm"]
    done = mpiexec(5, PROGRAMS / "groups_death.py", "1", "3", timeout_s=60, options=options)
    assert done.returncode == 0, done.stderr
    assert "rank 4 ends, because rank 3 of its group has died" in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "server 0: 0 steps, 1 lost",
        "worker 0, member 1: 18 steps, 0 lost",
        "worker 0: 18 steps, 0 lost",
    ]


@pytest.mark.parametrize(
    ("size", "dying", "left"),
    [
        (3, (0, 2), ["lead"]),
        pytest.param(4, (3, 1), ["lead", "worker 0, member 2"], marks=pytest.mark.extended),
    ],
)
def test_without_a_server_the_ranks_that_are_left_go_on(size, dying, left):
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    options, words = ["--with-ft", "ulfm"], [*map(str, dying)]
    done = mpiexec(size, PROGRAMS / "groups_death.py", "0", *words, timeout_s=60, options=options)
    assert done.returncode == 0, done.stderr
    assert f"rank {dying[0]} on " in done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.split(":")[0] for line in lines] == left
    assert len({line.split(": ")[1] for line in lines}) == 1  # the same bits
    assert f": {72 // size} steps, 2 lost, " in lines[0]


def test_a_group_goes_on_without_another_rank():
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH ends the job")
    options = ["--with-ft", "ulfm"]
    done = mpiexec(5, PROGRAMS / "groups_death.py", "1", "4", timeout_s=60, options=options)
    assert done.returncode == 0, done.stderr
    assert "nnlo: rank 4 has died; the others of its group go on. Ranks left: 1" in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "server 0: 0 steps, 0 lost",
        "worker 0, member 1: 18 steps, 0 lost",
        "worker 0: 18 steps, 0 lost",
        "worker 1: 18 steps, 1 lost",
    ]
