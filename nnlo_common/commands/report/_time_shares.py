"""Shares of a rank's time, by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TimeShares"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Where the time of a rank went.

    Attributes:
        seconds: by kind, see `nnlo_common.base._spans.KINDS`.
        batch_s: the median over epochs of the time of a batch: its data and its gradient; None: unknown.

    Example:
        >>> TimeShares(seconds={"compute": 3.0, "wait": 1.0}, batch_s=None).share("wait", "idle")
        0.25
    """

    seconds: Mapping[str, float]
    batch_s: float | None

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.seconds.values())

    def share(self, *kinds: str) -> float:
        """Return the part of the time that went into some kinds, from 0 to 1."""
        found = sum(self.seconds.get(kind, 0.0) for kind in kinds)
        return found / self.total_s if self.total_s else 0.0
