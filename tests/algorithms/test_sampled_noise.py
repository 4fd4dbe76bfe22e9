"""The noise scale of long vectors comes from a sample of their coordinates, and is that of all."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import SGD, Synchronous
from nnlo_common.algorithms import Contribution
from nnlo_common.algorithms._noise_scale import Coordinates, NeighbourNoise, NoiseScale

SIZE, WORKERS, BATCH = 600_000, 4, 32
SIGNAL, NOISE = 9.0 * SIZE, 16.0 * SIZE * BATCH  # of a gradient with mean 3 and standard deviation 4


def of_synchronous() -> NoiseScale:
    draw = np.random.default_rng(1)
    rule = Synchronous().center(np.zeros(SIZE, "f4"), WORKERS, SGD(0.0))
    for _ in range(10):
        gradients = 3 + 4 * draw.standard_normal((WORKERS, SIZE), np.float32)
        rule.commit([Contribution(rank, one, weight=BATCH) for rank, one in enumerate(gradients)])
    return rule.noise_scale


def of_neighbours() -> NoiseScale:
    draw, noise = np.random.default_rng(2), NeighbourNoise(SIZE)
    for turn in range(160):
        noise.see(turn % WORKERS, 3 + 4 * draw.standard_normal(SIZE, np.float32), BATCH)
    return noise.scale


@pytest.mark.parametrize("measure", [of_synchronous, of_neighbours])
def test_the_scale_is_that_of_all_coordinates(measure) -> None:
    scale = measure()
    assert scale.count == 10
    assert scale.signal == pytest.approx(SIGNAL, rel=0.05)
    assert scale.noise == pytest.approx(NOISE, rel=0.05)
    assert scale.value == pytest.approx(NOISE / SIGNAL, rel=0.05)


def test_a_worker_alone_costs_no_sample(monkeypatch) -> None:
    noise, taken = NeighbourNoise(SIZE), []
    of = Coordinates.of
    monkeypatch.setattr(Coordinates, "of", lambda self, vector: taken.append(vector[0]) or of(self, vector))
    one, two = np.ones(SIZE, "f4"), np.full(SIZE, 2, "f4")
    for _ in range(200):
        noise.see(1, one, BATCH)
    assert len(taken) < 5
    # A pair is of neighbours, also when the other has come back.
    noise.see(2, two, BATCH)
    noise.see(1, one, BATCH)
    assert taken[-2:] == [2, 1]
    assert noise.scale.signal == pytest.approx(SIZE * (2 * 1.5**2 - 2.5), rel=0.01)


def test_short_vectors_are_taken_whole() -> None:
    vector = np.arange(4096, dtype=np.float32)
    assert Coordinates(4096).of(vector).tolist() == vector.tolist()
    assert Coordinates(4096).mean_square([vector]) == float((vector.astype(np.float64) ** 2).sum())
    assert Coordinates(600_000).of(np.zeros(600_000, "f4")).size == 6000
