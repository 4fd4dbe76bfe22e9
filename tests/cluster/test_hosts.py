"""Places: host, local rank, cores and GPU of every rank, found without a framework or MPI."""

from __future__ import annotations

import doctest
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnlo_common.base._errors import ConfigurationError
from nnlo_common.cluster import _hosts as _places
from nnlo_common.cluster._hosts import (
    crowded_hosts,
    describe_here,
    locate,
    place_table,
    text_table,
    visible_gpus,
)


def report(host: str, cores: int = 2, gpus: int = 0, **more: str) -> dict[str, int | str]:
    return {"host": host, "cores": cores, "gpus": gpus, **more}


def test_the_examples_run() -> None:
    assert doctest.testmod(_places).failed == 0


class TestThisProcess:
    def test_the_report_is_plain_json(self) -> None:
        here = describe_here()
        assert json.loads(json.dumps(here)) == here

    def test_it_tells_host_and_affinity(self) -> None:
        here = describe_here()
        assert here["host"] == socket.gethostname()
        assert here["cores"] == len(os.sched_getaffinity(0))
        assert int(str(here["core_mask"]), 16).bit_count() == here["cores"]

    def test_it_follows_a_narrowed_affinity(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 64})
        assert describe_here() | {"host": "", "gpus": 0} == {
            "host": "",
            "cores": 2,
            "core_mask": hex((1 << 1) + (1 << 64)),
            "gpus": 0,
        }

    def test_without_affinity_every_core_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(os, "sched_getaffinity")
        monkeypatch.setattr(os, "cpu_count", lambda: 3)
        assert (describe_here()["cores"], describe_here()["core_mask"]) == (3, "0x7")

    def test_it_locates_itself(self) -> None:
        (place,) = locate([describe_here()])
        assert (place.rank, place.local_rank, place.local_size, place.host_cores) == (0, 0, 1, place.cores)

    @pytest.mark.slow
    def test_no_framework_and_no_mpi_is_imported(self) -> None:
        program = (
            "import sys, nnlo_common.cluster._hosts as places; places.describe_here();"
            "print(*sorted({'torch', 'keras', 'tensorflow', 'jax', 'mpi4py'} & set(sys.modules)))"
        )
        finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert finished.stdout.strip() == ""


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": " "}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "12"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "10,11,12,13"}, 4),
        ({"CUDA_VISIBLE_DEVICES": " 0 , 1 "}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "-1,0,1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,,1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,one"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-44fe-12"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "MIG-41f29d0e"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6"}, 3),
        ({"ROCR_VISIBLE_DEVICES": "4,5,6", "HIP_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "0,1"}, 1),
        ({"NVIDIA_VISIBLE_DEVICES": "0,1"}, 7),
        ({}, 7),
    ],
)
def test_visibility_variables(environment: dict[str, str], count: int, tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number}b:00.0").mkdir(parents=True)
    assert visible_gpus(environment, tmp_path) == count


@pytest.mark.parametrize(
    ("present", "count"),
    [
        ([], 0),
        (["dev/null", "dev/nvidiactl", "dev/nvidia-uvm", "dev/nvidia-caps"], 0),
        (["dev/nvidiactl", "dev/nvidia0"], 1),
        ([f"dev/nvidia{number}" for number in range(16)], 16),
        (["proc/driver/nvidia/gpus/0000:1b:00.0", "dev/nvidia0", "dev/nvidia1"], 1),
    ],
)
def test_devices_of_the_driver(present: list[str], count: int, tmp_path: Path) -> None:
    for name in present:
        (tmp_path / name).mkdir(parents=True)
    assert visible_gpus({}, tmp_path) == count


class TestLocalRanks:
    @pytest.mark.parametrize(
        ("hosts", "local_ranks", "local_sizes"),
        [
            ("", [], []),
            ("a", [0], [1]),
            ("aaa", [0, 1, 2], [3, 3, 3]),
            ("aabb", [0, 1, 0, 1], [2, 2, 2, 2]),
            ("abab", [0, 0, 1, 1], [2, 2, 2, 2]),
            ("bacab", [0, 0, 0, 1, 1], [2, 2, 1, 2, 2]),
        ],
    )
    def test_in_rank_order_on_every_host(
        self, hosts: str, local_ranks: list[int], local_sizes: list[int]
    ) -> None:
        places = locate([report(host) for host in hosts])
        assert [place.rank for place in places] == list(range(len(hosts)))
        assert [place.host for place in places] == list(hosts)
        assert [place.local_rank for place in places] == local_ranks
        assert [place.local_size for place in places] == local_sizes

    @given(hosts=st.text("abc", max_size=20))
    def test_every_host_numbers_its_ranks_without_gaps(self, hosts: str) -> None:
        places = locate([report(host) for host in hosts])
        for host in set(hosts):
            here = [place for place in places if place.host == host]
            assert [place.local_rank for place in here] == list(range(hosts.count(host)))
            assert {place.local_size for place in here} == {hosts.count(host)}


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        ([0, 0, 0], [None, None, None]),
        ([1, 1, 1], [0, 0, 0]),  # one each by the launcher (--gpus-per-task=1), or one shared by all
        ([2, 2, 2], [0, 1, 0]),
        ([4, 4, 4], [0, 1, 2]),
        ([4, 1, 0], [0, 0, None]),
    ],
)
def test_the_device_is_the_local_rank_modulo_the_visible_ones(
    gpus: list[int], devices: list[int | None]
) -> None:
    assert [place.gpu for place in locate([report("a", gpus=count) for count in gpus])] == devices


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"host": "a", "cores": 1}, "rank 1: the report .* lacks gpus; pass what describe_here"),
        ({}, "lacks host, cores, gpus"),
        ({"host": "a", "cores": 0, "gpus": 0}, "rank 1: cores=0 in its report; it must be at least 1"),
        ({"host": "a", "cores": "2", "gpus": 0}, "cores='2'"),
        ({"host": "a", "cores": 1, "gpus": -1}, "gpus=-1 in its report; it must be at least 0"),
        ({"host": "a", "cores": 1, "gpus": 0}, None),
    ],
)
def test_impossible_reports_are_refused(bad: dict[str, int | str], words: str | None) -> None:
    if words is None:
        assert len(locate([report("a"), bad])) == 2
    else:
        with pytest.raises(ConfigurationError, match=words):
            locate([report("a"), bad])


class TestCrowdedHosts:
    @pytest.mark.parametrize(
        ("reports", "lines"),
        [
            ([report("a", 2)] * 2, ()),
            ([report("a", 2)] * 5, ("host a: 5 ranks share 2 cores",)),
            ([report("a", 1)] * 2, ("host a: 2 ranks share 1 core",)),
            # Bound to a core each: nobody shares anything, though each rank sees one core only.
            ([report("a", 1, core_mask=hex(1 << core)) for core in range(4)], ()),
            # Two ranks on two overlapping pairs of cores, then a third one on the second pair.
            ([report("a", 2, core_mask=mask) for mask in ("0x3", "0x6")], ()),
            (
                [report("a", 1, core_mask=mask) for mask in ("0x1", "0x4", "0x4")],
                ("host a: 3 ranks share 2 cores",),
            ),
            ([report("b", 1), report("a", 8), report("b", 1)], ("host b: 2 ranks share 1 core",)),
        ],
    )
    def test_counts_the_cores_of_all_ranks_together(
        self, reports: list[dict[str, int | str]], lines: tuple[str, ...]
    ) -> None:
        assert crowded_hosts(locate(reports)) == lines

    def test_every_crowded_host_has_its_line(self) -> None:
        places = locate([report(host, 1) for host in "abcabb"])
        assert crowded_hosts(places) == ("host a: 2 ranks share 1 core", "host b: 3 ranks share 1 core")


def test_the_table() -> None:
    hosts = ["node-a", "b", "node-a", "node-a", "b", "c", "c", "c", "c", "c", "c"]
    places = locate(
        [report(host, 128 if host == "b" else 2, {"node-a": 2, "b": 1, "c": 0}[host]) for host in hosts]
    )
    assert place_table(places).split("\n") == [
        "rank  host    local rank  cores  GPU",
        "   0  node-a           0      2    0",
        "   1  b                0    128    0",
        "   2  node-a           1      2    1",
        "   3  node-a           2      2    0",
        "   4  b                1    128    0",
        "   5  c                0      2    -",
        "   6  c                1      2    -",
        "   7  c                2      2    -",
        "   8  c                3      2    -",
        "   9  c                4      2    -",
        "  10  c                5      2    -",
        "host node-a: 3 ranks share 2 cores",
        "host c: 6 ranks share 2 cores",
    ]


def test_a_table_without_rows_is_its_header() -> None:
    assert text_table(("rank", "role"), []) == "rank  role"
    assert place_table(locate([])) == "rank  host  local rank  cores  GPU"
