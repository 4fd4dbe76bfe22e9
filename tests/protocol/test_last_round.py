"""The last, shorter round of LocalSGD and DiLoCo: nothing that a worker has trained is lost at the end."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

import nnlo_torch as nt  # noqa: E402
from nnlo_common.testing import MemoryCluster  # noqa: E402

pytestmark = pytest.mark.framework("torch")

RATE = 0.5


def trained(wrap, steps, servers=1):
    """The centre at the end, where worker w pulls at w + 1 and makes `steps[w]` steps of one sample each."""

    def program(world):
        model = torch.nn.Linear(2, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=RATE), world=world, servers=servers)
        worker = optimizer.share[0]
        for _ in optimizer.epoch([torch.zeros(1)] * steps[max(worker, 0)]):
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = parameter.detach() - (worker + 1.0)
            optimizer.step()
        optimizer.close()
        return [float(parameter.detach().ravel()[0]) for parameter in model.parameters()]

    with MemoryCluster(servers + len(steps)) as cluster:
        return cluster.run(program)[0]


def pulled(start, target, steps):
    """A worker's coordinate after so many steps of `x <- x - RATE (x - target)`."""
    return target + (start - target) * (1 - RATE) ** steps


@pytest.mark.parametrize("servers", [1, 2])
def test_the_steps_since_the_last_round_are_averaged_by_their_number(servers):
    first = (pulled(0, 1, 3) + pulled(0, 2, 3)) / 2
    center = (2 * pulled(first, 1, 2) + 1 * pulled(first, 2, 1)) / 3
    found = trained(lambda sgd, **options: nt.LocalSGD(sgd, every=3, **options), [5, 4], servers)
    np.testing.assert_allclose(found, [center, center], rtol=1e-6)


def test_a_worker_without_such_steps_counts_for_nothing():
    first = (pulled(0, 1, 3) + pulled(0, 2, 3)) / 2
    found = trained(lambda sgd, **options: nt.LocalSGD(sgd, every=3, **options), [4, 3])
    np.testing.assert_allclose(found, [pulled(first, 1, 1)] * 2, rtol=1e-6)


def test_without_such_steps_there_is_no_last_round():
    """One would move the centre of DiLoCo by its momentum."""

    def wrap(sgd, **options):
        return nt.DiLoCo(sgd, every=3, outer_learning_rate=0.5, outer_momentum=0.5, **options)

    moved = (pulled(0, 1, 3) + pulled(0, 2, 3)) / 2
    np.testing.assert_allclose(trained(wrap, [3, 3]), [0.5 * (1 + 0.5) * moved] * 2, rtol=1e-6)
