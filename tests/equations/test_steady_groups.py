"""Steady without servers follows AdaScale's equations in every step, whatever the ranks' batches."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from tests.equations import simulation, torch_runs  # noqa: E402
from tests.equations.compared import TOLERANCE_OF_ADAM, optimizer_of  # noqa: E402
from tests.equations.network import BATCH, data_of, gradient, initial  # noqa: E402
from tests.equations.parts import Request  # noqa: E402

pytestmark = pytest.mark.framework("torch")

RANKS, STEPS = 3, 17


def batches_of(rank):
    """The batches of a rank; the last of one rank is smaller than those of the others."""
    return data_of(rank, STEPS, learnable=True)


def simulated(name, *, clip):
    """Return the parameters after each step."""
    rule = simulation.Steady(optimizer_of(name, hat=False), RANKS, synchronous=True)
    c, found = initial().astype(np.float64), []
    for one in zip(*map(batches_of, range(RANKS)), strict=True):
        own = [gradient(c, batch) for batch in one]
        factor = 1.0
        if clip:  # of the mean, as a loop does between backward() and step()
            weights = [len(batch) for batch in one]
            mean = sum(g * w for g, w in zip(own, weights, strict=True)) / sum(weights)
            factor = min(1.0, clip / (np.linalg.norm(mean) + 1e-6))
        requests = [
            Request("EXCHANGE", factor * g, weight=len(batch)) for g, batch in zip(own, one, strict=True)
        ]
        g, gain = rule.together(requests, measured_first=True)
        c, _ = rule.paced(c, g, 1, gain)
        found.append(c)
    return found


@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", ["momentum", "sgd", "nesterov", "adam"])
def test_every_rank_has_the_parameters_of_the_equations_after_every_step(name, clip):
    def program(world):
        torch.set_num_threads(1)
        model = torch_runs.Network()
        optimizer = nt.Steady(
            torch_runs.optimizer_of(name, model), model=model, world=world, servers=0, passes="fixed"
        )
        seen = []
        for batch in optimizer.epoch([torch_runs.tensors(one) for one in batches_of(world.rank)]):
            optimizer.zero_grad()
            torch_runs.loss_of(model, batch).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            seen.append(model.weights())
        optimizer.close()
        return seen

    with MemoryCluster(RANKS) as cluster:
        ranks = cluster.run(program, timeout_s=60)
    assert {len(batches_of(rank)[-1]) for rank in range(RANKS)} == {BATCH - 1, BATCH - 3}
    for seen in ranks:
        for step, (one, other) in enumerate(zip(seen, simulated(name, clip=clip), strict=True)):
            assert np.abs(one - other).max() < TOLERANCE_OF_ADAM, step


def simulated_with_server(name):
    """One group of all ranks beside a server: the gain from the mean gradients of neighbouring steps."""
    rule = simulation.Steady(optimizer_of(name, hat=False), 1, memory=2.0, brake=0)
    c, found = initial().astype(np.float64), []
    for one in zip(*map(batches_of, range(RANKS)), strict=True):
        weights = [len(batch) for batch in one]
        own = [gradient(c, batch) for batch in one]
        mean = sum(g * w for g, w in zip(own, weights, strict=True)) / sum(weights)
        rule.largest = max(rule.largest, sum(weights))
        g, scale = rule.scaled(mean, 1, RANKS * sum(weights) / rule.largest)
        c, _ = rule.paced(c, g, 1, scale)
        found.append((c, scale))
    return found


@pytest.mark.parametrize("name", ["momentum", "sgd", "nesterov", "adam"])
def test_a_group_with_a_server_measures_its_gain_from_neighbouring_steps(name):
    def program(world):
        torch.set_num_threads(1)
        model = torch_runs.Network()
        plain = torch_runs.optimizer_of(name, model)
        optimizer = nt.Steady(plain, model=model, world=world, group_size=RANKS, passes="fixed")
        batches = [] if optimizer.serves else map(torch_runs.tensors, batches_of(optimizer.share[0]))
        seen = []
        for batch in optimizer.epoch(list(batches)):
            optimizer.zero_grad()
            torch_runs.loss_of(model, batch).backward()
            optimizer.step()
            seen.append(model.weights())
        optimizer.close()
        return seen, optimizer.report().progress

    with MemoryCluster(RANKS + 1) as cluster:
        (_, progress), *ranks = cluster.run(program, timeout_s=60)
    expected = simulated_with_server(name)
    assert max(scale for _, scale in expected) > 1.1  # else nothing is scaled
    for seen, _ in ranks:
        for step, (one, (other, _)) in enumerate(zip(seen, expected, strict=True)):
            assert np.abs(one - other).max() < TOLERANCE_OF_ADAM, step
    assert progress is not None
    assert progress > STEPS * BATCH
