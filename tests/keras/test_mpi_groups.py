"""Groups in Keras over real MPI."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest

from tests.helpers.jobs import mpiexec
from tests.helpers.paths import PROGRAMS

os.environ.setdefault("KERAS_BACKEND", "torch")
keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")

from tests.programs import keras_groups as program  # noqa: E402

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.slow,
    pytest.mark.framework("keras"),
    pytest.mark.timeout(300),  # TensorFlow takes its time to start
    # Keras 3.15 itself, with NumPy 2: Variable.__array__ takes no copy argument.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BACKENDS = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed"),
            *([] if name == "torch" else [pytest.mark.extended]),
        ],
    )
    for name in ("torch", "tensorflow", "jax")
]


def trained(backend, folder, size, servers, group_size, *names):
    """Run the program; what each rank has saved, by wrapper and role."""
    args = [str(folder), str(servers), str(group_size), *names]
    env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = mpiexec(size, PROGRAMS / "keras_groups.py", *args, timeout_s=200, env=env)
    assert done.returncode == 0, done.stderr
    paths = {name: folder.glob(f"{name}.*.npz") for name in names}
    return {name: {path.name.split(".")[1]: np.load(path) for path in paths[name]} for name in names}


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_server_ranks_make_the_steps_of_one_process_with_the_large_batch(backend, tmp_path):
    """Whichever way the gradients are added up."""
    ranks, ways = 3, ("mpi", "shared")
    found = trained(backend, tmp_path, ranks, 0, ranks, *(f"Synchronous-{way}" for way in ways))
    inputs, targets = program.data()
    optimizer = keras.optimizers.Adam(0.01)
    vector, history = program.train(optimizer, (inputs, targets), ranks * program.BATCH)
    for way in ways:
        members = found[f"Synchronous-{way}"]
        assert set(members) == {"lead", "worker-0-member-1", "worker-0-member-2"}
        for one in members.values():
            assert one["way"] == way
            assert np.array_equal(one["vector"], members["lead"]["vector"])
            assert np.allclose(one["vector"], vector, rtol=1e-4, atol=2e-6)
            for name, values in history.items():
                assert np.allclose(one[name], values, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_stay_equal_bit_for_bit_on_five_ranks(backend, tmp_path):
    for name, found in trained(backend, tmp_path, 5, 1, 2, "Downpour", "EASGD").items():
        assert len(found) == 5, name
        for worker in range(2):
            vectors = [found[f"worker-{worker}{role}"]["vector"] for role in ("", "-member-1")]
            assert np.array_equal(*vectors), name
