"""Output of the doctor: a page for people, or JSON for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

from nnlo_common.cluster._hosts import Place, place_table, text_table
from nnlo_common.commands.doctor._finding import Finding, Status, worst
from nnlo_common.commands.doctor._link_speed import LinkSpeed
from nnlo_common.commands.doctor._units import bandwidth, seconds, signed_seconds

__all__ = ["Examination", "as_json", "as_page", "verdict"]

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
