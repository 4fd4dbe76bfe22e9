"""Three hosts: what is on each, the links between them, and a tree over them."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import hosts
from tests.helpers.jobs import environment, running_mpi
from tests.helpers.paths import PROGRAMS
from tests.helpers.trees import assert_as_replayed

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="started by PRRTE, the launcher of Open MPI"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with hosts(3, tmp_path_factory.mktemp("shared")) as cluster:
        yield cluster


@pytest.mark.timeout(400)
def test_a_tree_with_a_sub_server_on_each_host_has_the_numbers_of_the_reference(cluster):
    folder = cluster.shared / "tree"
    folder.mkdir()
    words = (str(folder), "-1", "1", "host")
    status, text = cluster.run([1, 3, 4], PROGRAMS / "tree.py", *words, timeout_s=180)
    assert status == 0, text
    assert_as_replayed(folder, 1)


def test_long_replies_come_in_parts_over_the_network(cluster):
    checks = ("by_parts", "lent", "kept_whole", "closed_early")
    status, text = cluster.run([1, 1, 1], PROGRAMS / "endpoint_all.py", *checks, timeout_s=90)
    assert status == 0, text
    assert re.findall("<(.*?)>", text) == [*checks]


def test_doctor_sees_three_hosts(cluster):
    status, text = cluster.run([2, 2, 2], "-m", "nnlo_common", "doctor")
    assert status == 0, text
    assert "6 processes" in text
    for name in cluster.names:
        assert re.search(rf"\b{name}\b", text), text


def test_a_host_has_a_name_processes_and_folders_of_its_own(cluster):
    (cluster.shared / "note").write_text("seen\n")
    words = f"hostname; cat {cluster.shared}/note; touch /tmp/own; ls -d /proc/[0-9]* | wc -l"
    with cluster.starting("node2", ["sh", "-c", words]) as job:
        assert job.wait(30) == 0, job.text()
        name, note, processes = job.text().split()
    assert (name, note) == ("node2", "seen")
    assert int(processes) < 10
    with cluster.starting("node3", ["ls", "/tmp"]) as job:
        assert job.wait(30) == 0
        assert "own" not in job.text().split()


def test_a_link_is_cut_mended_and_slowed(cluster):
    def connects():
        code = "import socket; socket.create_connection(('node2', 9), 1)"
        with cluster.starting("node1", [sys.executable, "-I", "-S", "-c", code]) as job:
            assert job.wait(30) == 1
            return "Connection refused" in job.text()  # said by the other host

    assert connects()
    cluster.cut(2)
    assert not connects()
    cluster.restore(2)
    assert connects()
    cluster.slow(2, "1mbit")
    assert connects()


def test_nothing_is_left_of_hosts_whose_tests_were_killed(tmp_path):
    code = f"""
        import os, pathlib
        from tests.helpers.hosts import hosts
        with hosts(2, pathlib.Path({str(tmp_path)!r})) as cluster:
            print(os.getpid(), *cluster.first_processes(), flush=True)
            os.kill(os.getpid(), 9)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    killed = subprocess.run(words, env=environment(None), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    killed_pid, *firsts = [int(word) for word in killed.stdout.split()]
    assert len(firsts) == 2
    for first in firsts:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(first).wait(30)
    with hosts(1, tmp_path):
        left = [path.name.split("-")[2] for path in Path(tempfile.gettempdir()).glob("nnlo-hosts-*")]
    assert str(killed_pid) not in left
