"""Learning rates of `nnlo train`: each schedule's closed form, and the laws for larger batches."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from nnlo_common.commands.train._option import Given
from nnlo_common.commands.train._run_plan import RunPlan
from nnlo_common.commands.train._settings import RatePlan, settings_of
from nnlo_common.testing import MemoryCluster
from nnlo_common.training import _scaling

FORMS = {
    "cosine": lambda epoch: (1 + math.cos(math.pi * epoch / 10)) / 2,
    "linear": lambda epoch: 1 - epoch / 10,
    "polynomial": lambda epoch: (1 - epoch / 10) ** 2,
    "step": lambda epoch: 0.1 ** (epoch // 3),
    "exponential": lambda epoch: 0.9**epoch,
    "inverse": lambda epoch: 1 / (1 + epoch),
    None: lambda epoch: 1.0,
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("warm_up", [None, 4])
def test_every_schedule_is_its_closed_form_after_the_warm_up(kind, warm_up):
    plan = RatePlan.of(kind, None, None, warm_up, 10 + (warm_up or 0))
    assert [plan.part(epoch) for epoch in range(10)] == pytest.approx([FORMS[kind](n) for n in range(10)])


def test_a_falling_rate_does_not_rise_after_its_end():
    for kind in ("cosine", "linear", "polynomial"):
        plan = RatePlan.of(kind, None, None, None, 10)
        assert plan.part(10) == plan.part(15) == pytest.approx(0)


def plan_of(**values):
    given = {"model": "net.json", "loss": "mse", "train": ("a.h5",), **values}
    settings = settings_of({name: Given(value) for name, value in given.items()})
    return RunPlan(settings=settings, loaded=SimpleNamespace(), data=SimpleNamespace())


@pytest.mark.parametrize(
    ("mode", "law", "servers", "scale"),
    [
        ("synchronous", "linear", 1, 4),  # of 5 ranks
        ("synchronous", "square_root", 1, 2),
        ("synchronous", "none", 1, 1),
        ("downpour", "linear", 1, 1),  # each worker steps by itself
        ("easgd", "linear", 0, 5),
    ],
)
def test_a_law_counts_the_ranks_that_share_a_step(monkeypatch, mode, law, servers, scale):
    here = threading.local()
    monkeypatch.setattr(_scaling, "launched", lambda: here.world)
    plan = plan_of(mode=mode, scale_rate=law, servers=servers, warm_up=2, epochs=5)

    def scaled(world):
        here.world = world
        return plan.rate_scale, plan.rates.start

    with MemoryCluster(5) as cluster:
        found = set(cluster.run(scaled))
    assert len(found) == 1
    assert found.pop() == pytest.approx((scale, 1 / scale if scale > 1 else 0.1))
