"""Early stopping: what can be no threshold is refused when the detector is made."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nnlo_common import ConfigurationError, EarlyStopping, Target


@pytest.mark.parametrize("min_delta", [-1, math.nan, math.inf, "a", None, True])
def test_an_impossible_least_improvement_is_refused(min_delta):
    with pytest.raises(ConfigurationError, match=r"min_delta=.* must be a number of at least 0"):
        EarlyStopping(min_delta=min_delta)


@pytest.mark.parametrize("value", ["0.9", math.nan, True])
@pytest.mark.parametrize("side", ["above", "below"])
def test_a_target_that_no_metric_can_reach_is_refused(side, value):
    with pytest.raises(ConfigurationError, match=rf"{side}=.* must be a number"):
        Target(**{side: value})


def test_numbers_of_numpy_are_numbers():
    stopping = EarlyStopping(patience=1, min_delta=np.float32(0.5))
    assert [stopping(loss) for loss in (1.0, 0.4, 0.3)] == [False, False, True]
    assert Target(below=np.int64(1))(0.5)
