"""What a gradient and a checkpoint pass does not grow unnoticed: each module on the way is to be read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.jobs import environment
from tests.helpers.paths import BENCHMARKS


@pytest.mark.framework("torch")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("journey", "most"), [("torch", 34), pytest.param("checkpoint", 52, marks=pytest.mark.extended)]
)
def test_a_journey_passes_few_modules(journey, most):
    pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "journeys.py"), journey],
        env=environment(None),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1].split()[0]) <= most, done.stdout
