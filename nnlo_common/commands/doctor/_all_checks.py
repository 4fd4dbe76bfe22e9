"""All checks: from the reports of the ranks to findings; pure, so that a test can invent any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nnlo_common.cluster._connecting import Launch
from nnlo_common.cluster._hosts import Place
from nnlo_common.commands.doctor import _checks_links as on_links
from nnlo_common.commands.doctor import _checks_machine as on_machine
from nnlo_common.commands.doctor import _checks_mpi as on_mpi
from nnlo_common.commands.doctor._finding import Finding
from nnlo_common.commands.doctor._link_speed import LinkSpeed
from nnlo_common.commands.doctor._rank_report import RankReport

__all__ = ["judge", "merge_hosts"]


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
            on_links.check_messages(links, places[0].host, len(places)),
            on_links.check_clocks(links),
        ]
    return (*_about_mpi(launch, failure, reports[0]), *between, *_about_machines(reports, places))


def _about_mpi(launch: Launch | None, failure: str, first: RankReport) -> list[Finding]:
    findings = [
        on_mpi.check_launcher(launch, first.mpi),
        on_mpi.check_library(first.mpi, failure, first.versions.get("mpi4py")),
        on_mpi.check_wheels(first.versions),
        on_mpi.check_mpiexec(*first.mpiexec),
    ]
    if first.mpi is not None:
        checks = (on_mpi.check_threads_allowed, on_mpi.check_ulfm, on_mpi.check_cuda)
        findings += [check(first.mpi) for check in checks]
    return findings


def _about_machines(reports: Sequence[RankReport], places: Sequence[Place]) -> list[Finding]:
    homes = {place.host: place for place in reversed(places)}  # the first rank of each host
    threads = {host: on_machine.check_threads(home, reports[home.rank]) for host, home in homes.items()}
    locks = {host: on_machine.check_locks(reports[home.rank]) for host, home in homes.items()}
    return [
        on_machine.check_agreement(reports),
        on_machine.check_cores(places, "" if (mpi := reports[0].mpi) is None else mpi.library),
        merge_hosts(threads),
        merge_hosts(locks),
        on_machine.check_forking(reports[0].start_method, len(homes)),
        on_machine.check_frameworks(reports[0].versions, reports[0].environment.get("KERAS_BACKEND", "")),
        on_machine.check_horovod(reports[0].versions),
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
