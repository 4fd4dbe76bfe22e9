"""F3: an elastic exchange moves mass between worker and centre and makes none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnlo_common.algorithms import EAMSGD, EASGD
from nnlo_common.testing import VirtualRun, train_virtually
from tests.helpers.centers import SCHEDULES, Matrix, watched_centers

VALUES = st.floats(-1e3, 1e3, width=32)


def still(x: Matrix, rank: int) -> Matrix:
    return 0 * x


def exchange_only(
    algorithm: EASGD, center: Sequence[float], begin: Sequence[object], steps: int, **options: object
) -> VirtualRun:
    return train_virtually(algorithm, still, center, workers=len(begin), begin=begin, steps=steps, **options)


def total(run: VirtualRun) -> Matrix:
    return run.center.astype(np.float64) + np.sum(run.parameters, axis=0, dtype=np.float64)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    values=st.lists(VALUES, min_size=2, max_size=7),
    alpha=st.floats(0.01, 0.99),
    steps=st.integers(1, 12),
    every=st.integers(1, 3),
    order=st.sampled_from(["paper", "step_first"]),
    synchronous=st.booleans(),
    lag=st.integers(0, 2),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    seed=st.integers(0, 999),
)
def test_every_exchange_keeps_the_total(
    values: list[float],
    alpha: float,
    steps: int,
    every: int,
    order: str,
    synchronous: bool,
    lag: int,
    schedule: str,
    seed: int,
) -> None:
    center, *begin = values
    workers = len(begin)
    if synchronous:
        alpha /= workers  # so that values do not grow: beta < 1
    # The centre moves from the start while a pipeline is filled: x - E may overshoot, but not far.
    algorithm = EASGD(every=every, alpha=alpha / (1 + lag), order=order, synchronous=synchronous, lag=lag)
    with watched_centers() as trail:
        run = exchange_only(algorithm, [center], begin, steps, schedule=SCHEDULES[schedule](seed))
    exchanges = workers * -(-steps // every) if order == "paper" else workers * (steps // every)
    assert len(trail) * (workers if synchronous else 1) == exchanges
    largest = max(np.abs(values).max(), *np.abs(trail).ravel(), *np.abs(run.parameters).ravel(), 1e-30)
    # Each exchange rounds twice, c + E and x - E, by half a unit in the last place; c may pass beyond.
    assert abs(total(run)[0] - sum(values)) <= exchanges * 2 * np.spacing(np.float32(largest))


@pytest.mark.parametrize("order", ["paper", "step_first"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_keeps_the_total_after_each_single_exchange(schedule: str, order: str) -> None:
    rng = np.random.default_rng(5)
    center, *begin = rng.uniform(-8, 8, (5, 40)).astype(np.float32)
    state = np.array([center, *begin], np.float64)
    exact = state.sum(0)
    drifts: list[float] = []

    def compare(worker: object, step: int) -> None:
        state[0], state[worker.rank] = trail[-1], worker.parameters.vector
        drifts.append(float(np.abs(state.sum(0) - exact).max()))

    with watched_centers() as trail:
        exchange_only(
            EASGD(every=1, alpha=0.3, order=order),
            center,
            begin,
            25,
            schedule=SCHEDULES[schedule](3),
            observe=compare,
        )
    assert len(drifts) == len(trail) == 100
    ulp = float(np.spacing(np.float32(8)))
    assert all(drift <= count * ulp for count, drift in enumerate(drifts, start=1))
    assert np.ptp(state, axis=0).max() < 0.2  # of at most 16: there was something to keep


@pytest.mark.sampled(5)
@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("alpha", [0.1, 0.3])
@pytest.mark.parametrize(
    ("center", "begin", "mean"),
    [(0.0, [1, 2, 4], 1.75), (3.0, [3.5], 3.25), (-5.0, [7, 0], 2 / 3), (1.0, [-1, 2, -3, 0.5], -0.1)],
)
def test_all_meet_at_the_mean(
    center: float, begin: list[float], mean: float, alpha: float, schedule: str, synchronous: bool
) -> None:
    algorithm = EASGD(every=1, alpha=alpha, synchronous=synchronous)
    run = exchange_only(
        algorithm, [center], [[x] for x in begin], 400, schedule=SCHEDULES[schedule](3), check=False
    )
    for end in (run.center, *run.parameters):
        assert end == pytest.approx(mean, abs=2e-5)


def test_the_centers_of_several_servers_keep_theirs() -> None:
    rng = np.random.default_rng(2)
    begin = rng.standard_normal((3, 9)).astype(np.float32)
    run = exchange_only(
        EASGD(every=1, alpha=0.4),
        [np.ones(4, np.float32), np.zeros((1, 5), np.float32)],
        begin,
        60,
        servers=2,
        schedule=SCHEDULES["interleaved"](7),
    )
    meeting = (np.repeat([1.0, 0.0], [4, 5]) + begin.sum(0)) / 4
    np.testing.assert_allclose([run.center, *run.parameters], [meeting] * 4, atol=1e-5)


def test_eamsgd_exchanges_alike_and_keeps_its_velocity_out_of_it() -> None:
    run = exchange_only(
        EAMSGD(every=1, alpha=0.2, learning_rate=0.1), [0.0], [[1.0], [2.0], [4.0]], 300, check=False
    )
    for end in (run.center, *run.parameters):
        assert end == pytest.approx(1.75, abs=1e-5)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_b1_a_synchronous_center_stays_where_its_workers_are(p: int) -> None:
    """Weights summed, not averaged, sent it through 1, 1.675, 2.198, 2.740, 3.372 with four workers."""
    with watched_centers() as trail:
        run = exchange_only(EASGD(every=1, synchronous=True), [1.0], [[1.0]] * p, 5)
    assert np.ravel(trail).tolist() == [1.0] * 5
    assert np.ravel(run.parameters).tolist() == [1.0] * p


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("order", ["paper", "step_first"])
def test_b9_a_single_worker_is_pulled_towards_the_old_center(order: str, synchronous: bool) -> None:
    """Towards the new one, from c=0 and x=1 with alpha=0.9, it ended at 0.91 (c=0.9), making mass."""
    algorithm = EASGD(every=1, beta=0.9, order=order, synchronous=synchronous)
    run = exchange_only(algorithm, [0.0], [[1.0]], 1)
    assert run.center[0] == np.float32(0.9)
    assert run.parameters[0][0] == np.float32(1) - np.float32(0.9)
