"""A rank that hears nothing from another: either that one is to be killed, or this host is cut off."""

from __future__ import annotations

import pytest

_mpi_world = pytest.importorskip("nnlo_common.cluster.transport._mpi_world")
from nnlo_common.cluster.transport._mpi4py import World  # noqa: E402

pytestmark = pytest.mark.mpi


class Elsewhere:
    """The processes of this host, on which no other rank is."""

    def kill(self, rank):
        return False

    def announce_end(self):
        pass


@pytest.mark.parametrize("answers", [True, False], ids=["reached", "cut off"])
def test_the_launcher_is_asked_to_kill_a_rank_where_it_answers(answers, monkeypatch):
    orders = []
    monkeypatch.setattr(_mpi_world, "answers_within", lambda limit_s: answers)
    monkeypatch.setattr(_mpi_world, "ask_to_kill", orders.append)
    monkeypatch.setattr(_mpi_world._FinalizeLimit, "has_dropped", False)
    world = _mpi_world.MPIWorld(World(), watches=False)
    world.survives_loss, world._host_peers = True, Elsewhere()
    monkeypatch.setattr(world.facts, "world_rank", lambda rank: 10 + rank)
    assert world.drop(2) is answers
    assert orders == [12] * answers
