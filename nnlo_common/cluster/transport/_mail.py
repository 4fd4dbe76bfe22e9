"""Mail: short texts between any two ranks at any time.

An `Endpoint` carries the vectors of one training along links agreed on beforehand. Mail needs no links: any
rank sends to any other, and the receiver polls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from nnlo_common.cluster.transport._endpoint import RankWorld
from nnlo_common.protocol import Lost

__all__ = ["DivisibleWorld", "Mail", "PartWorld"]


class Mail(Protocol):
    """One rank's mailbox."""

    def send(self, peer: int, text: str) -> None:
        """Send a text; texts from one rank to another arrive in order."""

    def receive(self, timeout_s: float | None = None) -> tuple[int, str] | Lost | None:
        """Return the next sender and text; None after `timeout_s`.

        Where ranks survive deaths, each death is returned once, as `Lost`.
        """

    def close(self) -> None:
        """Complete all sends; all ranks call it, after every text was received."""


class PartWorld(RankWorld, Protocol):
    """A subset of the ranks of another world."""

    def part(self, ranks: Sequence[int]) -> PartWorld:
        """Return the world of these ranks, this one among them, renumbered from 0 (collective over them)."""

    def revoke(self) -> None:
        """End every collective wait of these ranks with an error, because one of them is dead."""

    def close(self) -> None:
        """Release the resources of `DivisibleWorld.part` (collective)."""


class DivisibleWorld(RankWorld, Protocol):
    """Ranks that can be split into parts and can send each other mail."""

    def mail(self) -> Mail:
        """Open this rank's mailbox (collective)."""

    def part(self, ranks: Sequence[int]) -> PartWorld:
        """Return the world of these ranks, this one among them, renumbered from 0 (collective over them)."""
