"""Short texts between any two ranks, whenever there is something to say: the post beside the doors.

A door (`Endpoint`) carries the vectors of one training between ranks that have agreed on it. Mail needs no
agreement: any rank writes to any other, and who reads looks at what has come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Lost

__all__ = ["DivisibleWorld", "Mail", "PartWorld"]


class Mail(Protocol):
    """One rank's letter box, and its way to all others."""

    def send(self, peer: int, text: str) -> None:
        """Send a text; letters of one rank to another arrive in their order."""

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next letter with its sender; None if none came within `timeout_s`.

        Where deaths are survived each is told once.
        """

    def close(self) -> None:
        """Let everything leave that was sent; all ranks call it, with no letter under way."""


class PartWorld(RankWorld, Protocol):
    """A part of other ranks."""

    def give_up(self) -> None:
        """Let nobody wait any more where all of these ranks are needed, as one of them is dead."""

    def close(self) -> None:
        """Give back what was taken to cut it out (collective)."""


class DivisibleWorld(RankWorld, Protocol):
    """Ranks that can be cut into parts, and can write to each other."""

    def mail(self) -> Mail:
        """Open this rank's letter box (collective)."""

    def part(self, ranks: Sequence[int]) -> PartWorld:
        """Return the world of these ranks, of which this one is, numbered anew (collective over them)."""
