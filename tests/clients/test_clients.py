"""The scripts here run unchanged plainly, wrapped in one process, and on 3 and 5 ranks, and learn as much."""

from __future__ import annotations

import pytest

from tests.clients.aims import AIMS, check, last_line
from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import ROOT

FOLDER = ROOT / "tests" / "clients"
OFFLINE = {"HF_HUB_OFFLINE": "1"}

# Scripts whose loader has the same order of samples with and without nnlo.
SAME_ORDER = {"lightning_fit", "huggingface_bert"}


def test_every_script_has_an_aim():
    helpers = {"aims", "common", "lightning_ranks", "huggingface_ranks"}
    scripts = {path.stem for path in FOLDER.glob("*.py")} - helpers - {"__init__"}
    others = ("test_", "keras_", "optuna_", "tuner_")
    assert {name for name in scripts if not name.startswith(others)} == set(AIMS)


@pytest.mark.slow
@pytest.mark.parametrize("script", AIMS)
def test_a_script_runs_plainly_and_wrapped_in_one_process(script):
    plain = last_line(alone(FOLDER / f"{script}.py", "plain", env=OFFLINE, timeout_s=110))
    wrapped = last_line(alone(FOLDER / f"{script}.py", env=OFFLINE, timeout_s=110))
    check(script, plain)
    check(script, wrapped)
    assert plain.keys() == wrapped.keys()
    if script in SAME_ORDER:
        assert plain == wrapped


@pytest.mark.mpi
@pytest.mark.extended
@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("script", AIMS)
def test_a_script_runs_on_several_ranks(script, ranks):
    run = mpiexec(ranks, FOLDER / f"{script}.py", env=OFFLINE, timeout_s=180)
    check(script, last_line(run))
    assert sum(line.startswith('{"') for line in run.stdout.splitlines()) == 1
