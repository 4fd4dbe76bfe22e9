"""Device of a rank: CUDA's calls are recorded, for no GPU is needed to see which one a rank would use."""

from __future__ import annotations

import pytest

from nnlo_common.testing import MemoryCluster

torch = pytest.importorskip("torch", reason="the environment for MPICH has no frameworks")
import nnlo_torch as nt  # noqa: E402
from nnlo_common.cluster import _gpus  # noqa: E402
from nnlo_torch import _gpu  # noqa: E402

pytestmark = pytest.mark.framework("torch")


@pytest.fixture
def current(monkeypatch):
    """The GPUs that were made the current one, on a host that seems to have two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(_gpus._Choice, "gpu", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


def devices(ranks, **options):
    with MemoryCluster(ranks) as cluster:
        return [str(one) for one in cluster.run(lambda world: nt.device(world=world, **options))]


def test_each_worker_has_a_gpu_and_the_server_the_cpu(current):
    assert devices(4) == ["cpu", "cuda:0", "cuda:1", "cuda:0"]
    assert sorted(current) == [0, 0, 1]
    assert devices(3, servers=2) == ["cpu", "cpu", "cuda:0"]
    assert devices(2, server_gpu=True) == ["cuda:1", "cuda:0"]
    assert devices(5, sub_servers=2) == ["cpu", "cpu", "cuda:0", "cpu", "cuda:1"]


def test_a_process_alone_has_the_first_gpu(current):
    assert (str(nt.device()), current) == ("cuda:0", [0])


def test_a_gpu_that_torch_cannot_use_is_none(current, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices(2) == ["cpu", "cpu"]
    _gpu._use(1)
    assert current == []


def test_the_choice_of_a_search_becomes_the_current_gpu(current):
    _gpu._use(1)
    assert current == [1]
    assert _gpu._use in _gpus._Choice.uses
