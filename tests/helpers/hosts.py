"""Several hosts on this one machine: network namespaces joined by a bridge, with real TCP between them.

Each host has a name, a network interface, processes, /tmp and /dev/shm of its own. All of it belongs to the
first processes of the hosts, which end with a pipe from this process: however the tests end, nothing runs on.
Outside of the namespaces there is only a temporary folder; of tests that were killed the next ones remove it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.helpers.host.remote_shell import run_on
from tests.helpers.jobs import environment, launcher
from tests.helpers.paths import ROOT

__all__ = ["Cluster", "Job", "hosts"]

_FIRST_PROCESS = ROOT / "tests" / "helpers" / "host" / "first_process.py"
_REMOTE_SHELL = ROOT / "tests" / "helpers" / "host" / "remote_shell.py"
_PREFIX = "nnlo-hosts-"
_RANK = "OMPI_COMM_WORLD_RANK"


class Job:
    """A job on the hosts.

    Args:
        asked: the socket that its exit status comes from.
        output: the file that all its output goes to.
    """

    def __init__(self, asked: socket.socket, output: IO[str]) -> None:
        self._asked, self._output = asked, output
        self._status: int | None = None

    def text(self) -> str:
        """Return all that it has printed."""
        self._output.seek(0)
        return self._output.read()

    def wait(self, limit_s: float) -> int:
        """Return its exit status, or fail after the limit; -9 if its host was killed."""
        if self._status is None:
            self._asked.settimeout(limit_s)
            try:
                self._status = int(self._asked.recv(100) or -signal.SIGKILL)
            except TimeoutError:
                pytest.fail(f"no end after {limit_s} s:\n{self.text()}")
        return self._status

    def wait_for(self, words: str, limit_s: float, times: int = 1) -> None:
        """Return once it has printed these words so many times, or fail after the limit."""
        end_s = time.monotonic() + limit_s
        while self.text().count(words) < times:
            if time.monotonic() > end_s or self._ended():
                pytest.fail(f"{words!r} was not printed {times} times:\n{self.text()}")
            time.sleep(0.05)

    def _ended(self) -> bool:
        self._asked.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            self._status = int(self._asked.recv(100) or -signal.SIGKILL)
        return self._status is not None


class Cluster:
    """The hosts node1, node2, ... of one test.

    Args:
        count: how many.
        shared: a folder that all hosts see under this path.

    Attributes:
        shared: the same.
        names: of the hosts.
    """

    def __init__(self, count: int, shared: Path) -> None:
        self.shared = shared
        self.names = [f"node{number}" for number in range(1, count + 1)]
        self._leaving = contextlib.ExitStack()
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self._leaving.callback(shutil.rmtree, self._folder, ignore_errors=True)
        (self._folder / "own").mkdir()
        lines = [f"{self.address(name)} {name}" for name in self.names]
        (self._folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        self._first: dict[str, int] = {}
        self._pipes: dict[str, subprocess.Popen[str]] = {}

    def begin(self) -> None:
        """Make the hosts and what joins them."""
        self._switch = self._held("switch", ["unshare", "--net", "sh", "-c", "echo made; exec cat"])
        self._in_switch("ip link add bridge type bridge")
        self._in_switch("ip link set bridge up")
        apart = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        for name in self.names:
            paths = map(str, [self.shared, self._folder, ROOT, sys.prefix, sys.base_prefix])
            words = [name, self.address(name), self._folder, *paths]
            program = [sys.executable, "-I", "-S", str(_FIRST_PROCESS), *map(str, words)]
            outer = self._held(name, ["unshare", *apart, *program])
            (first,) = psutil.Process(outer).children()
            self._first[name] = first.pid
            _run(f"ip link add eth0 netns {first.pid} type veth peer name {name} netns {self._switch}")
            self._in_switch(f"ip link set {name} master bridge up")
            self._tell(name, "ready\n")

    def end(self) -> None:
        """Kill all hosts, and leave nothing."""
        self._leaving.close()

    def run(
        self,
        ranks_per_host: Sequence[int],
        *command: str | Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        timeout_s: float = 90,
    ) -> tuple[int, str]:
        """Run Python on ranks of several hosts; return the exit status and all that was printed.

        Args:
            ranks_per_host: how many ranks each host has, in turn.
            command: the arguments of Python.
            options: options of mpiexec itself.
            env: variables to add to the environment of all ranks.
            timeout_s: the test fails after this time.
        """
        with self.running(ranks_per_host, *command, options=options, env=env) as job:
            return job.wait(timeout_s), job.text()

    @contextlib.contextmanager
    def running(
        self,
        ranks_per_host: Sequence[int],
        *command: str | Path,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Job]:
        """Run Python on ranks of several hosts while the test looks on.

        The arguments are those of `run`. The launcher runs on node1.
        """
        env = dict(env or {})
        counts = zip(self.names, ranks_per_host, strict=False)
        places = ",".join(f"{name}:{count}" for name, count in counts if count)
        exported = [word for name in env if not name.startswith("PRTE_") for word in ("-x", name)]
        where = ["--map-by", "slot:oversubscribe", "--host", places, "-n", str(sum(ranks_per_host))]
        words = [launcher(), *options, *exported, *where, sys.executable, *command]
        with self.starting(self.names[0], words, env) as job:
            yield job

    @contextlib.contextmanager
    def starting(
        self, name: str, words: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> Iterator[Job]:
        """Run a command on one host."""
        with (
            tempfile.TemporaryFile("w+", errors="replace") as output,
            open(os.devnull) as nothing,  # noqa: PTH123 - a descriptor is wanted
        ):
            streams = (nothing.fileno(), output.fileno(), output.fileno())
            with (
                run_on(str(self._folder), name, [*map(str, words)], streams, env or {}) as asked,
                # A file of its own place: `text` must not move where the job writes.
                open(f"/proc/self/fd/{output.fileno()}", errors="replace") as reader,  # noqa: PTH123
            ):
                yield Job(asked, reader)

    def rank(self, number: int, variable: str = _RANK) -> psutil.Process:
        """Return the process of a rank of the running job.

        Args:
            number: its rank.
            variable: where the launcher has written it in the environment.
        """
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if process.environ().get(variable) == str(number) and variable not in parent.environ():
                    return process
        raise ProcessLookupError(f"no process is rank {number}")

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of all ranks that run, on all hosts."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if _RANK in process.environ() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def first_processes(self) -> list[int]:
        """Return the first process of each host; nothing runs on a host without it."""
        return list(self._first.values())

    def cut(self, number: int) -> None:
        """Cut the link of a host."""
        self._in_switch(f"ip link set {self.names[number - 1]} down")

    def restore(self, number: int) -> None:
        """Mend the link of a host."""
        self._in_switch(f"ip link set {self.names[number - 1]} up")

    def slow(self, number: int, rate: str) -> None:
        """Limit the link of a host in both directions.

        Args:
            number: of the host, from 1.
            rate: as tc has it, such as 100mbit.
        """
        limit = f"root tbf rate {rate} burst 64kb latency 50ms"
        name = self.names[number - 1]
        self._in_switch(f"tc qdisc replace dev {name} {limit}")
        _run(f"nsenter --net=/proc/{self._first[name]}/ns/net tc qdisc replace dev eth0 {limit}")

    def kill(self, number: int) -> None:
        """Kill everything on a host at once; its network interface goes with it."""
        os.kill(self._first[self.names[number - 1]], signal.SIGKILL)

    def processes(self) -> Iterator[psutil.Process]:
        """Go through all processes of all hosts."""
        for first in self._first.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from psutil.Process(first).children(recursive=True)

    def _held(self, name: str, words: Sequence[str]) -> int:
        """Start a process that ends with this one, and wait until it is in its namespaces."""
        settings = {
            "PRTE_MCA_prte_tmpdir_base": "/tmp",
            "HOME": "/tmp",
            "PRTE_MCA_plm_ssh_agent": f"{sys.executable} -I -S {_REMOTE_SHELL} {self._folder}",
            "PRTE_MCA_prte_if_include": "eth0",
            "OMPI_MCA_btl_tcp_if_include": "eth0",
        }
        process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(settings),
            start_new_session=True,
        )
        self._pipes[name] = process
        self._leaving.callback(_end, process)
        if process.stdout.readline() != "made\n":
            raise RuntimeError(f"{name} did not begin: status {process.wait(10)}")
        return process.pid

    def _tell(self, name: str, answer: str) -> None:
        process = self._pipes[name]
        process.stdin.write("\n")
        process.stdin.flush()
        if process.stdout.readline() != answer:
            raise RuntimeError(f"{name} has no network: status {process.wait(10)}")

    def _in_switch(self, words: str) -> None:
        _run(f"nsenter --net=/proc/{self._switch}/ns/net {words}")

    @staticmethod
    def address(name: str) -> str:
        """Return the address of a host; all hosts know each other by their names, too."""
        return f"10.77.0.{name.removeprefix('node')}"


@contextlib.contextmanager
def hosts(count: int, shared: Path) -> Iterator[Cluster]:
    """Make hosts for a `with` block; at its end nothing of them is left.

    Args:
        count: how many.
        shared: a folder that all hosts see under this path.
    """
    if (reason := _impossible()) is not None:
        pytest.skip(reason)
    cluster = Cluster(count, shared)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()


def _impossible() -> str | None:
    """Return why this machine can have no hosts within; None if it can."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if os.getuid() != 0:
        return "only root may make network namespaces"
    for tool in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "bridge", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else None


def _sweep() -> None:
    """Remove the folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.removeprefix(_PREFIX).partition("-")[0])):
            shutil.rmtree(folder, ignore_errors=True)


def _run(words: str) -> None:
    subprocess.run(words.split(), check=True, capture_output=True)


def _end(process: subprocess.Popen[str]) -> None:
    process.stdin.close()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    process.stdout.close()
