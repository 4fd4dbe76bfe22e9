"""Scripts of Keras, keras-tuner and Optuna like published ones: plain, wrapped, on 3 and 5 ranks."""

from __future__ import annotations

import json

import pytest

from tests.helpers.jobs import alone, mpiexec
from tests.helpers.paths import ROOT

pytest.importorskip("keras_tuner", reason="the environment for MPICH has no frameworks")

pytestmark = [pytest.mark.framework("keras"), pytest.mark.slow, pytest.mark.timeout(300)]
FOLDER = ROOT / "tests" / "clients"
# A lookup of strings needs TensorFlow on every back end, so all frameworks are in sight of these.
NEED_TENSORFLOW = {"keras_features", "keras_structured"}

# For each script the metric that must be reached, plain and on any number of ranks: at least, or at most.
AIMS = {
    "keras_convnet": ("accuracy", 0.85, None),
    "keras_features": ("accuracy", 0.85, None),
    "keras_gan": ("radius", 0.7, 1.3),
    "keras_structured": ("accuracy", 0.85, None),
    "keras_timeseries": ("mse", None, 0.1),
    "keras_transformer": ("accuracy", 0.85, None),
    "keras_vae": ("loss", None, 1.2),
    "optuna_keras": ("accuracy", 0.9, None),
    "optuna_torch": ("accuracy", 0.9, None),
    "tuner_hyperband": ("accuracy", 0.9, None),
    "tuner_run_trial": ("recall", 0.85, None),
}
KINDS = ("keras_", "optuna_", "tuner_")


def environment(script):
    found = {"KERAS_BACKEND": "torch", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return found | ({"PYTHONPATH": str(ROOT)} if script in NEED_TENSORFLOW else {})


def check(script, run):
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith('{"')]
    name, least, most = AIMS[script]
    found = json.loads(line)[name]
    assert least is None or found >= least, line
    assert most is None or found <= most, line


# Those that take the least run in `make test`, too, on 3 ranks.
LIGHTEST = {"keras_convnet", "keras_gan"}


def test_every_script_has_an_aim():
    assert {path.stem for path in FOLDER.glob("*.py") if path.name.startswith(KINDS)} == set(AIMS)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a search has its directory there


@pytest.mark.extended
@pytest.mark.parametrize("script", AIMS)
@pytest.mark.parametrize("words", [["plain"], []], ids=["plain", "wrapped"])
def test_a_script_learns_in_one_process(script, words):
    check(script, alone(FOLDER / f"{script}.py", *words, env=environment(script), timeout_s=200))


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("script", "ranks"),
    [
        pytest.param(one, ranks, marks=[] if one in LIGHTEST and ranks == 3 else pytest.mark.extended)
        for one in AIMS
        for ranks in (3, 5)
    ],
)
def test_a_script_learns_on_several_ranks(script, ranks):
    check(script, mpiexec(ranks, FOLDER / f"{script}.py", env=environment(script), timeout_s=250))
