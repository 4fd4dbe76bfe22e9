"""Two of the client scripts, which need PyTorch only, on 3 ranks; `make test-clients` runs them all."""

from __future__ import annotations

import pytest

from tests.clients.aims import check, last_line
from tests.helpers.jobs import mpiexec
from tests.helpers.paths import ROOT

pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")

pytestmark = [pytest.mark.framework("torch"), pytest.mark.mpi, pytest.mark.slow]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("script", ["torch_digits", "torch_waves"])
def test_a_client_script_learns_on_several_ranks(script):
    run = mpiexec(3, ROOT / "tests" / "clients" / f"{script}.py", timeout_s=100)
    check(script, last_line(run))
    assert sum(line.startswith('{"') for line in run.stdout.splitlines()) == 1
