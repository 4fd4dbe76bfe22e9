"""Seeds of a training in Keras: those of Keras itself, without a TensorFlow that nothing uses."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS, ROOT

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from nnlo_common.plugin import seed_random  # noqa: E402
from nnlo_keras._compat import seed_generators  # noqa: E402

pytestmark = [
    pytest.mark.framework("keras"),
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*google._upb.*:DeprecationWarning"),
]
BACKEND = keras.backend.backend()


def drawn():
    """Numbers from every generator that a training draws from."""
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    noise = keras.random.normal((2,))
    initial, noise = (keras.ops.convert_to_numpy(one).ravel().tolist() for one in (layer.kernel, noise))
    return [*initial, *noise, random.random(), np.random.random()]  # noqa: NPY002


@pytest.fixture
def without_tensorflow(monkeypatch):
    """Only TensorFlow itself as the back end is loaded; another's `set_random_seed` must not be called."""
    if BACKEND != "tensorflow":
        monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
        monkeypatch.setattr(keras.utils, "set_random_seed", None)


def test_numbers_repeat_with_their_seed(without_tensorflow):
    found = []
    for number in (3, 3, 4):
        seed_generators(number)
        found.append(drawn())
    assert found[0] == found[1]
    assert not set(found[1]) & set(found[2])


def test_numbers_are_those_of_a_seed_set_by_keras(request):
    keras.utils.clear_session()  # an old Keras sets the seed of no generator that layers already have
    keras.utils.set_random_seed(3)
    expected = drawn()
    request.getfixturevalue("without_tensorflow")
    seed_generators(3)
    assert drawn() == expected


def test_a_loaded_tensorflow_is_seeded(monkeypatch):
    seeded = []
    monkeypatch.setitem(sys.modules, "tensorflow", keras)
    monkeypatch.setattr(keras.utils, "set_random_seed", seeded.append)
    seed_generators(5)
    assert seeded == [5]


def test_layers_are_seeded_beside_a_loaded_tensorflow(monkeypatch):
    """`set_random_seed` of an old Keras leaves the generator of layers as it is."""
    if BACKEND != "tensorflow":
        monkeypatch.setitem(sys.modules, "tensorflow", keras)
    monkeypatch.setattr(keras.utils, "set_random_seed", seed_random)
    found = []
    for _ in range(2):
        seed_generators(5)
        found.append(keras.ops.convert_to_numpy(keras.random.normal((2,))).tolist())
    assert found[0] == found[1]


@pytest.mark.extended
@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.skipif(BACKEND == "tensorflow", reason="TensorFlow is the back end")
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="there is none to load")
def test_no_rank_loads_a_tensorflow_that_nothing_uses():
    environment = {"KERAS_BACKEND": BACKEND, "PYTHONPATH": str(ROOT)}  # with all frameworks in sight
    done = mpiexec(3, PROGRAMS / "keras_frameworks.py", timeout_s=100, env=environment)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert told == [["nobody"]] * 3, told
