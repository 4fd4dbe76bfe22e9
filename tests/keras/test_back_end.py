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
    import nnlo_keras
except Exception as error:
    print(type(error).__name__, error)
"""
NONE = (
    "MissingExtraError Keras without any back end needs the package 'torch', which is not installed. "
    "Install it with: pip install 'nnlo[torch]'; then export KERAS_BACKEND=torch"
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
    ],
)
def test_a_back_end_that_is_missing_is_named_with_the_line_to_type(hidden, back_end, told, tmp_path):
    pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
    env = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    env |= {"KERAS_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env |= {} if back_end is None else {"KERAS_BACKEND": back_end}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *hidden],
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
        check=True,
    )
    assert done.stdout.strip().endswith(told)
