"""The elastic centre moves block by block; its numbers are those of the equations on whole vectors."""

from __future__ import annotations

import numpy as np
import pytest

from nnlo_common import EASGD
from nnlo_common.algorithms import Contribution


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("size", [5, 32_768, 70_007])
def test_the_bits_are_those_of_whole_vectors(size: int, workers: int) -> None:
    random = np.random.default_rng(7)
    center, *sent = random.normal(size=(workers + 1, size)).astype(np.float32)
    alpha = np.float32(0.3)
    elastic = [alpha * (x - center) for x in sent]
    expected = center.copy()
    for one in elastic:
        expected += one
    rule = EASGD(alpha=0.3, synchronous=True).center(center, workers, None)
    rule.commit([Contribution(rank, x) for rank, x in enumerate(sent, 1)])
    assert np.array_equal(rule.center, expected)
    assert all(np.array_equal(x, one) for x, one in zip(sent, elastic, strict=True))
