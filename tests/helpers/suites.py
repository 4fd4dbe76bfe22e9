"""Running another project's own tests, as the programs of `tests/suites` do, from a test of ours."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
from types import ModuleType

import pytest

from tests.helpers.paths import ROOT
from tests.suites.keras_own import NO_SOURCE

__all__ = ["passed_with_keras"]


def passed_with_keras(suite: ModuleType, *words: str) -> int:
    """Run a suite's program, on the back end of this process or torch; return how many tests have passed.

    Skip the test where the other project's tests cannot be had; fail it if a failure is not explained. The
    program limits the time of each of those tests. The test that waits for them all has no limit of its own,
    which would measure how busy the machine is: mark it with `timeout(0)`.
    """
    faulthandler.cancel_dump_traceback_later()  # pytest's `faulthandler_timeout` of the test that waits
    done = subprocess.run(
        [sys.executable, "-m", suite.__name__, *words],
        cwd=ROOT,
        env=os.environ | {"KERAS_BACKEND": os.environ.get("KERAS_BACKEND", "torch")},
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode == NO_SOURCE:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.partition(" passed")[0].split()[-1])
