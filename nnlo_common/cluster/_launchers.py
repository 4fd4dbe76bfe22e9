"""Launchers: tell which one started this process from the environment variables it left; pure.

Two things make this more than a lookup. Launchers nest: inside a Slurm job, `mpiexec` starts its helpers with
`srun`, so the innermost launcher is looked for first. And Slurm writes `SLURM_NTASKS` into every shell of an
allocation: only a task of a job step was really started N times, while `python train.py` in an `salloc`
shell, in an `sbatch` script or under `srun --pty bash` is one plain process.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "Launcher", "find_launch", "is_child"]


class Launcher(enum.Enum):
    """Who starts the processes of a job; the values are for people."""

    OPEN_MPI = "Open MPI's mpiexec"
    MVAPICH = "MVAPICH's mpirun"
    JSRUN = "jsrun"
    PMI = "an MPICH-style mpiexec"
    SRUN = "srun"
    PMIX = "a PMIx launcher"


# Innermost first: a launcher of an MPI library may run below a batch system, never the other way round.
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
    """What a launcher says about the job.

    Attributes:
        launcher: which one it was.
        size: how many processes it started; None if it does not say.
        rank: the number of this process among them; None if it does not say.
        found: the variables this was read from, as `NAME=value`.
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
        The innermost launcher; None for a process that a person or a script started.

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
    """Say whether another Python process has made this one: it then has a rank's environment, but is none."""
    multiprocessing = sys.modules.get("multiprocessing.process")  # loaded in such a child, and slow to load
    return multiprocessing is not None and multiprocessing.parent_process() is not None
