"""Ranks that srun has started and that die, or are cut off: the step ends, and the rank is named."""

from __future__ import annotations

import psutil
import pytest

from tests.helpers.paths import PROGRAMS
from tests.helpers.slurm import slurm

pytestmark = [pytest.mark.mpi, pytest.mark.extended, pytest.mark.timeout(300)]
SPREAD = ("srun", "--mpi=pmix", "--nodes=3", "--ntasks=3")
END_S = 120


@pytest.fixture
def own(tmp_path):
    with slurm(tmp_path, silence_s=15) as own:
        yield own


def program(own, limit_s):
    return ["python", PROGRAMS / "stopped.py", own.home / "end", str(limit_s)]


def test_the_death_of_a_rank_ends_the_step_and_srun_names_it(own):
    with own.running(*SPREAD, "--kill-on-bad-exit=0", *program(own, 0)) as job:
        job.wait_for("ready", 60, times=2)
        others = [own.rank(number) for number in (0, 1)]
        own.rank(2).kill()
        assert job.wait(END_S) != 0
        assert "node3: task 2: Killed" in job.text(), job.text()
        psutil.wait_procs(others, END_S)
        assert not any(other.is_running() for other in others)


def test_a_node_that_is_cut_off_is_named_and_ends_the_step_when_slurm_has_noticed(own):
    with own.running(*SPREAD, *program(own, 0)) as job:
        job.wait_for("ready", 60, times=2)
        own.cluster.cut(3)
        job.wait_for("nnlo: rank 2 on node3, last heard", END_S)
        assert job.wait(END_S) != 0
        assert "Node failure on node3" in job.text(), job.text()


def test_with_a_limit_a_node_that_is_cut_off_ends_the_step_at_that_time(own):
    with own.running(*SPREAD, *program(own, 6)) as job:
        job.wait_for("ready", 60, times=2)
        own.cluster.cut(3)
        assert job.wait(END_S) != 0
        assert "PeerLostError: rank 2: was silent longer than" in job.text(), job.text()


def test_a_node_that_dies_ends_the_step(own):
    with own.running(*SPREAD, *program(own, 0)) as job:
        job.wait_for("ready", 60, times=2)
        own.cluster.kill(3)
        assert job.wait(END_S) != 0
