"""Finding: the outcome of one check, with its severity and what to do."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Finding", "Status", "note", "ok", "problem", "worst"]


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
