"""Report of one rank on itself, its host and its installation: facts without judgement."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nnlo_common.cluster._hosts import describe_here
from nnlo_common.cluster._threads import THREAD_VARIABLES
from nnlo_common.commands._keras_back_end import chosen_back_end
from nnlo_common.training.report._facts_writer import versions

if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import World

__all__ = ["MPIFacts", "RankReport", "examine", "look_at_mpi", "try_lock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MPIFacts:
    """Facts that the MPI library reports.

    Attributes:
        library: its name and version.
        thread_level: which threads may call it.
        ulfm_built: whether it contains failure mitigation.
        ulfm: whether that is switched on.
        cuda_aware: whether it takes GPU addresses; None if it does not say.
        size: how many ranks it knows.
    """

    library: str
    thread_level: str
    ulfm_built: bool
    ulfm: bool
    cuda_aware: bool | None
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Report of one rank.

    Attributes:
        place: host, cores and GPUs, as `describe_here` gives them.
        versions: of the packages; None if not installed.
        mpi: what the MPI library says; None if it could not be loaded.
        locks: for each folder tried, why no file in it can be written and locked; empty if one can.
        environment: the variables that matter here and are set.
        start_method: how `multiprocessing` starts processes.
        mpiexec: the launcher that a shell finds, and the one beside the running Python; empty if none.
    """

    place: dict[str, int | str]
    versions: dict[str, str | None]
    mpi: MPIFacts | None
    locks: dict[str, str]
    environment: dict[str, str]
    start_method: str
    mpiexec: tuple[str, str]

    def to_text(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RankReport:
        """Return the report that `to_text` wrote."""
        facts = json.loads(text)
        facts["mpi"] = None if facts["mpi"] is None else MPIFacts(**facts["mpi"])
        facts["mpiexec"] = tuple(facts["mpiexec"])
        return cls(**facts)


def examine(mpi: MPIFacts | None, env: Mapping[str, str]) -> RankReport:
    """Report on this rank.

    Args:
        mpi: what the MPI library says.
        env: the environment variables of the process.
    """
    folders = dict.fromkeys((str(Path.cwd()), env.get("TMPDIR") or tempfile.gettempdir()))
    beside = Path(sys.executable).with_name("mpiexec")
    wanted = (*THREAD_VARIABLES, "HDF5_USE_FILE_LOCKING")
    return RankReport(
        place=describe_here(),
        versions=versions() | {"MPI library": None if mpi is None else mpi.library},
        mpi=mpi,
        locks={folder: try_lock(Path(folder)) for folder in folders},
        environment={name: env[name] for name in wanted if name in env}
        | ({"KERAS_BACKEND": back_end} if (back_end := chosen_back_end(env)) else {}),
        start_method=multiprocessing.get_start_method(allow_none=True)
        or multiprocessing.get_all_start_methods()[0],
        mpiexec=(shutil.which("mpiexec") or "", str(beside) if beside.exists() else ""),
    )


def look_at_mpi(world: World) -> MPIFacts:
    """Ask the MPI library of a joined job."""
    return MPIFacts(
        library=world.library,
        thread_level=world.thread_level,
        ulfm_built=world.ulfm_built(),
        ulfm=world.has_ulfm(),
        cuda_aware=world.cuda_aware(),
        size=world.size,
    )


def try_lock(folder: Path) -> str:
    """Lock a temporary file in a folder, as HDF5 does; return why that failed, empty if it worked."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return f"no locks: {error.strerror}"
    except OSError as error:
        return f"no writing: {error.strerror}"
    return ""


if __name__ == "__main__":
    # Run by `nnlo doctor` as a separate process: some libraries kill a process that they cannot start in.
    from nnlo_common.cluster.transport._mpi4py import World

    print(json.dumps(asdict(look_at_mpi(World()))))
