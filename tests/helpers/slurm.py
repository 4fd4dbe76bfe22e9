"""Slurm on the hosts of `tests.helpers.hosts`: three nodes, and a fourth host that controls them.

Its daemons, ports, sockets, keys, spools and logs belong to these hosts and to their folder, so they end with
the hosts, and a Slurm of this machine is not touched. No test asks who runs Slurm here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from tests.helpers.hosts import Cluster, Job, hosts
from tests.helpers.jobs import running_mpi
from tests.helpers.pages import code
from tests.helpers.paths import ROOT

__all__ = ["CPUS", "Slurm", "page_script", "slurm"]

#: Of each node, as Slurm counts them; that many tasks of one CPU fit on it, whatever this machine has.
CPUS = 4
_NODES, _CONTROL = 3, "node4"
_PACKAGES = "apt-get install slurm-wlm munge libpmix2 libpmix-dev"
# The shortest that Slurm takes.
_REQUEUE_S = 5
_START_S, _CALL_S, _POLL_S = 30.0, 30.0, 0.1
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
# The folders of munge are private to each host; the key is the same.
_MUNGE = """
mkdir -m 755 /tmp/munge
install -m 400 {key} /tmp/munge/key
exec munged --foreground --key-file /tmp/munge/key --socket /tmp/munge/socket \
    --pid-file /tmp/munge/pid --log-file /tmp/munge/log --seed-file /tmp/munge/seed
"""
_CONF = """
ClusterName=tests
SlurmctldHost={control}({control_address})
SlurmUser=root
AuthType=auth/munge
# So long does a job wait that was put back into the queue.
AuthInfo=socket=/tmp/munge/socket,cred_expire={requeue_s}
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
# As some sites have it; it must not matter to whoever follows the page.
KillOnBadExit=1
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout={silence_s}
KillWait=5
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=100000,bf_interval=2
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Slurm:
    """A running Slurm.

    Args:
        cluster: the hosts, of which the last one controls the others.
        folder: for the configuration, seen by all hosts.
        silence_s: after this time without an answer a node is down.

    Attributes:
        cluster: the same.
        nodes: their names.
        home: the home of the user: with an environment of Python in `venv`, as the pages of nnlo expect.
    """

    def __init__(self, cluster: Cluster, folder: Path, silence_s: int) -> None:
        self.cluster, self.nodes = cluster, cluster.names[:-1]
        self.home = folder / "home"
        self._folder, self._leaving = folder, contextlib.ExitStack()
        self._daemons: dict[str, Job] = {}
        key, control = folder / "munge.key", cluster.names[-1]
        key.write_bytes(secrets.token_bytes(128))
        lines = [
            f"NodeName={name} NodeAddr={cluster.address(name)} CPUs={CPUS} Gres=gpu:{CPUS} State=UNKNOWN"
            for name in self.nodes
        ]
        self._conf = folder / "slurm.conf"
        self._conf.write_text(
            _CONF.format(
                control=control,
                control_address=cluster.address(control),
                requeue_s=_REQUEUE_S,
                silence_s=silence_s,
                nodes="\n".join(lines),
            )
        )
        # Slurm counts these as GPUs, and asks nothing else of them.
        for number in range(CPUS):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{CPUS - 1}]\n")
        (self.home / "venv" / "bin").mkdir(parents=True)
        activate = f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT}\n"
        # What the hosts need to start ranks without Slurm; mpiexec inside a job asks Slurm.
        activate += "unset $(compgen -e | grep -E '^(PRTE|OMPI)_MCA_')\n"
        (self.home / "venv" / "bin" / "activate").write_text(activate)

    def begin(self) -> None:
        """Start the daemons, and return when all nodes are idle."""
        munge = _MUNGE.format(key=self._folder / "munge.key")
        for name in self.cluster.names:
            self._start(f"munged {name}", name, ["sh", "-c", munge])
        for name in self.cluster.names:
            self._await_munge(name)
        self._start("slurmctld", self.cluster.names[-1], ["slurmctld", "-D", "-f", str(self._conf)])
        for name in self.nodes:
            self._start(f"slurmd {name}", name, ["slurmd", "-D", "-f", str(self._conf)])
        end_s = time.monotonic() + _START_S
        while self._try(["sinfo", "-h", "-o", "%T %D"])[1].split() != ["idle", str(len(self.nodes))]:
            if time.monotonic() > end_s:
                pytest.fail(f"the nodes are not idle:\n{self.logs()}")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Let go of the daemons; they end with the hosts."""
        self._leaving.close()

    def srun(
        self, *words: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> tuple[int, str]:
        """Run a job; return its exit status and all that was printed.

        Args:
            words: options of srun and the command.
            env: variables to add to the environment of all ranks.
            timeout_s: the test fails after this time.
        """
        with self.running("srun", *words, env=env) as job:
            return job.wait(timeout_s), job.text()

    @contextlib.contextmanager
    def running(self, *words: str | Path, env: Mapping[str, str] | None = None) -> Iterator[Job]:
        """Run a command of Slurm while the test looks on."""
        with self.cluster.starting(self.cluster.names[-1], words, self._environment(env)) as job:
            yield job

    def call(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Return what a command of Slurm prints; it must succeed."""
        status, text = self._try(words, env)
        if status:
            pytest.fail(f"{words} failed with {status}:\n{text}\n{self.logs()}")
        return text

    def submit(self, script: str, *options: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job script as it stands from the home folder; return the number of the job.

        Args:
            script: its text.
            options: of sbatch; they go before those in the script.
            env: variables to add to the environment of the job.
        """
        path = self.home / "job.sh"
        path.write_text(script)
        return self.call("sbatch", "--parsable", "--chdir", self.home, *options, path, env=env).strip()

    def state(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, by the names of scontrol."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, limit_s: float, state: str | None = None) -> dict[str, str]:
        """Return what Slurm says of a job when it has ended, or is in that state; fail after the limit."""
        end_s = time.monotonic() + limit_s
        while (now := self.state(job))["JobState"] not in ({state} if state else _ENDED):
            if time.monotonic() > end_s:
                pytest.fail(f"{now}\n{self.output()}\n{self.logs()}")
            time.sleep(_POLL_S)
        return now

    def rank(self, number: int) -> psutil.Process:
        """Return the process of a rank of the running step."""
        return self.cluster.rank(number, "SLURM_PROCID")

    def daemons(self) -> list[int]:
        """Return the processes of munged, slurmctld and slurmd, one of each on a host."""
        names = {"munged", "slurmctld", "slurmd"}
        return [process.pid for process in self.cluster.processes() if process.name() in names]

    def output(self) -> str:
        """Return what the jobs of the home folder have printed."""
        paths = sorted(self.home.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in paths)

    def logs(self) -> str:
        """Return what the daemons have printed."""
        return "\n".join(f"--- {name}\n{job.text()}" for name, job in self._daemons.items())

    def _start(self, name: str, host: str, words: Sequence[str]) -> None:
        job = self.cluster.starting(host, words, self._environment(None))
        self._daemons[name] = self._leaving.enter_context(job)

    def _await_munge(self, host: str) -> None:
        words = ["munge", "--socket", "/tmp/munge/socket", "--no-input"]
        end_s = time.monotonic() + _START_S
        while self._try(words, host=host)[0]:
            if time.monotonic() > end_s:
                pytest.fail(f"munged does not begin:\n{self.logs()}")
            time.sleep(_POLL_S)

    def _try(
        self, words: Sequence[str | Path], env: Mapping[str, str] | None = None, host: str = _CONTROL
    ) -> tuple[int, str]:
        with self.cluster.starting(host, words, self._environment(env)) as job:
            return job.wait(_CALL_S), job.text()

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        # Commands such as `python` and `nnlo` are those of this environment, also if nobody has activated it.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {"SLURM_CONF": str(self._conf), "HOME": str(self.home), "PATH": path, **(env or {})}


def page_script(name: str) -> str:
    """Return the job script of docs/clusters.md whose job has this name."""
    (script,) = [
        block for block in code("bash", "docs/clusters.md") if f"#SBATCH --job-name={name}\n" in block
    ]
    return script


@contextlib.contextmanager
def slurm(shared: Path, *, silence_s: int = 60) -> Iterator[Slurm]:
    """Run Slurm on three nodes for a `with` block; at its end nothing of it is left.

    Args:
        shared: a folder that all nodes see under this path.
        silence_s: after this time without an answer a node is down.
    """
    if (reason := _missing()) is not None:
        pytest.skip(reason)
    with hosts(_NODES + 1, shared) as cluster:
        started = Slurm(cluster, shared, silence_s)
        try:
            started.begin()
            yield started
        finally:
            started.end()


def _missing() -> str | None:
    """Return why Slurm cannot start our ranks here; None if it can."""
    if running_mpi() != "Open MPI":
        return "Slurm starts ranks by PMIx, which the wheel of MPICH does not know"
    for tool in ("munged", "munge", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed: {_PACKAGES}"
    load = "import ctypes; ctypes.CDLL('libpmix.so')"  # as Slurm's plug-in does, in a process of its own
    tried = subprocess.run([sys.executable, "-I", "-S", "-c", load], capture_output=True, check=False)
    return f"Slurm finds no libpmix.so: {_PACKAGES}" if tried.returncode else None
