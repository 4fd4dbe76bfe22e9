"""GPUs of the ranks: the choice of each, and who is told of it."""

from __future__ import annotations

import pytest

from nnlo_common.cluster import _gpus
from nnlo_common.cluster._gpus import choose_gpu, own_gpu, search_turns, train_turns, when_chosen
from nnlo_common.cluster._hosts import locate
from nnlo_common.testing import MemoryCluster


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch):
    """The choice is the process', so it must not outlive a test."""
    monkeypatch.setattr(_gpus._Choice, "gpu", None)
    monkeypatch.setattr(_gpus._Choice, "uses", [])
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("ROCR_VISIBLE_DEVICES", raising=False)


def places(*hosts, gpus):
    return locate([{"host": host, "cores": 8, "gpus": gpus} for host in hosts])


def gpus_of(servers, ranks, **options):
    with MemoryCluster(ranks) as cluster:
        return cluster.run(lambda world: own_gpu(world, servers=servers, **options))


@pytest.mark.parametrize(
    ("visible", "servers", "server_gpu", "found"),
    [
        ("4,5", 1, False, [None, 0, 1, 0, 1]),
        ("4,5,6,7,8", 1, True, [4, 0, 1, 2, 3]),  # an idle one for the server
        ("4,5", 1, True, [0, 0, 1, 0, 1]),
        ("4,5", 2, False, [None, None, 0, 1, 0]),
        ("4,5", 0, False, [0, 1, 0, 1, 0]),
        ("9", 1, False, [None, 0, 0, 0, 0]),  # one for each rank, as Slurm may have it
        ("", 1, True, [None] * 5),
    ],
)
def test_workers_of_a_host_take_its_gpus_in_turn(monkeypatch, visible, servers, server_gpu, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_of(servers, 5, server_gpu=server_gpu) == found


@pytest.mark.parametrize(
    ("visible", "server_gpu", "found"),
    [
        ("0,1,2", False, [None, None, 0, 1, None, 2, 0, 1]),
        ("0,1,2,3,4,5,6", True, [5, 6, 0, 1, 0, 2, 3, 4]),  # the idle ones first
    ],
)
def test_sub_servers_take_no_gpu_from_a_worker(monkeypatch, visible, server_gpu, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_of(1, 8, sub_servers=2, server_gpu=server_gpu) == found


def test_turns_begin_anew_on_each_host():
    hosts = places("a", "a", "b", "a", "b", gpus=2)
    assert train_turns(server_gpu=False)(hosts) == [None, 0, 0, 1, 1]
    assert search_turns(1)(hosts) == [None, None, 0, 0, 1]
    branches = places("a", "a", "a", "a", "b", "b", "b", gpus=2)
    assert train_turns(sub_servers="host", server_gpu=False)(branches) == [None, None, 0, 1, None, 0, 1]


def test_a_process_alone_has_the_first_gpu_or_that_of_the_search(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert own_gpu(None, server_gpu=False) == 0
    choose_gpu(places("a", "a", "a", gpus=2), 2, search_turns(0))
    assert own_gpu(None, server_gpu=False) == 1
    monkeypatch.setattr(_gpus._Choice, "gpu", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_gpu(None, server_gpu=False) is None


def test_in_a_trial_the_search_has_chosen(monkeypatch):
    monkeypatch.setattr(_gpus._Choice, "gpu", 3)

    def of_trial(world):
        world.of_trial = True
        return own_gpu(world, server_gpu=False), own_gpu(world, server_gpu=True)

    with MemoryCluster(2) as cluster:
        assert cluster.run(of_trial) == [(None, 3), (3, 3)]


def test_frameworks_are_told_when_they_come_before_and_when_they_come_later():
    before, later = [], []
    when_chosen(before.append)
    hosts = places("a", "a", "a", gpus=2)
    assert choose_gpu(hosts, 0, search_turns(0)) is None
    assert before == []
    assert choose_gpu(hosts, 2, search_turns(0)) == 1
    when_chosen(later.append)
    assert (before, later) == ([1], [1])
