"""F14: the gradient noise scale is unbiased, and its ratio is taken last."""

from __future__ import annotations

import itertools
from math import isnan

import numpy as np
import pytest

from nnlo_common import EASGD, SGD, Downpour, DynSGD, NoiseScale, Steady, Synchronous
from nnlo_common.testing import train_virtually

POPULATIONS = [
    np.array([[1, 0], [0, 2], [3, 1]], float),
    np.array([[1, 1], [2, 0]], float),
    np.array([[4, -1, 0], [2, 2, 2], [0, 5, 1], [1, 1, 1]], float),
]


def observed(draws, batch=1):
    """The estimates from every draw of p gradients, with equal weight."""
    scale = NoiseScale(decay=1)
    for draw in draws:
        gradients = np.array(draw)
        small, large = (gradients**2).sum(1).mean(), (gradients.mean(0) ** 2).sum()
        scale.observe(small, large, batch=batch, workers=len(gradients))
    return scale


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("population", POPULATIONS, ids=len)
def test_over_all_draws_the_estimates_are_exact(population, workers):
    scale = observed(itertools.product(population, repeat=workers))
    mean = population.mean(0)
    assert scale.signal == pytest.approx(mean @ mean)
    assert scale.noise == pytest.approx(((population - mean) ** 2).sum(1).mean())
    assert scale.count == len(population) ** workers


def test_the_documents_numbers():
    scale = observed(itertools.product(POPULATIONS[0], repeat=2))
    assert (scale.signal, scale.noise) == (pytest.approx(25 / 9), pytest.approx(20 / 9))
    assert scale.value == pytest.approx(0.8)


@pytest.mark.parametrize(("workers", "batch"), [(2, 1), (3, 4), (8, 25)])
def test_the_noise_is_the_sample_variance(workers, batch):
    gradients = np.random.default_rng(workers).standard_normal((workers, 5))
    scale = observed([gradients], batch)
    deviations = ((gradients - gradients.mean(0)) ** 2).sum()
    assert scale.noise == pytest.approx(batch / (workers - 1) * deviations)


def test_the_running_average_forgets_and_starts_without_bias():
    scale = NoiseScale(decay=0.5)
    assert isnan(scale.value)
    values = []
    for small in (2.0, 4.0, 8.0):
        scale.observe(small, 1.0, batch=1, workers=2)  # noise 2 (small - 1)
        values.append(scale.noise)
    assert values == [2, 4, 9]


def test_a_synchronous_centre_measures_it_on_the_way():
    """Gradients with known noise: per coordinate mean 3, variance 4, at b=5 samples a batch."""
    draw = np.random.default_rng(7)
    size, batch = 400, 5.0

    def gradient(x, rank):
        return 3 + 2 / np.sqrt(batch) * draw.standard_normal(size)

    def weigh(worker, step):
        worker.set_weight(batch)

    run = train_virtually(
        Synchronous(), gradient, np.zeros(size), workers=4, steps=60, optimizer=SGD(0.0), observe=weigh
    )
    scale = run.servers[0].rule.noise_scale
    assert scale.count == 60
    # The very first step has the weight 1, so it counts as batches of one sample.
    assert scale.noise == pytest.approx(4 * size, rel=0.1)
    assert scale.signal == pytest.approx(9 * size, rel=0.02)
    assert scale.value == pytest.approx(4 / 9, rel=0.1)


@pytest.mark.parametrize("servers", [1, 2])
def test_shards_add_up(servers):
    arrays = [np.zeros(3, "f4"), np.zeros(4, "f4")]
    noise = {rank: np.random.default_rng(rank).standard_normal(7) for rank in range(9)}
    run = train_virtually(
        Synchronous(),
        lambda x, rank: noise[rank - servers],
        arrays,
        workers=3,
        servers=servers,
        steps=2,
        optimizer=SGD(0.1),
    )
    whole = observed([[noise[0], noise[1], noise[2]]])
    scales = [server.rule.noise_scale for server in run.servers]
    assert sum(scale.noise for scale in scales) == pytest.approx(whole.noise, rel=1e-5)
    assert sum(scale.signal for scale in scales) == pytest.approx(whole.signal, rel=1e-5)


def test_gradients_that_cannot_be_compared_are_left_out():
    """One contribution alone, or unequal batches, say nothing about the noise."""
    alone = train_virtually(Synchronous(), lambda x, r: x, [1.0], workers=1, steps=3, optimizer=SGD(0.1))
    assert alone.servers[0].rule.noise_scale.count == 0
    uneven = train_virtually(
        Synchronous(),
        lambda x, r: x,
        [1.0],
        workers=2,
        steps=3,
        optimizer=SGD(0.1),
        observe=lambda worker, step: worker.set_weight(worker.rank),
    )
    assert uneven.servers[0].rule.noise_scale.count == 1  # the first step, before the weights differ


@pytest.mark.parametrize(
    "algorithm", [Downpour(), Downpour(n_push=3, n_fetch=3), DynSGD(), Steady()], ids=repr
)
def test_a_centre_that_takes_gradients_one_by_one_measures_it_from_neighbours(algorithm):
    """The same noise: 4 / 9 of a sample's signal, whatever the number of steps in a contribution."""
    draw = np.random.default_rng(7)
    size, batch = 400, 5.0

    def gradient(x, rank):
        return 3 + 2 / np.sqrt(batch) * draw.standard_normal(size)

    def weigh(worker, step):
        worker.set_weight(batch)

    run = train_virtually(
        algorithm, gradient, np.zeros(size), workers=4, steps=600, optimizer=SGD(0.0), observe=weigh
    )
    found = run.servers[0].rule.noise_in_samples()
    assert found == pytest.approx(4 / 9, rel=0.1)


def test_one_worker_and_weights_show_no_noise():
    alone = train_virtually(Downpour(), lambda x, rank: x, [1.0], workers=1, steps=99, optimizer=SGD(0.0))
    elastic = train_virtually(EASGD(every=1), lambda x, rank: x, [1.0], workers=2, steps=99)
    for run in (alone, elastic):
        assert run.servers[0].rule.noise_in_samples() is None
