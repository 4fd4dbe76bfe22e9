"""F6: what gradient energy matching keeps to at every commit, and what it does not promise."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray

from nnlo_common import SGD
from nnlo_common.algorithms import GEM, CenterRule, Contribution, Downpour
from nnlo_common.algorithms._gem import GEMCenter, GEMWorker
from nnlo_common.protocol import Kind
from nnlo_common.testing import Schedule, VirtualRun, train_virtually
from nnlo_common.testing._schedules import PendingRequest
from tests.helpers.centers import SCHEDULES, Matrix, watched_centers

Vector = NDArray[np.float32]

EPS = 2.0**-23
SLOPES = np.linspace(0.1, 2, 50, dtype=np.float32)


@contextmanager
def watched_commits() -> Iterator[list[Matrix]]:
    """Of every commit inside: c as pulled, s, m, d, and the update u, in float64."""
    seen: list[Matrix] = []
    commit = GEMWorker.commit

    def watched(self: GEMWorker, parameters: Vector, center: Vector) -> Vector:
        before = [center.copy(), self.stale.copy(), self.proxy.copy(), self._delta.copy()]
        update = commit(self, parameters, center)
        seen.append(np.array([*before, update], np.float64))
        return update

    with mock.patch.object(GEMWorker, "commit", watched):
        yield seen


def excesses(commits: Sequence[Matrix], kappa: float, pulled: Matrix | None = None) -> tuple[float, float]:
    """How far |u| and |c + u - s| exceed their bounds at worst, in units in the last place."""
    c, s, m, _, u = np.swapaxes(commits, 0, 1)
    c = c if pulled is None else pulled
    energy, moved = kappa * np.abs(m), np.abs(c - s)
    ulp = EPS * np.maximum(np.maximum(energy, moved), 1e-30)
    update = (np.abs(u) - np.maximum(0, energy - moved)) / ulp
    after = (np.abs(c + u - s) - np.maximum(energy, moved)) / ulp
    return float(update.max()), float(after.max())


def noisy(seed: int, size: int = 50, sigma: float = 0.3) -> Callable[[Vector, int], Vector]:
    draw = np.random.default_rng(seed).standard_normal
    slopes = np.resize(SLOPES, size)
    return lambda x, rank: slopes * x + np.float32(sigma) * draw(size, np.float32)


def gem(
    gradient: Callable[[Matrix, int], Matrix],
    start: Matrix,
    p: int,
    commits: int,
    *,
    learning_rate: float,
    momentum: float = 0.9,
    kappa: float = 1.0,
    clip: float | None = 5.0,
    primed: bool = True,
    gradient_at: str = "update",
    lag: int = 0,
) -> list[Matrix]:
    """GEM again, in float64 and with workers in turn: arXiv:1805.08469, algorithm 1 with equation 27."""
    c, path = start.astype(np.float64), []
    x, m = [c] * p, [0 * c] * p
    s = [c if primed else 0 * c] * p
    waiting = [deque([gradient(c, i) for _ in range(lag)]) for i in range(p)]
    for t in range(commits):
        i = t % p
        waiting[i].append(gradient(x[i], i))
        d = -learning_rate * waiting[i].popleft()
        m[i] = momentum * m[i] + d
        pi = (kappa * np.abs(m[i]) - np.abs(c - s[i])) / (np.abs(d) + 1e-16)
        u = (pi if clip is None else np.clip(pi, 0, clip)) * d
        s[i], c = c, c + u
        x[i] = c if gradient_at == "update" else s[i]
        path.append(c)
    return path


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kappa": 2.0},
        {"kappa": 0.5, "momentum": 0.5},
        {"momentum": 0.0},
        {"clip": 2.0, "kappa": 3.0},
        {"clip": None},
        {"primed": False},
        {"gradient_at": "center"},
        {"lag": 2},
    ],
    ids=str,
)
def test_it_runs_as_published(options: dict[str, object], p: int) -> None:
    start = np.linspace(1, 3, 9).astype(np.float32)

    def gradient(x: Matrix, rank: int) -> Matrix:
        return x / (1 + x * x)

    with watched_centers() as own:
        train_virtually(GEM(learning_rate=0.05, **options), gradient, start, workers=p, steps=-(-40 // p) + 2)
    expected = gem(gradient, start, p, 40, learning_rate=0.05, **options)
    np.testing.assert_allclose(own[:40], expected, rtol=0, atol=2e-5)
    assert np.abs(expected[-1] - start).max() > 0.1


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("kappa", [1.0, 2.0])
@pytest.mark.parametrize("p", range(1, 17))
def test_every_commit_keeps_its_bounds(p: int, kappa: float) -> None:
    """Without rounding nothing exceeds them; float32 may round by a few units in the last place."""
    schedule = sorted(SCHEDULES)[p % len(SCHEDULES)]
    with watched_commits() as commits:
        train_virtually(
            GEM(learning_rate=0.05, kappa=kappa),
            noisy(p),
            np.ones(50),
            workers=p,
            steps=-(-1000 // p),
            schedule=SCHEDULES[schedule](p),
        )
    assert len(commits) >= 1000
    update, after = excesses(commits, kappa)
    assert update <= 4
    assert after <= 4
    c, s, m, d, u = np.swapaxes(commits, 0, 1)
    assert (u * d >= 0).all()
    assert (np.abs(u) <= 5 * np.abs(d) * (1 + 4 * EPS)).all()
    # Each way to choose pi was taken often: the bound itself, the clip, and nothing at all.
    energy = kappa * np.abs(m) - np.abs(c - s)
    taken = [np.isclose(np.abs(u), energy, rtol=1e-4), np.abs(u) > 4.999 * np.abs(d), u == 0]
    assert all(np.mean(each) > 0.03 for each in taken)


def test_a_commit_that_came_between_pull_and_commit_would_be_seen() -> None:
    with watched_commits() as commits:
        train_virtually(
            GEM(learning_rate=0.05),
            noisy(1),
            np.ones(50),
            workers=4,
            steps=50,
            schedule=SCHEDULES["random"](1),
        )
    assert max(excesses(commits, 1.0)) <= 4
    _, after = excesses(commits[:-1], 1.0, pulled=np.array(commits)[1:, 0])
    assert after > 1e5


class Told:
    """Another schedule, and what it chose."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.chosen = schedule, []

    def choose(self, waiting: Sequence[PendingRequest]) -> PendingRequest | None:
        item = self.schedule.choose(waiting)
        self.chosen.append(item)
        return item


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("p", "servers"), [(2, 1), (5, 1), (4, 2)])
def test_pull_and_commit_are_one_transaction(p: int, servers: int, seed: int) -> None:
    applied: dict[int, list[Vector]] = defaultdict(list)
    apply = GEMCenter.apply

    def watched(self: CenterRule, contributions: Sequence[Contribution]) -> None:
        applied[self.center.size].append(self.center.copy())
        apply(self, contributions)

    told = Told(SCHEDULES["interleaved"](seed))
    pulled: dict[int, list[Matrix]] = defaultdict(list)
    commit = GEMWorker.commit

    def pulls(self: GEMWorker, parameters: Vector, center: Vector) -> Vector:
        pulled[center.size].append(center.copy())
        return commit(self, parameters, center)

    with mock.patch.object(GEMCenter, "apply", watched), mock.patch.object(GEMWorker, "commit", pulls):
        train_virtually(
            GEM(learning_rate=0.05),
            noisy(p, 50),
            [np.ones(20, np.float32), np.ones(30, np.float32)],
            workers=p,
            servers=servers,
            steps=40,
            schedule=told,
        )
    assert sum(map(len, applied.values())) == 40 * p * servers
    for size, centers in applied.items():
        assert np.array_equal(centers, pulled[size])  # bit for bit the centre that the commit was made for
    for shard in range(servers):
        assert queued_behind_the_lock([item for item in told.chosen if item.shard == shard]) > 20


def queued_behind_the_lock(chosen: Sequence[PendingRequest]) -> int:
    """How many had to wait for the lock, which must go round in the order in which it was asked for."""
    queue: deque[int] = deque()
    queued = 0
    for item in chosen:
        if item.kind is Kind.LOCK:
            queued += bool(queue)
            queue.append(item.worker)
        elif item.kind is Kind.COMMIT:
            assert item.worker == queue.popleft()
    assert not queue
    return queued


def constant_slope(steps: int, size: float = 1.0, **options: object) -> tuple[Matrix, VirtualRun]:
    """The rates pi of one worker on a constant gradient, of `size` after the learning rate."""
    with watched_commits() as commits:
        run = train_virtually(
            GEM(learning_rate=size, **options), lambda x, rank: -np.ones(1), [0.0], workers=1, steps=steps
        )
    _, _, _, d, u = np.swapaxes(commits, 0, 1)
    return (u / d).ravel(), run


@pytest.mark.parametrize("mu", [0.9, 0.7, 0.5, 0.0])
def test_one_worker_on_a_constant_slope_alternates_undamped(mu: float) -> None:
    """pi_t = M_t - pi_{t-1} with M_t = (1 - mu^t) / (1 - mu); the pi_t of momentum SGD would be M_t."""
    t = np.arange(1, 61)
    flip = (-1.0) ** t
    closed = ((1 - flip) / 2 - mu / (1 + mu) * (mu**t - flip)) / (1 - mu)
    rates, run = constant_slope(60, momentum=mu, clip=None)
    np.testing.assert_allclose(rates, closed, rtol=1e-4, atol=1e-5)
    assert run.center == pytest.approx(closed.sum(), rel=1e-6)
    assert rates[-2] - rates[-1] == pytest.approx(1 / (1 + mu), rel=5e-3)  # eigenvalue -1: it never settles


@pytest.mark.parametrize(
    ("options", "size", "first", "largest"),
    [
        ({}, 1.0, [1, 0.9, 1.81], 5),
        ({"kappa": 2.0}, 1.0, [2, 1.8, 3.62], 5),
        ({"kappa": 3.0, "momentum": 0.5}, 0.1, [3, 1.5, 3.75], 4),
        ({"kappa": 4.0}, 1.0, [4, 3.6, 5], 5),
        ({"kappa": 4.0, "clip": 3.0}, 1.0, [3, 3, 3], 3),
    ],
)
def test_it_alternates_until_the_clip(
    options: dict[str, float], size: float, first: list[float], largest: float
) -> None:
    rates, _ = constant_slope(40, size, **options)
    assert rates.max() == pytest.approx(largest, rel=1e-5)
    assert rates[:3] == pytest.approx(first, rel=1e-5)
    kappa, mu, clip = (options.get(*each) for each in (("kappa", 1.0), ("momentum", 0.9), ("clip", 5)))
    pi = 0.0
    for t, rate in enumerate(rates, start=1):
        pi = min(max(kappa * (1 - mu**t) / (1 - mu) - pi, 0), clip)
        assert rate == pytest.approx(pi, rel=1e-4, abs=1e-4), t


@pytest.mark.parametrize(
    ("primed", "rates"), [(True, [2, 1.8, 3.62]), (False, [0, 3.8, 1.62])], ids=["primed", "unprimed"]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_b11_an_unprimed_worker_loses_its_first_commit(primed: bool, rates: list[float], sign: int) -> None:
    """Where |w| >= kappa |m|: |w| = 1 takes all of 2 * 0.25, and the next two make up for it."""
    with watched_commits() as commits:
        train_virtually(
            GEM(learning_rate=0.25, kappa=2.0, primed=primed),
            lambda x, rank: -np.ones(1),
            [float(sign)],
            workers=1,
            steps=3,
        )
    assert [float(u[0] / d[0]) for _, _, _, d, u in commits] == pytest.approx(rates, rel=1e-5)


RATES = np.array([0.4, 0.6, 1.0, 1.5, 2.0, 2.5, 3.0], np.float32)


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize(("kappa", "largest"), [(1.0, 1.5), (2.0, 0.6), (4.0, 0.4)])
def test_where_it_converges_in_turn(p: int, kappa: float, largest: float) -> None:
    """On f = x^2 / 2; the learning rates stand side by side, as curvatures at a learning rate of 1."""
    with np.errstate(all="ignore"):
        ends = [
            train_virtually(
                GEM(learning_rate=1.0, kappa=kappa),
                lambda x, rank: RATES * x,
                np.ones(7),
                workers=p,
                steps=4000 // p,
                check=False,
            ).center,
            gem(lambda x, rank: RATES * x, np.ones(7), p, 4000, learning_rate=1.0, kappa=kappa)[-1],
        ]
        for end in ends:
            assert (np.abs(end) < 1e-12).tolist() == (largest >= RATES).tolist()
            assert (~(np.abs(end) < 1e3)).tolist() == (largest < RATES).tolist()


def heavy_ball(rates: Vector, p: int, *, momentum: float) -> Vector:
    """|x| after 800 commits of Downpour in turn, on f = x^2 / 2 at several learning rates side by side."""
    with np.errstate(all="ignore"):
        run = train_virtually(
            Downpour(),
            lambda x, rank: rates * x,
            np.ones(rates.size),
            workers=p,
            steps=800 // p,
            optimizer=SGD(1.0, momentum=momentum),
            check=False,
        )
        return np.abs(run.center)


@pytest.mark.parametrize(("p", "limit"), [(4, 0.445042), (8, 0.209057)])
def test_downpour_in_turn_diverges_at_all_of_these_rates_but_small_ones(p: int, limit: float) -> None:
    assert 2 * math.sin(math.pi / (2 * (2 * p - 1))) == pytest.approx(limit, abs=1e-6)
    rates = np.array([0.97 * limit, 0.6, 1.0, 1.5], np.float32)
    end = heavy_ball(rates, p, momentum=0.0)
    assert (end < 1).tolist() == [True, False, False, False]
    assert not (end[1:] < 1e5).any()


def test_its_proxy_converges_at_rates_at_which_it_diverges_itself() -> None:
    """Heavy ball is stable up to 2 (1 + mu) / h = 3.8: "stable whenever the proxy is" is no theorem."""
    rates = np.array([2.5, 3.0, 3.7, 3.9], np.float32)
    end = heavy_ball(rates, 1, momentum=0.9)
    assert (end < 1e-3).tolist() == [True, True, True, False]
    assert not end[3] < 1e3


@pytest.mark.slow
def test_noise_is_small_whatever_the_number_of_workers() -> None:
    """Mean square of the centre on 50 curvatures in [0.1, 2], 40 times each, once it is stationary."""
    h = np.random.default_rng(0).uniform(0.1, 2, 50)
    slopes = np.tile(h, 40).astype(np.float32)
    eta, mu, sigma, commits = 0.05, 0.9, 0.3, 2400

    def gradient(x: Matrix, rank: int) -> Matrix:
        return slopes * x + np.float32(sigma) * draw(slopes.size, np.float32)

    def mean_square(path: list[Matrix]) -> float:
        return float(np.square(path[commits // 3 :]).mean())

    own = {}
    for p, printed in ((1, 0.0109), (2, 0.0099), (4, 0.0089), (8, 0.0087)):
        draw = np.random.default_rng(p).standard_normal
        with watched_centers() as trail:
            train_virtually(
                GEM(learning_rate=eta), gradient, 0 * slopes, workers=p, steps=commits // p, check=False
            )
        own[p] = mean_square(trail)
        again = mean_square(gem(gradient, 0 * slopes, p, commits, learning_rate=eta))
        assert own[p] == pytest.approx(again, rel=0.04)
        assert own[p] == pytest.approx(printed, rel=0.06)  # which is one run of each curvature
    proxy = np.mean(eta * sigma**2 / h * (1 + mu) / ((1 - mu) * (2 * (1 + mu) - eta * h)))
    assert proxy == pytest.approx(0.0378, abs=5e-5)
    assert max(own.values()) < 1.4 * min(own.values())
    assert max(own.values()) < proxy / 3


@pytest.mark.parametrize(("eta", "mu"), [(0.05, 0.9), (0.5, 0.5), (1.0, 0.0), (0.2, 0.95)])
def test_the_variance_of_the_proxy(eta: float, mu: float) -> None:
    """Heavy ball's closed form, from the response to one unit of noise."""
    h = np.array([0.1, 0.5, 1.0, 1.9])
    pulse = iter([1.0])
    with watched_centers() as trail:
        train_virtually(
            Downpour(),
            lambda x, rank: h * x + next(pulse, 0.0),
            np.zeros(4),
            workers=1,
            steps=2500,
            optimizer=SGD(eta, momentum=mu),
            check=False,
        )
    closed = eta / h * (1 + mu) / ((1 - mu) * (2 * (1 + mu) - eta * h))
    assert np.square(trail).sum(0) == pytest.approx(closed, rel=2e-5)
