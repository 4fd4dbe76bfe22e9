"""The scripts here run unchanged plainly, wrapped in one process, and on 3 and 5 ranks, and learn as much."""

from __future__ import annotations

import json

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import ROOT

FOLDER = ROOT / "tests" / "clients"
OFFLINE = {"HF_HUB_OFFLINE": "1"}

# For each script the metric that must be reached on any number of ranks: at least, or at most.
AIMS = {
    "lightning_fit": ("accuracy", 0.95, None),
    "huggingface_bert": ("accuracy", 0.97, None),
    "accelerate_loop": ("accuracy", 0.95, None),
    "geometric": ("accuracy", 0.8, None),
    "torch_digits": ("accuracy", 0.74, None),
    "torch_vae": ("bound", None, 290.0),
    "torch_adversarial": ("off_ring", None, 0.6),
    "torch_actor": ("reward", 0.85, None),
    "torch_waves": ("loss", None, 0.05),
}
# Scripts whose loader has the same order of samples with and without nnlo.
SAME_ORDER = {"lightning_fit", "huggingface_bert"}


def last_line(run):
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.strip().splitlines()[-1])


def check(script, found):
    name, least, most = AIMS[script]
    assert least is None or found[name] >= least, found
    assert most is None or found[name] <= most, found


def test_every_script_has_an_aim():
    helpers = {"common", "lightning_ranks", "huggingface_ranks"}
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
@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [3, 5])
@pytest.mark.parametrize("script", AIMS)
def test_a_script_runs_on_several_ranks(script, ranks):
    run = mpiexec(ranks, FOLDER / f"{script}.py", env=OFFLINE, timeout_s=180)
    check(script, last_line(run))
    assert sum(line.startswith('{"') for line in run.stdout.splitlines()) == 1
