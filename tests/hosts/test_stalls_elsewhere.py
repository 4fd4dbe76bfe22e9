"""Ranks of another host than the server's that are stopped, cut off or killed, as real processes.

Rank 0 serves on node1, rank 1 trains there, rank 2 on node2, rank 3 on node3.
"""

from __future__ import annotations

import re
import signal
from contextlib import contextmanager

import psutil
import pytest

from tests.helpers.hosts import hosts
from tests.helpers.jobs import running_mpi
from tests.helpers.paths import PROGRAMS

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.skipif(running_mpi() != "Open MPI", reason="started by PRRTE, the launcher of Open MPI"),
]
ULFM = ("--with-ft", "ulfm")
LIMIT_S = "6"
DROPPED = (
    r"rank 2 on node2, last heard \d+\.\d s ago: EXCHANGE after step \d+; dropped after \d+ s of silence"
)
TOLD = (
    r"nnlo: rank 2 of 4 on node2 was dropped by the server after \d+ s of silence, so it ends; the others "
    "continue\n"
)
END_S = 60


@pytest.fixture
def cluster(tmp_path):
    with hosts(3, tmp_path) as cluster:
        yield cluster


@contextmanager
def training(cluster, *words, limit_s=LIMIT_S, options=ULFM, env=None):
    program = [PROGRAMS / "stopped.py", str(cluster.shared / "end"), limit_s, *words]
    with cluster.running([2, 1, 1], *program, options=options, env=env) as job:
        job.wait_for("ready", 60, times=2 if "spared" in words else 3)
        yield job


def end(cluster):
    (cluster.shared / "end").touch()


def test_a_stopped_worker_is_killed_and_the_others_go_on(cluster):
    with training(cluster) as job:
        stopped = cluster.rank(2)
        stopped.send_signal(signal.SIGSTOP)
        job.wait_for("of silence. Workers left: 2", END_S)
        stopped.wait(10)  # the launcher has killed it
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert job.text().count("done ") == 3, job.text()
        assert re.search(rf"nnlo: {DROPPED}\. Workers left: 2", job.text()), job.text()
        assert re.search(rf"done \('{DROPPED} at 2", job.text()), job.text()
    assert cluster.ranks() == []


def test_a_stopped_worker_that_cannot_be_killed_ends_by_itself_when_it_is_woken(cluster):
    with training(cluster, "without PMIx") as job:
        stopped = cluster.rank(2)
        stopped.send_signal(signal.SIGSTOP)
        job.wait_for("of silence. Workers left: 2", END_S)
        assert stopped.status() == psutil.STATUS_STOPPED
        stopped.send_signal(signal.SIGCONT)
        job.wait_for("so it ends", END_S)
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert len(re.findall(TOLD, job.text())) == 1, job.text()
        assert job.text().count("done ") == 3, job.text()


def test_without_failure_mitigation_a_stopped_worker_ends_the_job_and_is_named(cluster):
    with training(cluster, options=()) as job:
        cluster.rank(2).send_signal(signal.SIGSTOP)
        assert job.wait(END_S) == 1, job.text()
        assert "PeerLostError: rank 2: was silent longer than" in job.text()
    assert cluster.ranks() == []


@pytest.mark.parametrize(("words", "left"), [((), 2), (("spared",), 1)], ids=["heirs", "a spare"])
def test_a_worker_that_was_cut_off_does_not_end_the_job_when_its_link_is_back(cluster, words, left):
    """Also one that would serve in the place of a silent server, or could let another do so."""
    with training(cluster, *words) as job:
        cut_off = cluster.rank(2)
        cluster.cut(2)
        job.wait_for(f"of silence. Workers left: {left}", END_S)
        cut_off.wait(END_S)  # it has given up the server, and would have aborted the job
        cluster.restore(2)
        job.wait_for("ends alone, because the launcher does not answer", END_S)
        assert len(cluster.ranks()) == 3
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert job.text().count("done ") == 3, job.text()


def test_a_worker_whose_link_is_soon_back_ends_and_the_others_go_on(cluster):
    with training(cluster) as job:
        cut_off = cluster.rank(2)
        cluster.cut(2)
        job.wait_for("of silence. Workers left: 2", END_S)
        cluster.restore(2)
        cut_off.wait(END_S)
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert job.text().count("done ") == 3, job.text()


def test_with_a_host_cut_off_for_good_the_others_finish_and_the_launcher_ends_when_tcp_gives_up(cluster):
    hurry = ["sh", "-c", "echo 4 > /proc/sys/net/ipv4/tcp_retries2"]
    with cluster.starting("node1", hurry) as job:
        assert job.wait(10) == 0
    with training(cluster) as job:
        cluster.cut(2)
        job.wait_for("of silence. Workers left: 2", END_S)
        end(cluster)
        job.wait_for("done ", END_S, times=3)
        job.wait(END_S)
        assert "PRTE has lost communication with a remote daemon" in job.text(), job.text()


@pytest.mark.parametrize("options", [(), ULFM], ids=["plain", "ulfm"])
def test_without_a_limit_a_host_that_is_cut_off_ends_the_job_in_the_time_of_the_launcher(cluster, options):
    keepalive = {"time": "4", "intvl": "1", "probes": "3"}  # 300, 20 and 9 by default
    env = {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in keepalive.items()}
    with training(cluster, limit_s="0", options=options, env=env) as job:
        cluster.cut(2)
        job.wait(END_S)
        assert "Remote daemon: " in job.text(), job.text()
        assert "nnlo: rank 2 on node2, last heard" in job.text(), job.text()


@pytest.mark.parametrize("options", [(), ULFM], ids=["plain", "ulfm"])
def test_without_a_limit_a_training_goes_on_when_the_link_is_back(cluster, options):
    with training(cluster, limit_s="0", options=options) as job:
        cluster.cut(2)
        job.wait_for("nnlo: rank 2 on node2, last heard", END_S)
        cluster.restore(2)
        job.wait_for("nnlo: rank 2 on node2 is back after", END_S)
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert job.text().count("done ()") == 4, job.text()


def test_the_death_of_a_worker_elsewhere_is_survived(cluster):
    with training(cluster, limit_s="0") as job:
        cluster.rank(2).kill()
        job.wait_for("it has died. Workers left: 2", END_S)
        end(cluster)
        assert job.wait(END_S) == 0, job.text()
        assert job.text().count("done ") == 3, job.text()


@pytest.mark.parametrize(
    "options",
    [(), ULFM, (*ULFM, "--rtos", "recoverable,notifyerrors"), (*ULFM, "--rtos", "continuous")],
    ids=["plain", "ulfm", "recoverable", "continuous"],
)
def test_the_death_of_a_host_ends_the_job(cluster, options):
    with training(cluster, limit_s="0", options=options) as job:
        cluster.kill(2)
        job.wait(END_S)
        assert "daemon" in job.text(), job.text()
        assert "node2" in job.text(), job.text()


def test_the_death_of_the_servers_host_ends_the_job_though_a_spare_is_elsewhere(cluster):
    """The launcher runs on node1 alone; the server and a worker on node2, a worker and the spare on node3."""
    program = [PROGRAMS / "stopped.py", str(cluster.shared / "end"), "0", "spared"]
    with cluster.running([0, 2, 2], *program, options=ULFM) as job:
        job.wait_for("ready", 60, times=2)
        cluster.kill(2)
        job.wait(END_S)
        for rank in cluster.ranks():
            rank.wait(END_S)  # the daemon of node3 ends them, a little later
        assert "daemon" in job.text(), job.text()
        assert "done" not in job.text(), job.text()
