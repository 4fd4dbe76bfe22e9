"""Odd layouts of tasks, cores and GPUs, as Slurm makes them."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from tests.helpers.jobs import environment
from tests.helpers.paths import PROGRAMS
from tests.helpers.slurm import CPUS

pytestmark = [pytest.mark.mpi, pytest.mark.extended, pytest.mark.timeout(300)]


def test_two_ranks_on_one_node_and_one_on_another(batch):
    status, text = batch.srun("--mpi=pmix", "--nodes=2", "--ntasks=3", "nnlo", "doctor")
    assert status == 0, text
    assert "3 processes, started by srun; MPI knows them all" in text
    rows = re.findall(r"^ +(\d) +(node\d) +(\d) +\d+ +-$", text, re.MULTILINE)
    assert rows == [("0", "node1", "0"), ("1", "node1", "1"), ("2", "node2", "0")], text


def test_the_parts_of_a_heterogeneous_job_are_one_training(batch):
    part = ["python", PROGRAMS / "numpy_hosts.py"]
    server, workers = ["--nodes=1", "--ntasks=1", *part], ["--nodes=1", "--ntasks=2", *part]
    status, text = batch.srun("--mpi=pmix", *server, ":", *workers)
    assert status == 0, text
    assert sorted(re.findall(r"batches \d+", text)) == ["batches 0", "batches 30", "batches 30"], text


def test_doctor_sees_more_threads_than_cores(batch):
    # The tests' nodes have the cores of this machine, which Slurm does not divide up.
    env = {"OMP_NUM_THREADS": "10000"}
    words = ["--mpi=pmix", "--nodes=2", "--ntasks=2", f"--cpus-per-task={CPUS}", "nnlo", "doctor"]
    status, text = batch.srun(*words, env=env)
    assert status == 0, text
    assert "OMP_NUM_THREADS=10000, but the share of a rank is" in text


def test_each_task_has_a_gpu_of_its_own(batch):
    show = 'echo "task $SLURM_PROCID on $SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES"'
    status, text = batch.srun("--nodes=2", "--ntasks=4", "--gpus-per-task=1", "sh", "-c", show)
    assert status == 0, text
    seen = re.findall(r"task (\d) on (node\d) sees (\d)\n", text)
    assert sorted(task for task, _, _ in seen) == ["0", "1", "2", "3"], text
    assert len({(node, gpu) for _, node, gpu in seen}) == 4, text


def test_nothing_is_left_of_a_slurm_whose_tests_were_killed(batch, tmp_path):
    code = f"""
        import os, pathlib
        from tests.helpers.slurm import slurm
        with slurm(pathlib.Path({str(tmp_path)!r})) as killed:
            print(*killed.daemons(), flush=True)
            os.kill(os.getpid(), 9)
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    killed = subprocess.run(words, env=environment(None), capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    daemons = [int(word) for word in killed.stdout.split()]
    assert len(daemons) == 8  # munged on each host, slurmd on the nodes, slurmctld
    for daemon in daemons:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(daemon).wait(30)
