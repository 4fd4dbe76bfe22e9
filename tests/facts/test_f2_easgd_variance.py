"""F2: the stationary variance of EASGD on f = h x^2 / 2 with gradient noise of variance sigma^2 = 1.

The rules are linear there, so that the variance is the sum, over the sources of noise, of the squared
response to one unit of noise: no sampling. A run follows all sources at once, each in a coordinate of its
own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from nnlo_common import SGD
from nnlo_common.algorithms import EASGD, Algorithm, Downpour, Synchronous
from nnlo_common.testing import RoundRobin, train_virtually
from tests.helpers.centers import Matrix, elastic_period, stationary, watched_centers


def responses(
    algorithm: Algorithm, p: int, h: Sequence[float], *, periods: int = 400, tau: int = 1, **options: object
) -> tuple[Matrix, Matrix]:
    """Variance of c, after each turn of all workers, and of x_1, after each of its steps; for each h.

    The sources are the gradients of each worker in each step of the first period.
    """
    sources = p * tau
    slope = np.repeat(np.asarray(h, np.float32), sources)
    source = np.tile(np.arange(sources), len(h))
    steps: Counter[int] = Counter()
    first: list[Matrix] = []

    def gradient(x: Matrix, rank: int) -> Matrix:
        step = steps[rank]
        steps[rank] += 1
        return slope * x + (source == step * p + rank - 1)

    with watched_centers() as trail:
        run = train_virtually(
            algorithm,
            gradient,
            np.zeros(slope.size),
            workers=p,
            steps=tau * periods,
            observe=lambda worker, _: (
                first.append(worker.parameters.vector.astype(np.float64)) if worker.rank == 1 else None
            ),
            check=False,
            **options,
        )
    commits = len(trail) // periods  # of one turn: 1 if all workers commit together, otherwise p
    assert len(trail) == run.servers[0].rule.clock == commits * periods
    squares = [np.square(path).sum(0) for path in (trail[commits - 1 :: commits], first)]
    return tuple(each.reshape(len(h), sources).sum(1) for each in squares)


def elastic_responses(p: int, eta: float, h: Sequence[float], **options: object) -> tuple[Matrix, Matrix]:
    algorithm = EASGD(**options)
    return responses(algorithm, p, h, tau=algorithm.every, local=lambda: SGD(eta), schedule=RoundRobin())


def lemma(p: int, eta: float, beta: float, h: float) -> float:
    """Var c, synchronous, order of the paper: the lemma of arXiv:1412.6651, section 4."""
    alpha = beta / p
    a, c = eta * h + (p + 1) * alpha, eta * h * p * alpha
    g, f = (1 - (a - sign * np.emath.sqrt(a * a - 4 * c)) / 2 for sign in (1, -1))
    sums = g * g / (1 - g * g) + f * f / (1 - f * f) - 2 * g * f / (1 - g * f)
    return float(np.real((p * alpha * eta / (g - f)) ** 2 * sums / p))


def large_p(e: float, beta: float) -> float:
    """p Var c for p to infinity at a fixed beta, with sigma = h = 1."""
    return beta * e / ((2 - beta) * (2 - e)) * (2 - beta - e + beta * e) / (beta + e - beta * e)


@pytest.mark.parametrize(
    ("order", "center", "worker"),
    [("paper", 0.010455839691, 0.024501722220), ("step_first", 0.010652485580, 0.019166715770)],
)
def test_one_unit_of_noise_in_one_worker(order: str, center: float, worker: float) -> None:
    """The trick as it is: by symmetry p times the response to the noise of the first worker."""
    noisy = iter([1.0])
    parameters: list[float] = []
    with watched_centers() as trail:
        train_virtually(
            EASGD(every=1, beta=0.9, order=order, synchronous=True),
            lambda x, rank: x + (next(noisy, 0.0) if rank == 1 else 0.0),
            [0.0],
            workers=4,
            steps=400,
            local=lambda: SGD(0.1),
            observe=lambda each, step: parameters.append(float(each.parameters.vector[0])),
        )
    assert 4 * np.square(trail).sum() == pytest.approx(center, rel=1e-6)
    assert np.square(parameters).sum() == pytest.approx(worker, rel=1e-6)  # of all workers to one noise


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ["paper", "step_first"])
@pytest.mark.parametrize(
    ("p", "eta", "beta"),
    [(1, 0.3, 0.5), (1, 0.1, 0.9), (2, 0.5, 0.9), (3, 0.2, 1.2), (4, 0.1, 0.9), (8, 0.1, 0.9), (8, 0.7, 0.3)],
)
def test_synchronous_variance_solves_the_lyapunov_equation(
    p: int, eta: float, beta: float, order: str
) -> None:
    h = [0.5, 1.0, 2.0]
    centers, workers = elastic_responses(p, eta, h, every=1, alpha=beta / p, order=order, synchronous=True)
    for curvature, center, worker in zip(h, centers, workers, strict=True):
        exact = eta**2 * stationary(
            *elastic_period(p, eta * curvature, beta / p, order=order, synchronous=True)
        )
        assert center == pytest.approx(exact[0, 0], rel=2e-6)
        assert worker == pytest.approx(exact[1, 1], rel=2e-6)
        if order == "paper":
            assert exact[0, 0] == pytest.approx(lemma(p, eta, beta, curvature), rel=1e-10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", ["paper", "step_first"])
@pytest.mark.parametrize(
    ("p", "tau", "synchronous"), [(1, 3, False), (3, 1, False), (3, 4, False), (5, 2, False), (2, 4, True)]
)
def test_variance_right_after_the_exchange_in_turn_and_with_steps_in_between(
    p: int, tau: int, synchronous: bool, order: str
) -> None:
    """In turn the workers are not alike; with tau > 1 neither are the steps: all are sources."""
    eta, alpha, h = 0.2, 0.3, [0.5, 1.0, 2.0]
    centers, _ = elastic_responses(p, eta, h, every=tau, alpha=alpha, order=order, synchronous=synchronous)
    for curvature, center in zip(h, centers, strict=True):
        period = elastic_period(p, eta * curvature, alpha, tau=tau, order=order, synchronous=synchronous)
        assert center == pytest.approx(eta**2 * stationary(*period)[0, 0], rel=2e-6)


def test_exactly_one_third() -> None:
    (center,), _ = elastic_responses(1, 1.0, [1.0], every=1, alpha=0.5, order="paper")
    assert center == pytest.approx(1 / 3, rel=1e-7)


@pytest.mark.parametrize(("algorithm", "p"), [(Downpour(), 1), (Synchronous(), 1), (Synchronous(), 4)])
@pytest.mark.parametrize("eta", [0.1, 0.5])
def test_plain_sgd_for_comparison(algorithm: Algorithm, p: int, eta: float) -> None:
    h = [0.5, 1.0, 2.0]
    centers, _ = responses(algorithm, p, h, optimizer=SGD(eta))
    assert centers == pytest.approx([eta / (k * (2 - eta * k) * p) for k in h], rel=2e-6)


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("e", "beta", "limit"), [(0.1, 0.9, 0.051580), (0.5, 0.5, 0.185185), (0.3, 0.6, 0.134454)]
)
def test_many_workers(e: float, beta: float, limit: float) -> None:
    """p Var c = limit + O(1/p): two large p give the limit to O(1/p^2)."""
    scaled = {}
    for p in (32, 64):
        noisy = iter([1.0])
        with watched_centers() as trail:
            train_virtually(
                EASGD(every=1, alpha=beta / p, order="paper", synchronous=True),
                lambda x, rank, noisy=noisy: x + (next(noisy, 0.0) if rank == 1 else 0.0),
                [0.0],
                workers=p,
                steps=100,
                local=lambda: SGD(e),
                check=False,
            )
        scaled[p] = p * p * np.square(trail).sum()
        assert scaled[p] == pytest.approx(p * lemma(p, e, beta, 1.0), rel=1e-5)
    assert 2 * scaled[64] - scaled[32] == pytest.approx(large_p(e, beta), rel=1e-3)
    assert large_p(e, beta) == pytest.approx(limit, abs=5e-7)
