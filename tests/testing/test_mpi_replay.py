"""What real MPI computes, the virtual cluster computes again from the logged order, bit for bit."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nnlo_common.testing import Replay, RoundRobin, train_virtually
from tests.helpers.jobs import mpiexec
from tests.helpers.numpy_cases import CASES, LONG_CASES, gradient, initial
from tests.helpers.paths import PROGRAMS
from tests.helpers.shared_folders import written_once

#: Ranks, of which servers.
LAYOUTS = [
    pytest.param((n, servers), id=f"n{n}-servers{servers}", marks=pytest.mark.extended if long else ())
    for n, servers, long in [(2, 1, True), (3, 1, False), (5, 1, True), (3, 2, True), (5, 2, False)]
]


@pytest.fixture(scope="module", params=LAYOUTS)
def trained(request, tmp_path_factory):
    """One mpiexec that runs all cases; its ranks, its servers and the folder it wrote to."""
    ranks, servers = request.param

    def run(folder):
        done = mpiexec(ranks, PROGRAMS / "train_all.py", str(folder), str(servers), timeout_s=100)
        assert done.returncode == 0, done.stderr

    return ranks, servers, written_once(tmp_path_factory, f"trained-{ranks}-{servers}", run)


def again(case, ranks, servers, steps, schedule):
    """The same training in the virtual cluster."""
    counts = dict.fromkeys(range(ranks), 0)

    def counted(x, rank):
        counts[rank] += 1
        return gradient(x, rank, counts[rank] - 1)

    makes = case.optimizer
    at_center = case.algorithm.optimizer_runs == "center"
    return train_virtually(
        case.algorithm,
        counted,
        initial(long=case.long),
        workers=ranks - servers,
        servers=servers,
        steps=steps,
        optimizer=makes() if makes and at_center else None,
        local=makes if makes and not at_center else None,
        schedule=schedule,
    )


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *LONG_CASES])
def test_replay_gives_the_same_bits(trained, name):
    ranks, servers, folder = trained
    saved = [np.load(folder / f"{name}.rank{rank}.npz") for rank in range(ranks)]
    steps = [each["steps"].tolist() for each in saved[servers:]]
    logs = [folder / f"{name}.json", *(folder / f"{name}.json.shard{s}" for s in range(1, servers))]
    order = {log["shard"]: log["handled"] for log in (json.loads(path.read_text()) for path in logs)}
    case = {**CASES, **LONG_CASES}[name]
    run = again(case, ranks, servers, steps, Replay(order))
    assert run.trace == order
    for rank in range(servers):
        assert np.array_equal(saved[rank]["vector"], run.center), f"the centre on rank {rank}"
    for worker, each in zip(run.parameters, saved[servers:], strict=True):
        assert np.array_equal(each["vector"], worker)


@pytest.mark.mpi
@pytest.mark.slow
def test_the_orders_are_not_all_the_same(trained):
    """Otherwise the comparison above would prove little: with several workers the order is luck."""
    ranks, servers, folder = trained
    if ranks - servers == 1:
        return
    orders = [json.loads((folder / f"{name}.json").read_text())["handled"] for name in CASES]
    turns = again(CASES["downpour"], ranks, servers, 12, RoundRobin()).trace[0]
    assert any(order != turns for order in orders)
