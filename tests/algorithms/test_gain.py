"""The measured gain: the same numbers wherever it is computed."""

from __future__ import annotations

import numpy as np
import threadpoolctl

from nnlo_common import Adam, Steady
from nnlo_common.algorithms._gain import Gain, sampled_places


def test_the_gain_has_the_same_bits_for_any_number_of_threads_of_blas() -> None:
    def seen(threads: int) -> list[float]:
        draw, gain = np.random.default_rng(0), Gain(50_000, brake=1.5)
        with threadpoolctl.threadpool_limits(threads):
            for _ in range(6):
                sample = draw.standard_normal(gain.before.size).astype(np.float32)
                gain.see(sample, draw.random(sample.size, np.float32), workers=4, batches=1)
        return [gain.dot, gain.square]

    assert seen(1) == seen(2)


def test_of_a_long_vector_a_coordinate_is_sampled_in_each_of_so_many_stretches() -> None:
    for size, count in ((100, 100), (5000, 4096), (1_000_000, 10_000), (30_000_000, 16_384)):
        places = sampled_places(size)
        ends = np.arange(count + 1) * size // count
        assert places.size == count
        assert (ends[:-1] <= places).all()
        assert (places < ends[1:]).all()


def test_the_gain_that_so_many_coordinates_give_is_as_exact_as_is_said() -> None:
    workers, count, found = 64, 4096, []
    mean = np.full(count, np.sqrt(1 / workers), np.float32)  # noise 1: as much signal as noise in the mean
    for seed in range(16):
        draw, gain = np.random.default_rng(seed), Gain(count, brake=0)
        for _ in range(4 * workers):
            sample = mean + draw.standard_normal(count, np.float32)
            _, scale = gain.see(sample, None, workers=workers, batches=1)
        found.append(workers * scale)
    off = np.array(found) / ((1 + 1 / workers) / (2 / workers)) - 1
    assert abs(off.mean()) < 0.03
    assert 0.01 < off.std() < np.sqrt(workers / (4 * count))


def test_the_gain_of_adam_in_a_group_is_the_same_for_gradients_of_any_size() -> None:
    def gains(size: float) -> list[float]:
        rule, x = Steady().group(300, Adam(1e-4)), np.zeros(300, np.float32)
        draw, found = np.random.default_rng(0), []
        for step in range(20):
            noise = draw.standard_normal((4, 300)) * (5.0 if step else 0.05)
            members = (size * (1 + noise)).astype(np.float32)
            squares, mean = [rule.norms.square(one) for one in members], members.mean(axis=0)
            rule.norms.take_mean(mean)
            before = rule.work[1]
            rule.step(x, mean, squares, 1.0)
            found.append(rule.work[1] - before)
        return found

    np.testing.assert_allclose(gains(1e3), gains(1.0), rtol=1e-3)
