"""Groups over an endpoint, as trials of a search have them, beside plain sums and copies."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common.cluster.transport import _group_endpoints
from nnlo_common.cluster.transport._group_endpoints import EndpointGroup, group_links
from tests.helpers.threads import on_ranks


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch):
    monkeypatch.setattr(_group_endpoints, "PIECE", 7)


def numbers(rank, size):
    return np.random.default_rng([rank, size]).standard_normal(size).astype(np.float32)


def of(world):
    return EndpointGroup(world.open(group_links(world.rank, world.size)), world.rank, range(world.size))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_all_ranks_get_the_same_bits_as_plain_sums_and_copies(ranks):
    def program(world):
        group, found = of(world), []
        for size in (1, 6, 7, 20):
            vector = numbers(world.rank, size)
            group.add_up(vector)
            data = np.arange(size, dtype=np.uint8) + 100 * (world.rank == 0)
            moving = group.broadcast(data)
            assert moving.wait()
            values = np.array([world.rank, size / 3, np.nan])
            texts = group.gather_bytes(bytes(world.rank * size))
            found.append((vector, data, group.gather(values), [len(text) for text in texts]))
        group.close()
        return found

    everyone = on_ranks(ranks, program)
    for found in everyone:
        for (vector, data, rows, lengths), size in zip(found, (1, 6, 7, 20), strict=True):
            total = numbers(0, size)
            for rank in range(1, ranks):
                total += numbers(rank, size)
            assert np.array_equal(vector, total)
            assert np.array_equal(data, np.arange(size, dtype=np.uint8) + 100)
            assert np.array_equal(rows, [[rank, size / 3, np.nan] for rank in range(ranks)], equal_nan=True)
            assert lengths == [rank * size for rank in range(ranks)]


def test_a_broadcast_that_is_late_is_waited_for_again():
    def program(world):
        group, data = of(world), np.full(40, world.rank, np.uint8)
        if world.rank == 0:
            world.gather_text("")
            group.broadcast(data)
            return data
        moving = group.broadcast(data)
        assert not moving.wait(0.0)
        assert not moving.wait(1e-3)
        world.gather_text("")
        assert moving.wait()
        return data

    assert all(not data.any() for data in on_ranks(3, program))
