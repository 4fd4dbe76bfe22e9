"""nnlo_keras follows the equations of the papers, step by step, on the back end that KERAS_BACKEND names."""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from tests.equations import keras_runs  # noqa: E402
from tests.equations.compared import Case, compare  # noqa: E402
from tests.equations.matrix import of_keras  # noqa: E402
from tests.equations.network import data_of, gradient, initial  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]


@pytest.mark.parametrize("batch", data_of(0, 2), ids=len)
def test_the_gradient_is_that_of_keras(batch):
    assert np.abs(gradient(initial(), batch) - keras_runs.gradient(batch)).max() < 1e-7


@pytest.mark.sampled(9)
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.extended if long else [], id=str(case))
        for case, long in of_keras(keras.backend.backend())
    ],
)
def test_training(case: Case):
    compare(case, keras_runs.run(case), keras=True)
