"""Launchers: find the one that started this process from its environment variables; pure.

A plain lookup would be wrong for two reasons. Launchers nest: inside a Slurm job, `mpiexec` starts its
helpers with `srun`, so the innermost launcher is searched first. And Slurm sets `SLURM_NTASKS` in every shell
of an allocation, but only a task of a job step was started N times: `python train.py` in an `salloc` shell,
in an `sbatch` script or under `srun --pty bash` is one plain process.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "Launcher", "find_launch", "is_child"]


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
    text = env.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _shown(env: Mapping[str, str], *names: str) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names if name in env)


def is_child() -> bool:
    """Whether `multiprocessing` started this process, which inherits a rank's environment but is no rank."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # loaded in every child; slow to import
    return multiprocessing is not None and multiprocessing.parent_process() is not None
