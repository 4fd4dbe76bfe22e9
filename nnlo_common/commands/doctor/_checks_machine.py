"""Findings about the hosts and the installation on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnlo_common.cluster._hosts import Place, crowded_hosts
from nnlo_common.cluster._threads import threads_chosen, threads_per_rank
from nnlo_common.commands.doctor._finding import Finding, note, ok, problem
from nnlo_common.commands.doctor._rank_report import RankReport

__all__ = [
    "check_agreement",
    "check_cores",
    "check_forking",
    "check_frameworks",
    "check_horovod",
    "check_locks",
    "check_threads",
]

_MUST_AGREE = ("nnlo", "python", "numpy", "mpi4py", "torch", "keras", "tensorflow", "jax")


def check_agreement(reports: Sequence[RankReport]) -> Finding:
    """Check that every rank runs the same software."""
    first = reports[0]
    for rank, report in enumerate(reports):
        for name in _MUST_AGREE:
            here, there = first.versions.get(name), report.versions.get(name)
            if here != there:
                where = f"rank {rank} on {report.place['host']}"
                return problem(
                    "same software",
                    f"{name} is {here or 'missing'} on rank 0, but {there or 'missing'} on {where}",
                    "Start every rank in the same environment: give the full path of its python.",
                )
    return ok("same software", "on every rank" if len(reports) > 1 else "only one rank to look at")


def check_cores(places: Sequence[Place], library: str = "") -> Finding:
    """Check that every rank has a core; tell how to start more ranks with this MPI library."""
    crowded = crowded_hosts(places)
    option = _option_for_more(library)
    if not crowded:
        hint = f"; to start more ranks than cores, add {option} to mpiexec" if option else ""
        return ok("cores", f"enough for every rank{hint}")
    more = f", and {len(crowded) - 1} more hosts" if len(crowded) > 1 else ""
    return note(
        "cores",
        f"{crowded[0]}{more}",
        "Ranks will wait for each other's cores: start no more ranks on a host than it has cores."
        + (f" To try it all the same: mpiexec {option} -n {len(places)} ..." if option else ""),
    )


def _option_for_more(library: str) -> str:
    """Return the option by which mpiexec starts more ranks than cores; empty: it needs none."""
    return "--oversubscribe" if library.startswith("Open MPI") else ""


def check_threads(place: Place, report: RankReport) -> Finding:
    """Check that the compute threads of all ranks fit the cores of the host."""
    fair = threads_per_rank(place.local_size, place.host_cores, place.cores)
    chosen = threads_chosen(report.environment)
    if chosen is None:
        return ok("compute threads", f"not set; each rank will use {fair}, its share of the cores")
    name, threads = chosen
    text = f"{name}={report.environment[name]}"
    if threads > fair:
        more = (
            f"{text}, but the share of a rank is {fair} ({place.local_size} ranks, {place.host_cores} cores)"
        )
        return note("compute threads", more, f"Set {name}={fair}, or unset it and let nnlo choose.")
    return ok("compute threads", f"{text}, within the rank's share of {fair}")


def check_locks(report: RankReport) -> Finding:
    """Check that HDF5 can lock files in the current and the temporary folder."""
    setting = report.environment.get("HDF5_USE_FILE_LOCKING", "")
    refused = {folder: why for folder, why in report.locks.items() if why}
    if not refused:
        return ok("file locks", f"work in {' and '.join(report.locks)}")
    text = "; ".join(f"not in {folder} ({why})" for folder, why in refused.items())
    if all(why.startswith("no writing") for why in refused.values()):
        return note("file locks", text, "Checkpoints and staged data need a folder that can be written.")
    if setting.upper() in ("FALSE", "0", "BEST_EFFORT"):
        return ok("file locks", f"{text}; HDF5_USE_FILE_LOCKING={setting}, so HDF5 works without")
    return note("file locks", text, "For HDF5 files there: export HDF5_USE_FILE_LOCKING=FALSE.")


def check_forking(start_method: str, hosts: int) -> Finding:
    """Check that data loaders do not fork if there are several hosts."""
    if start_method != "fork":
        return ok("data loaders", f"start processes by {start_method}")
    if hosts == 1:
        return ok("data loaders", "start processes by fork, which is safe on one host")
    return note(
        "data loaders",
        "start processes by fork, which can break the network of an MPI process",
        'Use num_workers=0, or multiprocessing.set_start_method("forkserver") first thing in the script.',
    )


def check_frameworks(versions: Mapping[str, str | None], back_end: str = "") -> Finding:
    """Check that PyTorch or Keras is installed, and the back end that Keras will run on.

    Args:
        versions: of the packages; None: not installed.
        back_end: the one that was chosen for Keras; empty: none, so Keras takes tensorflow.
    """
    found = [
        f"{name} {versions[name]}" for name in ("torch", "keras", "tensorflow", "jax") if versions.get(name)
    ]
    told = ", ".join(found)
    taken = back_end or "tensorflow"
    if versions.get("keras") and not versions.get(taken):
        here = [name for name in ("torch", "tensorflow", "jax") if versions.get(name)]
        install, take = "" if here else "pip install 'nnlo[torch]', and ", " or ".join(here) or "torch"
        return note(
            "frameworks",
            f"{told}; Keras takes {taken}, which is not installed",
            f"{install}export KERAS_BACKEND={take} in each shell that starts a script.",
        )
    if versions.get("torch") or versions.get("keras"):
        return ok("frameworks", told)
    text = f"neither torch nor keras{', only ' + told if found else ''}"
    return note(
        "frameworks", text, "pip install 'nnlo[torch]' or 'nnlo[keras]'; the NumPy core works without."
    )


def check_horovod(versions: Mapping[str, str | None]) -> Finding:
    """Report whether Horovod can do the reductions inside a group of ranks."""
    version = versions.get("horovod")
    return ok("Horovod", f"{version}, usable inside groups" if version else "not installed, and not needed")
