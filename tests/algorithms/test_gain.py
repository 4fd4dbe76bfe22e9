"""The measured gain: the same numbers wherever it is computed."""

from __future__ import annotations

import numpy as np
import threadpoolctl

from nnlo_common.algorithms._gain import Gain


def test_the_gain_has_the_same_bits_for_any_number_of_threads_of_blas() -> None:
    def seen(threads: int) -> list[float]:
        draw, gain = np.random.default_rng(0), Gain(50_000, brake=1.5)
        with threadpoolctl.threadpool_limits(threads):
            for _ in range(6):
                sample = draw.standard_normal(gain.before.size).astype(np.float32)
                gain.see(sample, draw.random(sample.size), workers=4, batches=1)
        return [gain.dot, gain.square]

    assert seen(1) == seen(2)
