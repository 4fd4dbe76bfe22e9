"""nnlo_torch follows the equations of the papers, step by step: every wrapper, in many configurations."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

from tests.equations import torch_runs  # noqa: E402
from tests.equations.compared import Case, compare  # noqa: E402
from tests.equations.matrix import of_torch  # noqa: E402
from tests.equations.network import data_of, gradient, initial  # noqa: E402

pytestmark = pytest.mark.framework("torch")


@pytest.mark.parametrize("batch", data_of(0, 2), ids=len)
def test_the_gradient_is_that_of_torch(batch):
    assert np.abs(gradient(initial(), batch) - torch_runs.gradient(batch)).max() < 1e-7


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", [case for case in of_torch() if "wire" not in case.options], ids=str)
def test_training(case: Case):
    compare(case, torch_runs.run(case))


@pytest.mark.parametrize("case", [case for case in of_torch() if "wire" in case.options], ids=str)
def test_training_by_a_wire(case: Case):
    compare(case, torch_runs.run(case))
