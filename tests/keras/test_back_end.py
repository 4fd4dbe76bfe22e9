"""Keras whose back end is not installed: an error with the line to type instead of Keras' own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.framework("keras"), pytest.mark.slow]
#: A process in which only some back ends can be found.
SCRIPT = """
import importlib.util, sys
from importlib.machinery import PathFinder

class Hidden:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

HIDDEN = sys.argv[1:]
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in HIDDEN else find_spec(name, package)
sys.meta_path.insert(0, Hidden)
try:
    FIRST
    import nnlo_keras
except Exception as error:
    print(type(error).__name__, error)
"""
NONE = (
    "MissingExtraError Keras without any back end needs the package 'torch', which is not installed. "
    "Install it with: pip install 'nnlo[torch]'; then export KERAS_BACKEND=torch"
)
UNKNOWN = (
    "ConfigurationError KERAS_BACKEND=pytorch is no back end of Keras; choose one: export KERAS_BACKEND=torch"
)
LATE = (
    "RuntimeWarning: KERAS_BACKEND was set to jax after `import keras`, so Keras runs on torch; set it "
    "before the first import of keras: export KERAS_BACKEND=jax"
)
OTHER = (
    "ConfigurationError Keras is to run on {}, which is not installed; choose a back end that is: export {}"
)


@pytest.mark.parametrize(
    ("hidden", "back_end", "told"),
    [
        (["torch", "tensorflow", "jax"], None, NONE),
        pytest.param(
            *(["tensorflow", "jax"], None, OTHER.format("tensorflow", "KERAS_BACKEND=torch")),
            marks=pytest.mark.extended,
        ),
        pytest.param(
            *(["jax"], "jax", OTHER.format("jax", "KERAS_BACKEND=torch or tensorflow")),
            marks=pytest.mark.extended,
        ),
        (["tensorflow", "jax"], "pytorch", UNKNOWN),
        pytest.param(
            *(["tensorflow", "openvino"], "openvino", OTHER.format("openvino", "KERAS_BACKEND=torch or jax")),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_back_end_that_is_missing_is_named_with_the_line_to_type(hidden, back_end, told, tmp_path):
    assert imported(tmp_path, hidden, back_end).stdout.strip().endswith(told)


@pytest.mark.extended
def test_a_script_that_has_gone_on_without_keras_is_told_the_same(tmp_path):
    first = "import contextlib\n    with contextlib.suppress(ImportError):\n        import keras"
    said = imported(tmp_path, ["tensorflow", "jax"], None, first).stdout
    assert said.strip() == OTHER.format("tensorflow", "KERAS_BACKEND=torch")


def test_a_back_end_chosen_after_keras_was_imported_is_warned_of(tmp_path):
    """Keras has read the variable before, and runs on another."""
    first = "import os, keras\n    os.environ['KERAS_BACKEND'] = 'jax'"
    said = imported(tmp_path, [], "torch", first)
    assert said.stdout == ""
    assert said.stderr.count(LATE) == 1


def imported(tmp_path, hidden, back_end, first="pass"):
    """Import nnlo_keras in a process of its own, which prints the error."""
    pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    env |= {"KERAS_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {} if back_end is None else {"KERAS_BACKEND": back_end}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("FIRST", first), *hidden],
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
        check=True,
    )
