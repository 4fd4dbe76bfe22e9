"""GPU of a rank in Keras: the calls of each back end are recorded, for no GPU is needed to see them."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from nnlo_common import ConfigurationError
from nnlo_common.testing import MemoryCluster

keras = pytest.importorskip("keras", reason="the environment for MPICH has no frameworks")
import nnlo_keras as nk  # noqa: E402
from nnlo_common.cluster import _gpus  # noqa: E402
from nnlo_keras import _gpu  # noqa: E402

pytestmark = pytest.mark.framework("keras")


@pytest.fixture
def calls(monkeypatch):
    """What is asked of the framework, on a host that seems to have two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(_gpus._Choice, "gpu", None)
    return []


@pytest.fixture
def tensorflow(calls, monkeypatch):
    def visible(gpus, kind):
        if "too late" in calls:
            raise RuntimeError("Visible devices cannot be modified after being initialized")
        calls.append(("visible", list(gpus), kind))

    growth = SimpleNamespace(set_memory_growth=lambda gpu, on: calls.append(("growth", gpu, on)))
    config = SimpleNamespace(
        list_physical_devices=lambda kind: ["one", "two"], set_visible_devices=visible, experimental=growth
    )
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    return config


def used(ranks, **options):
    with MemoryCluster(ranks) as cluster:
        return cluster.run(lambda world: nk.use_gpu(world=world, **options))


def test_tensorflow_sees_one_gpu_and_takes_memory_as_it_needs_it(calls, tensorflow):
    assert used(3) == [None, 0, 1]
    assert sorted(calls, key=str) == [
        ("growth", "one", True),
        ("growth", "two", True),
        ("visible", ["one"], "GPU"),
        ("visible", ["two"], "GPU"),
        ("visible", [], "GPU"),
    ]


def test_tensorflow_that_has_begun_is_an_error_with_the_remedy(calls, tensorflow):
    calls.append("too late")
    with pytest.raises(
        ConfigurationError, match=r"call use_gpu\(\), or begin the search, before the first model"
    ):
        nk.use_gpu()


def test_a_search_goes_on_where_tensorflow_has_begun(calls, tensorflow):
    calls.append("too late")
    with pytest.warns(RuntimeWarning, match="before this rank's GPU was chosen"):
        _gpu._use(1)


def test_torch_gets_a_current_gpu_and_a_server_the_cpu(calls, monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, set_device=calls.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    scopes = []

    class Scope:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            scopes.append(self.name)

    monkeypatch.setattr(keras, "device", Scope)
    monkeypatch.setattr(_gpu, "_SCOPES", [])
    assert used(3) == [None, 0, 1]
    assert (sorted(calls), scopes, len(_gpu._SCOPES)) == ([0, 1], ["cpu"], 1)
    cuda.is_available = lambda: False
    assert used(2) == [None, None]


def test_jax_gets_a_default_device(calls, monkeypatch):
    local = [SimpleNamespace(platform="gpu", number=number) for number in range(2)]
    cpu = [SimpleNamespace(platform="cpu", number=-1)]
    config = SimpleNamespace(update=lambda name, device: calls.append((name, device.number)))
    devices = SimpleNamespace(local_devices=lambda backend=None: cpu if backend else local, config=config)
    monkeypatch.setitem(sys.modules, "jax", devices)
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert used(3) == [None, 0, 1]
    assert sorted(calls) == [("jax_default_device", number) for number in (-1, 0, 1)]


def test_a_search_tells_keras():
    assert _gpu._use in _gpus._Choice.uses
